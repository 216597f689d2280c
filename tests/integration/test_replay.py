"""Recorded runs of real processes, replayed: with deaths, a pause, a live change and a second life of the controller."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys

import pytest

import asyncrl
from asyncrl.replay.decisions import replay_decisions
from tests.integration.conftest import NO_MODEL

pytestmark = pytest.mark.timeout(240)
QUIET = {"eval__at_start": False, "eval__at_end": False}


async def test_decisions_replay_over_deaths_a_pause_a_change_and_a_controller_that_was_killed(tiny, recorded_pids):
    settings = {**QUIET, "generate__engine": NO_MODEL, "buffer__policy": "drop", "observe__record": "decisions"}
    async with asyncrl.Run(tiny(num_steps=10_000, **settings)) as run:
        async for report in run.steps():
            if report.version == 3:
                os.kill(recorded_pids(run.run_folder)["generator-0"], signal.SIGKILL)
            if report.version == 6:
                await run.change({"buffer.max_staleness": 1, "learner.learning_rate": 5e-4})
                await run.pause()
                await run.resume()
            if report.version == 9:
                os.kill(recorded_pids(run.run_folder)["learner"], signal.SIGKILL)
            if report.version == 14:
                break
        for pid in [json.loads((run.run_folder / "api.json").read_text())["pid"], *recorded_pids(run.run_folder).values()]:
            with contextlib.suppress(ProcessLookupError):  # the others end by themselves once the first is gone
                os.kill(pid, signal.SIGKILL)
    async with asyncrl.Run(tiny(num_steps=20, **settings), resume=run.run_folder) as again:
        assert (await again.wait()).version == 20
    killed, whole = replay_decisions(run.run_folder)
    assert (killed.difference, whole.difference, whole.fault) == ("", "", "")
    assert "was cut off" in killed.fault
    assert killed.last_step >= 12
    assert whole.last_step == 19
    command = (sys.executable, "-m", "asyncrl", "replay", str(run.run_folder))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    told = (await process.communicate())[0].decode()
    assert process.returncode == 0
    assert "it ends here: it was cut off" in told
    assert "up to step 19" in told
