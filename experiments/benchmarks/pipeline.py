"""The whole pipeline: asynchronous against synchronous, a program's loop against a run. Every run is real, with real processes.

`async_vs_sync`: the quickstart model, the same config but for `max_staleness`, optimizer steps per second.
`async_vs_sync_long_tail`: fake engines with long-tailed lengths and an outside learner whose step takes a fixed time.
`session_vs_run`: the quickstart model, steps per second as a loop over a `Session` over those of a `Run` of the same config.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from asyncrl.client import Run
from asyncrl.config.load import parse_config
from asyncrl.config.run import RunConfig
from asyncrl.plan.validate import short_quickstart
from asyncrl.session import Session
from benchmarks.harness import BenchResult, ratio
from benchmarks.samples import no_weights

ROUNDS = 3
SKIPPED_STEPS = 5
"""At the start of a run, while pipelines fill."""
STEP_S = 0.2


def run(rounds: int = 0) -> BenchResult:
    """Run the benchmark; `rounds` 0 means 3."""
    return asyncio.run(_measure(rounds or ROUNDS))


async def _measure(rounds: int) -> BenchResult:
    sides: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for number in range(rounds):
            for side, staleness in (("sync", 0), ("async", 2), ("session", 2)):
                config = short_quickstart(folder, f"{side}-{number}", num_steps=60, max_staleness=staleness)
                times = await (_of_session if side == "session" else _of_run)(config)
                sides[side].append((len(times) - 1 - SKIPPED_STEPS) / (times[-1] - times[SKIPPED_STEPS]))
            for side, staleness, num_steps in (("tail_sync", 0, 12), ("tail_async", 4, 24)):
                settings = _long_tail(folder, f"{side}-{number}", staleness)
                sides[side].append(await _outside(settings, num_steps))
    middle = {side: statistics.median(values) for side, values in sides.items()}
    ratios = {
        "async_vs_sync": ratio(middle["async"] / middle["sync"], 1.3),
        "async_vs_sync_long_tail": ratio(middle["tail_async"] / middle["tail_sync"], 1.8),
        "session_vs_run": ratio(middle["session"] / middle["async"], 0.9),
    }
    return BenchResult("pipeline", {f"{side}_steps_per_s": value for side, value in middle.items()}, ratios)


# -- the quickstart model, trained for real ------------------------------------------------------------------------------


async def _of_run(config: RunConfig) -> list[float]:
    """Return when each step was done."""
    async with Run(config) as live:
        return [report.time_s async for report in live.steps()]


async def _of_session(config: RunConfig) -> list[float]:
    """Return when each step was done."""
    times = []
    async with Session(config) as session:
        async for groups in session.batches():
            await session.train_step(groups)
            times.append(time.perf_counter())
    return times


# -- fake engines and an outside learner ---------------------------------------------------------------------------------


def _long_tail(folder: Path, name: str, max_staleness: int) -> dict[str, Any]:
    return {
        "name": name,
        "folder": str(folder),
        "num_steps": 1000,
        "generate": {"num_workers": 2, "sampling": {"max_new_tokens": 2000},
                     "engine": {"kind": "fake", "num_slots": 64, "token_latency_s": 0.002,
                                "mean_tokens": 64.0, "sigma": 1.0, "max_sequence_tokens": 4096}},
        "algorithm": {"groups_per_step": 16, "group_size": 4},
        "learner": {"kind": "external"},
        "buffer": {"max_staleness": max_staleness},
        "eval": {"at_start": False, "at_end": False},
    }  # fmt: skip


async def _outside(settings: dict[str, Any], num_steps: int) -> float:
    """Return steps a second of a learner that is a pause of STEP_S."""
    times = []
    async with Run(parse_config(settings)) as live:
        await live.announce_weights(no_weights(0), "fake")
        for _ in range(num_steps):
            taken = await live.take()
            times.append(time.perf_counter())
            await asyncio.sleep(STEP_S)
            await live.announce_weights(no_weights(taken.step + 1))
            await live.trained(taken.step)
        await live.stop()
    return (num_steps - 1 - SKIPPED_STEPS) / (times[-1] - times[SKIPPED_STEPS])
