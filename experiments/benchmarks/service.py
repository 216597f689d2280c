"""The service and what a program drives itself; one function a figure.

`session_vs_run`: the quickstart's steps a second as a loop over a `Session`, against a `Run` of the same config, in turns.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from asyncrl.client import Run
from asyncrl.config.load import load_config
from asyncrl.config.run import RunConfig
from asyncrl.session import Session
from benchmarks.harness import BenchResult, Ratio, ratio

ROUNDS = 3
NUM_STEPS = 60
SKIPPED_STEPS = 10
"""At the start of a run, while pipelines fill."""


def run(rounds: int = 0) -> BenchResult:
    """Run the benchmark; `rounds` 0 means 3."""
    figures: dict[str, float] = {}
    ratios: dict[str, Ratio] = {}
    session_vs_run(rounds or ROUNDS, figures, ratios)
    return BenchResult("service", figures, ratios)


def session_vs_run(rounds: int, figures: dict[str, float], ratios: dict[str, Ratio]) -> None:
    """Measure steps a second of both sides, and enter their medians and ratio."""
    sides: dict[str, list[float]] = {"run": [], "session": []}
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-", ignore_cleanup_errors=True) as folder:
        for number in range(rounds):
            for side, measure in (("run", _of_run), ("session", _of_session)):
                sides[side].append(asyncio.run(measure(_quickstart(Path(folder), f"{side}-{number}"))))
    middle = {side: statistics.median(values) for side, values in sides.items()}
    figures |= {f"{side}_steps_per_s": value for side, value in middle.items()}
    ratios["session_vs_run"] = ratio(middle["session"] / middle["run"], 0.9)


def _quickstart(folder: Path, name: str) -> RunConfig:
    """Return the quickstart, but for how long it is: answers of the right length are enough, and nothing is evaluated."""
    return load_config("quickstart", {
        "name": name, "folder": str(folder), "num_steps": NUM_STEPS, "checkpoint.every_steps": 0,
        "model.warm_start": {"steps": 60, "batch_size": 64, "learning_rate": 2e-3}, "learner.learning_rate": 1e-4,
        "eval.at_start": False, "eval.at_end": False,
    })  # fmt: skip


async def _of_run(config: RunConfig) -> float:
    async with Run(config) as live:
        return _steps_per_s([report.time_s async for report in live.steps()])


async def _of_session(config: RunConfig) -> float:
    times = []
    async with Session(config) as session:
        async for groups in session.batches():
            await session.train_step(groups)
            times.append(time.perf_counter())
    return _steps_per_s(times)


def _steps_per_s(times: list[float]) -> float:
    return (len(times) - 1 - SKIPPED_STEPS) / (times[-1] - times[SKIPPED_STEPS])
