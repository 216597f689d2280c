"""Sweeps end to end: killed and resumed, over real runs; and what they claim of arms that do or do not differ."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
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

pytestmark = pytest.mark.timeout(240)
BANDIT = str(Path(__file__).with_name("bandit_cell.py"))


def external(name: str, rate: float) -> str:
    return f'[[external]]\nname = "{name}"\ncommand = ["python", "{BANDIT}", "{rate}", "{{seed}}", "{{out}}"]\n'


def run(folder: Path, *, resumed: bool = False, jobs: int = 1) -> None:
    asyncio.run(run_sweep(load_sweep(folder), SystemClock(), print, jobs=jobs, resumed=resumed))


def test_a_null_control_is_not_told_apart_and_a_positive_control_is(tmp_path):
    (tmp_path / "sweep.toml").write_text(
        'base = "quickstart"\nseeds = 7\nsame_settings = true\nmetrics = ["accuracy"]\nbar = 0.5\n'
        + external("learns", 2.0) + external("learns too", 2.0) + external("learning rate 0", 0.0)
    )  # fmt: skip
    run(tmp_path, jobs=2)
    printed = CliRunner().invoke(app, ["sweep", "report", str(tmp_path)])
    assert printed.exit_code == 0, printed.output
    said = {
        row.split(" | ")[0].removeprefix("| "): row for row in printed.output.splitlines() if "| held-out accuracy | 7 |" in row
    }
    assert "+0.000 [+0.000, +0.000] | 1.0000 | 1.0000 | not told apart" in said["learns too"]
    assert said["learning rate 0"].endswith("| lower |")
    assert (tmp_path / "RESULTS.md").read_text() + "\n" == printed.output


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
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    with contextlib.suppress(ProcessLookupError):  # it ends by itself, too
        os.kill(json.loads((cell / "api.json").read_text())["pid"], signal.SIGKILL)


def test_a_killed_sweep_goes_on_and_every_cell_is_there_once(tiny, tmp_path):
    written(tiny(checkpoint__every_steps=1, **NO_EVALUATION | NO_MODELS), tmp_path / "base.toml")
    (tmp_path / "sweep.toml").write_text(
        'base = "base.toml"\nseeds = 1\nset = { num_steps = 40 }\nmetrics = ["reward"]\n' + external("another", 0.0)
        + '[[axes]]\nname = "eta"\nchoices = { sync = { "buffer.max_staleness" = 0 } }\n'
    )  # fmt: skip
    sweep = load_sweep(tmp_path)
    (cell,) = [cell for cell in sweep.cells if not cell.command]
    folder = tmp_path / "cells" / cell.id
    asyncio.run(_killed_at_work(tmp_path, folder))
    shown = CliRunner().invoke(app, ["sweep", "status", str(tmp_path)])
    assert "of 40" in shown.output, shown.output

    run(tmp_path, resumed=True)

    lines = {line.arm: line for line in read_results(tmp_path / "results.jsonl")}
    assert lines.keys() == {"sync", "another"}
    assert (lines["sync"].attempts, lines["sync"].outcome.steps, lines["sync"].outcome.fault) == (2, 40, "")
    assert lines["sync"].outcome.staleness_max == 0
    assert len(trained_groups(folder)) == 40 * 4
