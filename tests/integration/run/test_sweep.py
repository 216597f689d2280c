"""Sweeps end to end: killed and resumed, over real runs."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asyncrl.cli import app
from asyncrl.clock import SystemClock
from asyncrl.observe.steps import read_steps
from asyncrl.sweep.grid import load_sweep
from asyncrl.sweep.results import read_results
from asyncrl.sweep.runner import run_sweep
from tests.integration.conftest import NO_EVALUATION, NO_MODELS, trained_groups, written

COPY = '["python", "-c", "import shutil, sys; shutil.copy(*sys.argv[1:])", "given-{seed}.json", "{out}/result.json"]'
ANOTHER = f'[[external]]\nname = "another"\ncommand = {COPY}\n'


async def _killed_at_work(folder: Path, cell: Path) -> None:
    """Run the sweep in a process of its own and kill it and its run while that is at work."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "asyncrl", "sweep", "run", str(folder), stdout=subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(120):
            while len(read_steps(cell)) < 2:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), 0.05)
                assert process.returncode is None, "it ended before it could be killed"
        pid = json.loads((cell / "api.json").read_text())["pid"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    with contextlib.suppress(ProcessLookupError):  # it ends by itself, too
        os.kill(pid, signal.SIGKILL)


def test_a_killed_sweep_goes_on_and_every_cell_is_there_once(tiny, tmp_path):
    written(tiny(checkpoint__every_steps=1, **NO_EVALUATION | NO_MODELS), tmp_path / "base.toml")
    (tmp_path / "given-0.json").write_text('{"seconds": [1.0, 2.0], "rewards": [0.2, 0.6]}')
    (tmp_path / "sweep.toml").write_text(
        'base = "base.toml"\nseeds = 1\nset = { num_steps = 40 }\nmetrics = ["reward"]\n' + ANOTHER
        + '[[axes]]\nname = "eta"\nchoices = { sync = { "buffer.max_staleness" = 0 } }\n'
    )  # fmt: skip
    sweep = load_sweep(tmp_path)
    (cell,) = [cell for cell in sweep.cells if not cell.command]
    folder = tmp_path / "cells" / cell.id
    asyncio.run(_killed_at_work(tmp_path, folder))
    shown = CliRunner().invoke(app, ["sweep", "status", str(tmp_path)])
    assert "of 40" in shown.output, shown.output

    asyncio.run(run_sweep(sweep, SystemClock(), print, jobs=2, resumed=True))
    printed = CliRunner().invoke(app, ["sweep", "report", str(tmp_path)])
    assert (tmp_path / "RESULTS.md").read_text() + "\n" == printed.output

    lines = {line.arm: line for line in read_results(tmp_path / "results.jsonl")}
    assert lines.keys() == {"sync", "another"}
    assert (lines["sync"].attempts, lines["sync"].outcome.steps, lines["sync"].outcome.fault) == (2, 40, "")
    assert lines["sync"].outcome.staleness_max == 0
    assert len(trained_groups(folder)) == 40 * 4


@pytest.mark.parametrize(("seeds", "models", "change", "verdict"), [
    (1, {}, "", "not told apart"), (6, NO_MODELS, '"generate.engine.mean_tokens" = 2.0', "lower"),
])  # fmt: skip
def test_a_null_control_is_not_told_apart_and_answers_that_are_too_short_are(tiny, tmp_path, seeds, models, change, verdict):
    """Runs without staleness are the same bit for bit, so the null control, which has models, is exact."""
    settings = NO_EVALUATION | models | {
        "num_steps": 10, "buffer__max_staleness": 0, "checkpoint__every_steps": 0, "learner__learning_rate": 1e-2,
        "reward__functions": [{"kind": "format_check", "pattern": ".{3,}"}],
    }  # fmt: skip
    written(tiny(**settings), tmp_path / "base.toml")
    (tmp_path / "sweep.toml").write_text(
        f'base = "base.toml"\nseeds = {seeds}\nsame_settings = true\nmetrics = ["reward"]\n[[axes]]\nname = "control"\n'
        f"[axes.choices]\nfirst = {{}}\nother = {{ {change} }}\n"
    )
    asyncio.run(run_sweep(load_sweep(tmp_path), SystemClock(), print, jobs=2))
    printed = CliRunner().invoke(app, ["sweep", "report", str(tmp_path)]).output
    (compared,) = re.findall(r"^\| other \| reward.*$", printed, re.MULTILINE)
    assert compared.endswith(f"| {verdict} |"), printed
    rewards = {arm: {} for arm in ("first", "other")}
    for line in read_results(tmp_path / "results.jsonl"):
        rewards[line.arm][line.seed] = line.outcome.reward
    assert (rewards["first"] == rewards["other"]) == (not change), printed
