"""Rank 0 and its other ranks' processes: whatever goes wrong, none is left. Whole runs: tests/integration/test_ranks.py."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from asyncrl.clock import SystemClock
from asyncrl.config.algorithm import LearnerConfig
from asyncrl.config.run import RunConfig
from asyncrl.learner.crew import Crew
from asyncrl.learner.worker import LearnerWorker

THREE_RANKS = RunConfig(learner=LearnerConfig(ranks=3))
LOST_RANK = """
import os, subprocess, sys
from asyncrl.config.algorithm import LearnerConfig
from asyncrl.config.run import RunConfig
from asyncrl.learner.crew import Crew
from asyncrl.learner.rank_group import guest_store, joined_ranks

if len(sys.argv) > 1:
    with joined_ranks(1, 2, guest_store(sys.argv[1], 2, 60.0), "cpu", 60.0):
        os._exit(0)

def start(rank, address):
    started.append(subprocess.Popen([sys.executable, __file__, address], stdin=subprocess.PIPE))
    return started[-1]

started = []
crew = Crew(RunConfig(learner=LearnerConfig(ranks=2)), start)
crew.muster()
started[0].wait()
crew.close(all_well=True)
assert started[0].stdin.closed
print("closed", flush=True)
os._exit(0)
"""


class Idlers:
    """Starts processes that do nothing until their input ends; the one of rank `fails_at` cannot be started."""

    def __init__(self, fails_at: int = 0) -> None:
        self.started: list[subprocess.Popen[bytes]] = []
        self._fails_at = fails_at

    def start(self, rank: int, address: str) -> subprocess.Popen[bytes]:
        del address
        if rank == self._fails_at:
            raise OSError("no process")
        self.started.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL))
        return self.started[-1]


def test_where_a_rank_cannot_be_started_those_that_were_are_ended():
    idlers = Idlers(fails_at=2)
    with pytest.raises(OSError, match="no process"):
        Crew(THREE_RANKS, idlers.start)
    assert [process.returncode for process in idlers.started] == [-9]


def test_a_rank_that_was_lost_is_no_hindrance_to_the_end(tmp_path):
    program = tmp_path / "rank.py"
    program.write_text(LOST_RANK)
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False, timeout=100)
    assert ended.stdout == "closed\n", ended.stderr


async def test_a_learner_that_is_cancelled_as_it_closes_ends_its_other_ranks(tmp_path):
    for loop_turns in range(1, 6):
        idlers = Idlers()
        worker = LearnerWorker(THREE_RANKS, tmp_path, None, SystemClock(), None, Crew(THREE_RANKS, idlers.start))
        async with asyncio.TaskGroup() as group:
            closing = group.create_task(worker.close(all_well=False))
            for _ in range(loop_turns):
                await asyncio.sleep(0)
            closing.cancel()
        assert [process.wait(30) for process in idlers.started] == [-9, -9]
