"""The subset of experiments/off_policy that shows what it is about: stale data collapses a run that takes it for fresh."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXPERIMENT = Path(__file__).resolve().parents[2] / "experiments" / "off_policy"

pytestmark = [pytest.mark.timeout(620), pytest.mark.slow]


def _run(command, timeout_s):
    """Run a command to its end; whatever happens, it and the processes it started end with it."""
    running = subprocess.Popen(command, start_new_session=True)
    try:
        assert running.wait(timeout_s) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def test_uncorrected_training_collapses_at_a_lag_of_sixteen_and_corrected_does_not(tmp_path):
    _run([sys.executable, str(EXPERIMENT / "run.py"), "--subset", "--steps", "40", "--out", str(tmp_path)], timeout_s=590)

    runs = {
        (run["cell"]["method"], run["cell"]["lag"]): run["accuracy"]
        for run in json.loads((tmp_path / "results.json").read_bytes())
    }
    assert runs["no correction", 16][-1] < 0.5 * runs["no correction", 16][0]
    for kept in [("no correction", 0), ("decoupled + tis token", 0), ("decoupled + tis token", 16)]:
        assert runs[kept][-1] > 0.9 * runs[kept][0], kept
    assert (tmp_path / "heatmap.png").stat().st_size > 10_000
    assert "| no correction * |" in (tmp_path / "RESULTS.md").read_text()
