"""Rewards by a function of the program that started a run, or that is connected to it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from asyncio.subprocess import PIPE

import pytest

import asyncrl
from asyncrl.buffer.ledger.reader import LedgerReader
from asyncrl.control.launch.controller_process import is_live
from asyncrl.observe.steps import read_evals, read_events
from tests.integration.conftest import NO_EVALUATION, NO_MODELS, assert_balanced, written

pytestmark = pytest.mark.timeout(240)
PROGRAM = """
import asyncio, sys, asyncrl

async def main(config, kind):
    async with asyncrl.Run(config, reward=lambda prompt, text: len(text) % 3.0, detached=kind == "detached") as run:
        async for step in run.steps():
            print(step.version, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""
OFF = NO_EVALUATION | NO_MODELS
BEATS = {"supervision__heartbeat_s": 0.2, "supervision__heartbeat_timeout_s": 4.0}
SLACK_S = 10.0
"""For a loaded machine."""


async def test_what_a_caller_s_function_raises_fails_its_samples_and_is_told(tiny):
    def reward(prompt: asyncrl.Prompt, text: str) -> float:
        raise ValueError("no judge today")

    async with asyncrl.Run(tiny(**OFF, num_steps=4), reward=reward) as run:
        with pytest.raises(asyncrl.RunError, match="no judge today"):
            await run.wait()
    with pytest.raises(asyncrl.ConfigError, match="give the function"):
        asyncrl.Run(resume=run.run_folder)


def by_length(prompt: asyncrl.Prompt, text: str) -> float:
    return len(text) % 3.0


@pytest.mark.parametrize("kind", ["owned", "detached"])
async def test_a_run_whose_program_is_killed_ends_and_is_resumed_or_waits_for_another(tiny, tmp_path, kind):
    config = written(tiny(**OFF | BEATS | {"eval__at_end": True}, num_steps=20), tmp_path / "tiny.toml")
    folder = tmp_path / "tiny"
    program = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, config, kind, stdout=PIPE)
    assert await program.stdout.readline() == b"1\n"
    program.kill()
    died_s = asyncrl.SystemClock().now()
    await program.wait()
    async with contextlib.AsyncExitStack() as opened, asyncio.timeout(120):
        if kind == "owned":
            while is_live(folder):
                await asyncio.sleep(0.05)
            told_s = {event.text: event.time_s for event in read_events(folder)}["the process that started the run is gone"]
            assert told_s - died_s < BEATS["supervision__heartbeat_timeout_s"] + SLACK_S
            run = await opened.enter_async_context(asyncrl.Run(resume=folder, reward=by_length))
        else:
            run = await opened.enter_async_context(asyncrl.connect(folder))
            while "waits for a program that judges" not in (status := await run.status()).waiting:
                await asyncio.sleep(0.05)
            silent_s = float(re.search(r"waits for a program that judges .*? since (\d+) s", status.waiting)[1])
            assert silent_s < BEATS["supervision__heartbeat_timeout_s"] + SLACK_S
            scoring = await opened.enter_async_context(asyncio.TaskGroup())
            scoring.create_task(run.score(by_length))
        steps = [step.version async for step in run.steps(first=19)]
        status = await run.status()
    assert (steps, [evaluation.version for evaluation in read_evals(folder)]) == ([20], [20])
    assert [process.kind for process in status.processes].count("reward") == 0
    assert_balanced(status)
    assert (status.version, status.groups["trained"]) == (20, 80)


async def test_scoring_waits_for_a_lost_caller_is_named_and_goes_on_by_another(tiny):
    config = tiny(**OFF, **BEATS, num_steps=4, reward__functions=[{"kind": "caller"}])
    asked = asyncio.Event()

    async def never(prompt: asyncrl.Prompt, text: str) -> float:
        asked.set()
        await asyncio.Event().wait()
        return 0.0

    async with asyncrl.Run(config, detached=True) as run:
        assert "waits for a program that judges" in (await run.status()).waiting
        async with asyncio.TaskGroup() as group:
            lost = group.create_task(run.score(never))
            await asked.wait()
            with pytest.raises(asyncrl.RunError, match="another program judges"):
                await run.score(never)
            assert "a program that judges" not in (await run.status()).waiting
            lost.cancel()
        async with asyncio.timeout(60):
            while "waits for a program that judges" not in (status := await run.status()).waiting:
                await asyncio.sleep(0.05)
        assert_balanced(status)
        assert status.groups["scoring"] > 0
        async with asyncrl.connect(run.run_folder) as other, asyncio.TaskGroup() as group:
            group.create_task(other.score(lambda prompt, text: float(len(text) % 3)))
            events = [event async for event in run.events("phase", "checkpoint")]
            assert [event.subject for event in events if event.kind == "phase"][-1] == "stopped"
            later = [event.seq async for event in other.events(after=events[0].seq)]
            assert later[0] == events[0].seq + 1
        assert_balanced(status := await run.status())
    assert status.groups["trained"] == 16
    assert status.groups["failed"] == 0
    ledger = LedgerReader(run.run_folder)
    assert {row.state: row.groups for row in ledger.counts()}["trained"] == 16
