"""A whole run whose weights travel as deltas in files; its generator is killed on the way and starts from nothing."""

import json
import os
import signal

import pytest

import asyncrl

pytestmark = pytest.mark.timeout(240)


async def test_a_run_by_deltas_trains_and_a_generator_that_was_killed_catches_up(tiny, recorded_pids):
    config = tiny(
        num_steps=30,
        broadcast__medium={"kind": "files", "keep_last": 1},
        broadcast__dtype="bfloat16",
        broadcast__delta={"full_every": 4},
        learner__learning_rate=1e-5,
    )
    async with asyncrl.Run(config) as run:
        steps = run.steps()
        await anext(steps)
        os.kill(recorded_pids(run.run_folder)["generator-0"], signal.SIGKILL)
        async for report in steps:
            newest = report
        status = await run.status()
    assert (status.phase, newest.version, newest.staleness_max <= 2) == ("stopped", 30, True), status.reason
    rows = [json.loads(line)["metrics"] for line in (run.run_folder / "metrics.jsonl").read_text().splitlines()]
    sizes = {row["weights/update_bytes"] for row in rows if "weights/update_bytes" in row}
    assert min(sizes) < max(sizes) / 3
    assert all(row.get("weights/probe_error", 0.0) < config.broadcast.probe_tolerance for row in rows)
    weights = run.run_folder / "weights"
    assert len(list(weights.glob("version-*"))) == 1
    assert 1 <= len(list(weights.glob("*.delta"))) <= 4
