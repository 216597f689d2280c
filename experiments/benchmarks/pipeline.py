"""The whole pipeline: asynchronous against synchronous, a program's loop against a run. Every run is real, with real processes.

`async_vs_sync`: the quickstart model, the same config but for `max_staleness`, optimizer steps per second.
`async_vs_sync_long_tail`: fake engines with long-tailed lengths and a learner whose step takes a fixed time.
`session_vs_run`: the quickstart model, steps per second as a loop over a `Session` over those of a `Run` of the same config.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from asyncrl.client import Run
from asyncrl.config.load import load_config
from asyncrl.config.run import RunConfig
from asyncrl.plan.validate import short_quickstart
from asyncrl.session import Session
from benchmarks.harness import BenchResult, medians, ratio

ROUNDS = 3
SKIPPED_STEPS = 5
"""At the start of a run, while pipelines fill."""
WITHOUT_MODELS = Path(__file__).parents[1] / "without_models.toml"
LONG_TAIL = {
    "num_steps": 1000, "generate.sampling.max_new_tokens": 2000, "generate.engine.max_sequence_tokens": 4096,
    "generate.engine.num_slots": 64, "generate.engine.token_latency_s": 0.002,
}  # fmt: skip


def run(rounds: int = 0) -> BenchResult:
    """Run the benchmark; `rounds` 0 means 3."""
    middle = medians([asyncio.run(_one_round()) for _ in range(rounds or ROUNDS)])
    ratios = {
        "async_vs_sync": ratio(middle["async"] / middle["sync"], 1.3),
        "async_vs_sync_long_tail": ratio(middle["tail_async"] / middle["tail_sync"], 1.8),
        "session_vs_run": ratio(middle["session"] / middle["async"], 0.9),
    }
    return BenchResult("pipeline", {f"{side}_steps_per_s": value for side, value in middle.items()}, ratios)


async def _one_round() -> dict[str, float]:
    """Return each side's steps per second."""
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-", ignore_cleanup_errors=True) as name:
        for side, staleness in (("sync", 0), ("async", 2), ("session", 2)):
            config = short_quickstart(Path(name), side, num_steps=60, max_staleness=staleness)
            times[side] = await (_of_session(config) if side == "session" else _of_run(config, config.num_steps))
        for side, staleness, num_steps in (("tail_sync", 0, 12), ("tail_async", 4, 24)):
            settings = LONG_TAIL | {"name": side, "folder": name, "buffer.max_staleness": staleness}
            times[side] = await _of_run(load_config(WITHOUT_MODELS, settings), num_steps)
    return {side: (len(of) - 1 - SKIPPED_STEPS) / (of[-1] - of[SKIPPED_STEPS]) for side, of in times.items()}


async def _of_run(config: RunConfig, num_steps: int) -> list[float]:
    """Return when each of the first steps was done."""
    times = []
    async with Run(config) as live:
        async for report in live.steps():
            times.append(report.time_s)
            if len(times) == num_steps < config.num_steps:
                await live.stop()
    return times[:num_steps]


async def _of_session(config: RunConfig) -> list[float]:
    """Return when each step was done."""
    times = []
    async with Session(config) as session:
        async for groups in session.batches():
            await session.train_step(groups)
            times.append(time.perf_counter())
    return times
