"""Whole runs through the Python API: real processes, real sockets, a real model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import asyncrl
from asyncrl.buffer.ledger.reader import LedgerReader
from asyncrl.schema.status import RunStatus
from tests.integration.conftest import NO_MODEL

pytestmark = pytest.mark.timeout(240)


async def _finish(run: asyncrl.Run) -> tuple[list[asyncrl.StepReport], RunStatus]:
    reports = [report async for report in run.steps()]
    return reports, await run.status()


def _num_trained(run_folder: Path) -> int:
    """Number of groups that were trained, none of them twice."""
    with LedgerReader(run_folder / "ledger.sqlite") as ledger:
        trained = [group_id for step in ledger.steps(last=10_000) for group_id in step.group_ids]
    assert len(trained) == len(set(trained))
    return len(trained)


def _balanced(status: RunStatus) -> bool:
    groups = dict(status.groups)
    return groups.pop("issued") == sum(groups.values())


async def test_a_run_trains_every_step_and_leaves_what_it_promises(tiny):
    async with asyncrl.Run(tiny()) as run:
        reports, status = await _finish(run)
        evaluations = await run.evaluations()
    assert [report.version for report in reports] == [1, 2, 3, 4, 5]
    assert max(report.staleness_max for report in reports) <= 2
    assert status.phase == "stopped", status.reason
    assert status.groups["trained"] == 5 * 4
    assert _balanced(status)
    assert [evaluation.version for evaluation in evaluations] == [0, 5]
    assert AutoModelForCausalLM.from_pretrained(status.checkpoint).config.hidden_size == 32
    assert AutoTokenizer.from_pretrained(status.checkpoint)("1+2=")["input_ids"]
    names = {path.name for path in run.run_folder.iterdir()}
    assert {"reward.png", "timeline.png", "metrics.jsonl", "steps.jsonl", "eval.jsonl", "ledger.sqlite", "config.toml"} <= names
    assert "api.json" not in names
    metrics = [json.loads(line) for line in (run.run_folder / "metrics.jsonl").read_text().splitlines()]
    assert metrics


async def test_another_process_can_pause_resume_checkpoint_and_drain_a_run(tiny):
    settings = {"eval__at_start": False, "eval__at_end": False, "generate__engine": NO_MODEL}
    async with asyncrl.Run(tiny(num_steps=10_000, **settings)) as run:
        async with asyncrl.connect(run.run_folder) as guest:
            steps = guest.steps()
            await anext(steps)
            paused = await guest.pause()
            assert paused.phase == "paused"
            await asyncio.sleep(1.0)
            assert (await run.status()).version == paused.version
            await guest.resume()
            async with asyncio.timeout(60):
                async for report in steps:
                    if report.version > paused.version + 1:
                        break
            folder = await guest.checkpoint()
            assert AutoModelForCausalLM.from_pretrained(folder)
            ended = await guest.drain()
        assert ended.phase == "stopped"
        assert _balanced(ended)


async def test_a_cancelled_run_leaves_nothing_behind(tiny):
    async def train() -> None:
        async with asyncrl.Run(tiny(num_steps=10_000, generate__engine=NO_MODEL)) as run:
            async for _ in run.steps():
                started.set()

    started = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(train())
        await asyncio.wait_for(started.wait(), 120)
        task.cancel()


async def test_killed_processes_are_replaced_and_the_run_finishes(tiny, recorded_pids):
    victims = {3: "generator-0", 6: "reward-0", 9: "learner"}
    deaths = dict.fromkeys(victims.values(), 1)
    num_steps = 60  # many more than are made before a report is heard
    async with asyncrl.Run(tiny(num_steps=num_steps, generate__num_workers=2, eval__at_start=False, eval__at_end=False)) as run:
        async for report in run.steps():
            if victim := victims.pop(report.version, None):
                os.kill(recorded_pids(run.run_folder)[victim], signal.SIGKILL)
        status = await run.status()
    assert status.phase == "stopped", status.reason
    assert status.version == num_steps
    assert _balanced(status)
    assert {process.name: process.deaths for process in status.processes if process.deaths} == deaths
    assert _num_trained(run.run_folder) == num_steps * 4


async def test_a_run_killed_outright_resumes_and_trains_no_group_twice(tiny, recorded_pids):
    settings = {"eval__at_start": False, "eval__at_end": False, "generate__engine": NO_MODEL}
    async with asyncrl.Run(tiny(num_steps=10_000, **settings)) as run:
        async for report in run.steps():
            if report.version == 5:
                break
        for pid in [json.loads((run.run_folder / "api.json").read_text())["pid"], *recorded_pids(run.run_folder).values()]:
            with contextlib.suppress(ProcessLookupError):  # the others end by themselves once the first is gone
                os.kill(pid, signal.SIGKILL)
    with LedgerReader(run.run_folder / "ledger.sqlite") as ledger:
        num_steps = len(ledger.steps(last=10_000)) + 3
    async with asyncrl.Run(tiny(num_steps=num_steps, **settings), resume=run.run_folder) as again:
        reports, status = await _finish(again)
    assert status.phase == "stopped", status.reason
    assert status.version == num_steps
    assert _balanced(status)
    assert {report.version for report in reports} == set(range(1, num_steps + 1))
    assert _num_trained(run.run_folder) == num_steps * 4


def test_a_folder_that_is_not_a_failed_start_is_not_overwritten(tiny, tmp_path):
    (tmp_path / "tiny" / "model").mkdir(parents=True)
    (tmp_path / "tiny" / "config.toml").write_text("")

    async def start() -> None:
        async with asyncrl.Run(tiny()):
            pass

    with pytest.raises(asyncrl.ConfigError, match="already holds a run"):
        asyncio.run(start())
    assert (tmp_path / "tiny" / "model").is_dir()
