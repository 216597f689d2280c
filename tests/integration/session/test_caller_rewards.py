"""Rewards by a function of the program that started a run, or that is connected to it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable

import pytest

import asyncrl
from asyncrl.control.launch.processes import is_live
from asyncrl.observe.steps import read_evals, read_events
from tests.builders import outcome_of
from tests.integration.conftest import NO_EVALUATION, NO_MODELS, assert_balanced, written

PROGRAM = """
import asyncio, sys, time, asyncrl

async def main(config, kind):
    async with asyncrl.Run(config, reward=lambda prompt, text: len(text) % 3.0, detached=kind == "detached") as run:
        async for step in run.steps():
            print(step.version, flush=True)
            time.sleep(1000)  # nothing is judged any more

asyncio.run(main(*sys.argv[1:]))
"""
OFF = NO_EVALUATION | NO_MODELS
BEATS = {"supervision__heartbeat_s": 0.2, "supervision__heartbeat_timeout_s": 4.0}
SLACK_S = 45.0
"""For a loaded machine."""
NO_JUDGE = "waits for a program that judges"


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
    async with contextlib.AsyncExitStack() as opened, asyncio.timeout(200):
        if kind == "owned":
            while is_live(folder):
                await asyncio.sleep(0.05)
            told_s = {event.text: event.time_s for event in read_events(folder)}["the process that started the run is gone"]
            assert told_s - died_s < BEATS["supervision__heartbeat_timeout_s"] + SLACK_S
            run = await opened.enter_async_context(asyncrl.Run(resume=folder, reward=by_length))
        else:
            run = await opened.enter_async_context(asyncrl.connect(folder))
            status = await when(run, lambda waiting: NO_JUDGE in waiting)
            silent_s = float(re.search(rf"{NO_JUDGE} .*? since (\d+) s", status.waiting)[1])
            assert silent_s < BEATS["supervision__heartbeat_timeout_s"] + SLACK_S
            scoring = await opened.enter_async_context(asyncio.TaskGroup())
            await one_of_two_judges_and_is_lost(run)
            scoring.create_task(run.score(by_length))
        steps = [step.version async for step in run.steps(first=19)]
        first, *_ = events = [event async for event in run.events("phase", "checkpoint")]
        assert [event.subject for event in events if event.kind == "phase"][-1] == "stopped"
        behind, *_ = [event async for event in run.events(after=first.seq)]
        assert behind.seq == first.seq + 1
        status = await run.status()
    assert (steps, [evaluation.version for evaluation in read_evals(folder)]) == ([20], [20])
    assert [process.kind for process in status.processes].count("reward") == 0
    assert_balanced(status)
    assert (status.version, status.groups["trained"], status.groups["failed"]) == (20, 80, 0)


async def one_of_two_judges_and_is_lost(run: asyncrl.RunClient) -> None:
    """Where a busy machine makes the first lost, the second takes over; one of them is refused all the same."""
    asked = asyncio.Event()

    async def never(prompt: asyncrl.Prompt, text: str) -> float:
        asked.set()
        return await asyncio.Future()

    async with asyncio.TaskGroup() as group:
        both = [group.create_task(outcome_of(run.score(never))) for _ in range(2)]
        (refused,), (judging,) = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        assert "another program judges" in str(refused.result())
        await asked.wait()
        await when(run, lambda waiting: "a program that judges" not in waiting)
        judging.cancel()
    status = await when(run, lambda waiting: NO_JUDGE in waiting)
    assert_balanced(status)
    assert status.groups["scoring"] > 0


async def when(run: asyncrl.RunClient, is_so: Callable[[str], bool]) -> asyncrl.RunStatus:
    """Wait until this is so of what a run says it waits for."""
    while not is_so((status := await run.status()).waiting):
        await asyncio.sleep(0.05)
    return status
