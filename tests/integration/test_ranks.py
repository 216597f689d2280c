"""A run whose learner has two ranks: real processes, real collectives, and a rank that is killed."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from transformers import AutoModelForCausalLM

import asyncrl
from asyncrl.buffer.ledger.reader import LedgerReader
from asyncrl.control.lifecycle.pid_file import read_pids
from tests.integration.conftest import NO_MODEL

RANKS = {"learner__ranks": 2, "eval__at_start": False, "eval__at_end": False}


@pytest.fixture
def two_ranks(tiny, tmp_path):
    """Make configs of two ranks whose rewards differ within any group, so that every step has something to learn."""
    (tmp_path / "my_reward.py").write_text("def mixed(prompt, text):\n    return float(sum(map(ord, text)) % 5)\n")
    functions = [{"kind": "python", "path": f"{tmp_path / 'my_reward.py'}:mixed"}]

    def make(**overrides):
        return tiny(**RANKS, reward__functions=functions, **overrides)

    return make


def _ranks(run_folder):
    """Pids of the learner's ranks: rank 0 is recorded as the learner, the others are its children."""
    learner = read_pids(run_folder).processes["learner"].pid
    return [learner, *(child.pid for child in psutil.Process(learner).children())]


async def _ranks_at_rest(run):
    """As `_ranks`, of a run that is held meanwhile: a learner that has come to its end has none."""
    await run.pause()
    ranks = _ranks(run.run_folder)
    await run.resume()
    return ranks


def _weights(folder):
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def _trained_groups(run_folder):
    with LedgerReader(run_folder / "ledger.sqlite") as ledger:
        return [group_id for step in ledger.steps() for group_id in step.group_ids]


@pytest.mark.timeout(300)
async def test_two_ranks_train_publish_and_checkpoint(two_ranks):
    async with asyncrl.Run(two_ranks(num_steps=20)) as run:
        followers = set()
        async for report in run.steps():
            if report.version == 1:
                followers = set((await _ranks_at_rest(run))[1:])
        status = await run.status()
    assert status.phase == "stopped", status.reason
    assert status.version == 20
    assert len(followers) == 1
    assert not any(map(psutil.pid_exists, followers))
    trained, started = _weights(status.checkpoint), _weights(run.run_folder / "model")
    assert trained.keys() == started.keys()
    assert any((trained[name] != started[name]).any() for name in trained)


@pytest.mark.timeout(300)
async def test_a_killed_rank_takes_the_others_down_and_the_run_goes_on_from_its_checkpoint(two_ranks):
    victims, before = {3: 1, 12: 0}, []
    async with asyncrl.Run(two_ranks(num_steps=24, generate__engine=NO_MODEL)) as run:
        async for report in run.steps():
            if (rank := victims.pop(report.version, None)) is not None:
                ranks = await _ranks_at_rest(run)
                os.kill(ranks[rank], signal.SIGKILL)
                before += ranks
        status = await run.status()
    assert len(before) == 4
    assert not any(map(psutil.pid_exists, before))
    assert status.phase == "stopped", status.reason
    assert status.version == 24
    assert {process.name: process.deaths for process in status.processes}["learner"] == 2
    trained = _trained_groups(run.run_folder)
    assert len(trained) == len(set(trained)) == 24 * 4
