"""The planner and the simulator against real runs: each run is made, measured, simulated or counted, and the error printed.

`asyncrl simulate --validate`: a run with fake engines and a learner whose step takes a fixed time, and one with the transformers
engine and the built-in learner; the simulation is given what their spans say. `asyncrl plan --validate`: the learner's peak
memory on the CPU. Called by the command line.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from asyncrl.client import Run
from asyncrl.config.load import parse_config
from asyncrl.plan.measured import real_figures, scenario_of_run
from asyncrl.plan.simulate import simulate
from asyncrl.schema.weights import WeightsAvailable, WeightsManifest

STEPS_GOAL, STALENESS_GOAL = 0.1, 0.5
FAKE_STEPS, TRANSFORMERS_STEPS = 40, 60
FAKE_STEP_S = 0.2


def validate_simulation() -> dict[str, Any]:
    """Return figures of both runs and the largest errors, as a benchmark prints them."""
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-validate-"))
    try:
        figures: dict[str, float] = {}
        for name, make in _RUNS.items():
            run_folder = asyncio.run(make(folder, name))
            figures |= {f"{name}_{key}": value for key, value in _compare(run_folder).items()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    errors = {
        kind: max(value for key, value in figures.items() if key.endswith(kind)) for kind in ("steps_error", "staleness_error")
    }
    goals = {"steps_error": STEPS_GOAL, "staleness_error": STALENESS_GOAL}
    ratios = {
        kind: {"value": round(errors[kind], 4), "goal": goal, "holds": errors[kind] <= goal} for kind, goal in goals.items()
    }
    return {"bench": "simulate", "figures": figures, "ratios": ratios}


def _compare(run_folder: Path) -> dict[str, float]:
    """Return the real and the simulated figures of one run, and how far they are apart."""
    steps_per_s, staleness = real_figures(run_folder)
    made = simulate(scenario_of_run(run_folder))
    return {
        "real_steps_per_s": steps_per_s,
        "simulated_steps_per_s": made.steps_per_s,
        "real_staleness": staleness,
        "simulated_staleness": made.mean_staleness,
        "steps_error": abs(made.steps_per_s / steps_per_s - 1),
        "staleness_error": abs(made.mean_staleness - staleness),
    }


async def _fake_run(folder: Path, name: str) -> Path:
    """Run fake engines with long-tailed lengths under an outside learner; return the run's folder."""
    settings = {
        "name": name,
        "folder": str(folder),
        "num_steps": FAKE_STEPS,
        "generate": {"num_workers": 2, "sampling": {"max_new_tokens": 2000},
                     "engine": {"kind": "fake", "num_slots": 32, "token_latency_s": 0.004, "mean_tokens": 64.0, "sigma": 1.0,
                                "max_sequence_tokens": 4096}},
        "algorithm": {"groups_per_step": 16, "group_size": 4},
        "learner": {"kind": "external"},
        "buffer": {"max_staleness": 2},
        "eval": {"at_start": False, "at_end": False},
    }  # fmt: skip
    async with Run(parse_config(settings)) as live:
        await live.announce_weights(_version(0), "fake")
        for _ in range(FAKE_STEPS):
            taken = await live.take()
            await asyncio.sleep(FAKE_STEP_S)
            await live.announce_weights(_version(taken.step + 1))
            await live.trained(taken.step)
        await live.wait()
    return live.run_folder


async def _transformers_run(folder: Path, name: str) -> Path:
    """Train the quickstart's model for a little while; return the run's folder."""
    settings = {
        "name": name,
        "folder": str(folder),
        "num_steps": TRANSFORMERS_STEPS,
        "task": {"kind": "addition", "digits": 2},
        "model": {"kind": "scratch", "hidden_size": 128, "num_layers": 2, "num_heads": 4, "max_positions": 64,
                  "warm_start": {"steps": 60, "batch_size": 64, "learning_rate": 2e-3}},
        "generate": {"num_workers": 2, "engine": {"kind": "transformers", "num_slots": 64, "max_sequence_tokens": 16},
                     "sampling": {"max_new_tokens": 4}},
        "packing": {"tokens_per_row": 512},
        "algorithm": {"groups_per_step": 64, "group_size": 4, "proximal": "behaviour"},
        "learner": {"learning_rate": 1e-4},
        "eval": {"at_start": False, "at_end": False},
        "checkpoint": {"every_steps": 0},
    }  # fmt: skip
    async with Run(parse_config(settings)) as live:
        async for _ in live.steps():
            pass
    return live.run_folder


def _version(number: int) -> WeightsAvailable:
    return WeightsAvailable(number, "none", "", WeightsManifest((), 0), "", time.time())  # noqa: TID251 - wall clock of a message


_RUNS: dict[str, Callable[[Path, str], Coroutine[Any, Any, Path]]] = {"fake": _fake_run, "transformers": _transformers_run}
