"""Processes that die in the middle of a switch of a shared device, when others have given it back for them."""

import asyncio
from pathlib import Path

import pytest

import asyncrl
from asyncrl.observe.steps import MemoryLine, read_memory, read_steps
from tests.integration.conftest import assert_balanced, kill

CASES = {
    "colocated": (
        {},
        [("generator-0", "learner", "rollout"), ("inference-0", "generator-0", "inference"), ("learner", "inference-0", "train")],
    ),
    "hybrid": (
        {"broadcast__medium": {"kind": "shared_storage"}},
        [("generator-0", "learner", "rollout"), ("learner", "generator-0", "train")],
    ),
}
"""Settings; and who is to take the device and dies, when this other one has given it back for this phase."""


async def _kill(run_folder: Path, who: str, after: str, phase: str) -> None:
    """Wait for the next line of the memory timeline that says so, and kill at once."""

    def lines() -> list[MemoryLine]:
        return [line for line in read_memory(run_folder) if (line.process, line.phase) == (after, phase)]

    seen = len(lines())
    async with asyncio.timeout(200):
        while len(lines()) == seen:
            await asyncio.sleep(0.001)
    kill(run_folder, who)


@pytest.mark.parametrize("kind", CASES)
async def test_every_group_is_accounted_for_after_deaths_in_the_middle_of_switches(tiny, judged, kind):
    settings, kills = CASES[kind]
    config = tiny(
        num_steps=1000, buffer__max_staleness=1, eval__at_start=False, placement={"kind": kind}, **settings,
        supervision={"stall_timeout_s": 100.0, "backoff_s": 0.1, "max_deaths": 10}, **(judged if kind == "colocated" else {}),
    )  # fmt: skip
    async with asyncrl.Run(config) as run:
        left, next_at = iter(kills), 2
        async for report in run.steps():
            if report.version < next_at:
                continue
            if (death := next(left, None)) is None:
                break
            await _kill(run.run_folder, *death)
            next_at = len(read_steps(run.run_folder)) + 3
        status = await run.drain()
    assert status.phase == "stopped", status.reason
    deaths = {process.name: process.deaths for process in status.processes}
    assert {name: number for name, number in deaths.items() if number} == {who: 1 for who, _, _ in kills}
    assert status.groups["trained"] == status.version * 4
    assert_balanced(status)
