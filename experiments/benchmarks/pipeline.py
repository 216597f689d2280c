"""The whole pipeline: asynchronous against synchronous, and the controller under load. Every run is real, with real processes.

`async_vs_sync`: the quickstart model, the same config but for `max_staleness`, optimizer steps per second.
`async_vs_sync_long_tail`: fake engines with long-tailed lengths and an outside learner whose step takes a fixed time.
`learner_idle`: the same learner, generation fast enough.
`lost`, `controller_cores`: 64 fake generators and 1,000 groups in flight.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil

from asyncrl.client import Run
from asyncrl.config.load import parse_config
from asyncrl.config.run import RunConfig
from asyncrl.control.launch.controller_process import read_endpoint
from asyncrl.plan.validate import short_quickstart
from benchmarks.harness import BenchResult, Ratio, ratio
from benchmarks.samples import no_weights

ROUNDS = 3
SKIPPED_STEPS = 5
"""At the start of a run, while pipelines fill."""


def run(rounds: int = 0) -> BenchResult:
    """Run the benchmark; `rounds` 0 means 3."""
    return asyncio.run(_measure(rounds or ROUNDS))


async def _measure(rounds: int) -> BenchResult:
    sides: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for number in range(rounds):
            for side, staleness in (("sync", 0), ("async", 2)):
                config = short_quickstart(folder, f"{side}-{number}", num_steps=60, max_staleness=staleness)
                sides[side].append(await _real_steps_per_s(config))
            for side, staleness, num_steps in (("tail_sync", 0, 12), ("tail_async", 4, 24)):
                settings = _long_tail(folder, f"{side}-{number}", max_staleness=staleness)
                sides[side].append((await _outside(settings, 0.2, num_steps))[0])
            fast = _long_tail(folder, f"idle-{number}", max_staleness=4, token_latency_s=0.0005)
            sides["idle"].append((await _outside(fast, 0.3, 20))[1])
        load = await _controller_under_load(folder)
    middle = {side: statistics.median(values) for side, values in sides.items()}
    figures = {f"{side}_steps_per_s": value for side, value in middle.items() if side != "idle"} | load
    ratios: dict[str, Ratio] = {
        "async_vs_sync": ratio(middle["async"] / middle["sync"], 1.3),
        "async_vs_sync_long_tail": ratio(middle["tail_async"] / middle["tail_sync"], 1.8),
        "learner_idle": ratio(middle["idle"], 0.1, at_least=False),
        "lost": ratio(load["lost_groups"], 0, at_least=False),
        "controller_cores": ratio(load["controller_busy_cores"], 1.0, at_least=False),
    }
    return BenchResult("pipeline", figures, ratios)


# -- the quickstart model, trained for real ------------------------------------------------------------------------------


async def _real_steps_per_s(config: RunConfig) -> float:
    async with Run(config) as live:
        times = [report.time_s async for report in live.steps()]
    return (len(times) - 1 - SKIPPED_STEPS) / (times[-1] - times[SKIPPED_STEPS])


# -- fake engines and an outside learner ---------------------------------------------------------------------------------


def _long_tail(folder: Path, name: str, *, max_staleness: int, token_latency_s: float = 0.002) -> dict[str, Any]:
    return {
        "name": name,
        "folder": str(folder),
        "num_steps": 1000,
        "generate": {"num_workers": 2, "sampling": {"max_new_tokens": 2000},
                     "engine": {"kind": "fake", "num_slots": 64, "token_latency_s": token_latency_s,
                                "mean_tokens": 64.0, "sigma": 1.0, "max_sequence_tokens": 4096}},
        "algorithm": {"groups_per_step": 16, "group_size": 4},
        "learner": {"kind": "external"},
        "buffer": {"max_staleness": max_staleness},
        "eval": {"at_start": False, "at_end": False},
    }  # fmt: skip


async def _train_outside(live: Run, step_s: float, num_steps: int) -> list[tuple[float, float]]:
    """Be a learner whose step takes `step_s`; return when each step began to wait and when it had its groups."""
    await live.announce_weights(no_weights(0), "fake")
    times = []
    for _ in range(num_steps):
        asked_s = time.perf_counter()
        taken = await live.take()
        times.append((asked_s, time.perf_counter()))
        await asyncio.sleep(step_s)
        await live.announce_weights(no_weights(taken.step + 1))
        await live.trained(taken.step)
    return times


async def _outside(settings: dict[str, Any], step_s: float, num_steps: int) -> tuple[float, float]:
    """Return steps a second, and the fraction of its time that the learner waited for groups."""
    async with Run(parse_config(settings)) as live:
        times = await _train_outside(live, step_s, num_steps)
        await live.stop()
    counted = times[SKIPPED_STEPS:]
    seconds = counted[-1][1] - counted[0][1]
    idle = sum(got - asked for asked, got in counted) / (counted[-1][1] - counted[0][0])
    return (len(counted) - 1) / seconds, idle


# -- the controller under load -------------------------------------------------------------------------------------------


async def _controller_under_load(folder: Path) -> dict[str, float]:
    """Run 64 fake generators with 1,000 groups in flight for a while and count groups and the controller's CPU time."""
    settings = _long_tail(folder, "load", max_staleness=30, token_latency_s=0.02)
    settings["generate"]["num_workers"] = 64
    settings["algorithm"] = {"groups_per_step": 64, "group_size": 4}
    settings["buffer"]["max_running_groups"] = 1000
    settings["reward"] = {"num_workers": 1}
    async with Run(parse_config(settings)) as live:
        await _train_outside(live, 0.2, 3)
        endpoint = read_endpoint(live.run_folder)
        assert endpoint is not None
        controller, most_running = psutil.Process(endpoint.pid), 0
        cpu_s, started_s = sum(controller.cpu_times()[:2]), time.perf_counter()
        trained_before = (await live.status()).groups["trained"]
        for _ in range(15):
            taken = await live.take()
            await live.announce_weights(no_weights(taken.step + 1))
            await live.trained(taken.step)
            groups = (await live.status()).groups
            most_running = max(most_running, groups["running"] + groups["scoring"])
        elapsed_s = time.perf_counter() - started_s
        busy_cores = (sum(controller.cpu_times()[:2]) - cpu_s) / elapsed_s
        trained = (await live.status()).groups["trained"] - trained_before
        groups = dict((await live.stop()).groups)
    return {
        "lost_groups": float(abs(groups.pop("issued") - sum(groups.values()))),
        "controller_busy_cores": busy_cores,
        "load_groups_in_flight": float(most_running),
        "load_samples_per_s": trained * 4 / elapsed_s,
    }
