"""The planner and the simulator against real runs: each run is made, measured, simulated or counted, and the error printed.

`asyncrl simulate --validate`: a run with fake engines and a learner whose step takes a fixed time, and one with the transformers
engine and the built-in learner; the simulation is given what their spans say. `asyncrl plan --validate`: the learner's peak
memory on the CPU.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from asyncrl.client import Run
from asyncrl.config.load import parse_config
from asyncrl.errors import RunError
from asyncrl.models.memory import ModelShape
from asyncrl.plan.learner_peak import MODEL, TOKENS_PER_ROW
from asyncrl.plan.memory import activations, training_state
from asyncrl.plan.simulator.engine import simulate
from asyncrl.plan.simulator.measured import real_figures, scenario_of_run
from asyncrl.plan.spec import Question, parse_cluster
from asyncrl.schema.weights import WeightsAvailable, WeightsManifest

STEPS_GOAL, STALENESS_GOAL, MEMORY_GOAL = 0.1, 0.5, 0.1
FAKE_STEPS, TRANSFORMERS_STEPS = 40, 60
FAKE_STEP_S = 0.2
RETURN_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""glibc then gives freed tensors back to the system. Left to itself it keeps them, in a heap with holes."""


def validate_simulation() -> dict[str, Any]:
    """Return figures of both runs and the largest errors, as a benchmark prints them."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="asyncrl-validate-", ignore_cleanup_errors=True) as folder:
        for name, make in (("fake", _fake_run), ("transformers", _transformers_run)):
            run_folder = asyncio.run(make(Path(folder), name))
            steps_per_s, staleness = real_figures(run_folder)
            made = simulate(scenario_of_run(run_folder))
            figures |= {
                f"{name}_real_steps_per_s": steps_per_s,
                f"{name}_simulated_steps_per_s": made.steps_per_s,
                f"{name}_real_staleness": staleness,
                f"{name}_simulated_staleness": made.mean_staleness,
                f"{name}_steps_error": abs(made.steps_per_s / steps_per_s - 1),
                f"{name}_staleness_error": abs(made.mean_staleness - staleness),
            }
    return _outcome("simulate", figures, {"steps_error": STEPS_GOAL, "staleness_error": STALENESS_GOAL})


def validate_memory() -> dict[str, Any]:
    """Return the learner's peak on the CPU by formula and as measured, without and with checkpointing, as benchmarks print."""
    figures: dict[str, float] = {}
    for name, checkpointing in (("plain", False), ("checkpointed", True)):
        planned = planned_peak_bytes(MODEL, TOKENS_PER_ROW, checkpointing=checkpointing)
        command = [sys.executable, "-P", "-m", "asyncrl.plan.learner_peak", str(int(checkpointing))]
        done = subprocess.run(command, env=os.environ | RETURN_AT_ONCE, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            raise RunError(f"the learner's peak was not measured (exit code {done.returncode}): {done.stderr[-1000:]}")
        measured = int(done.stdout)
        figures[f"{name}_planned_mib"], figures[f"{name}_measured_mib"] = planned / 2**20, measured / 2**20
        figures[f"{name}_memory_error"] = abs(planned / measured - 1)
    return _outcome("plan", figures, {"memory_error": MEMORY_GOAL})


def planned_peak_bytes(model: ModelShape, tokens_per_row: int, *, checkpointing: bool) -> float:
    """Return what the planner's formulas say of a learner in float32 that trains alone."""
    question = Question(
        model=model, cluster=parse_cluster("2xH100"), dtype="float32", gradient_checkpointing=checkpointing,
        tokens_per_row=tokens_per_row, max_sequence_tokens=tokens_per_row, prompt_tokens=16, response_tokens=tokens_per_row - 16,
    )  # fmt: skip
    state, _ = training_state(question, model, 1, is_policy=True)
    return sum(state.values()) + activations(question, model)


def _outcome(name: str, figures: dict[str, float], goals: dict[str, float]) -> dict[str, Any]:
    """Return figures and, for each goal, the worst figure of that name."""
    worst = {kind: max(value for key, value in figures.items() if key.endswith(kind)) for kind in goals}
    ratios = {kind: {"value": round(worst[kind], 4), "goal": goal, "holds": worst[kind] <= goal} for kind, goal in goals.items()}
    return {"bench": name, "figures": figures, "ratios": ratios}


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
    async with Run(parse_config(short_quickstart(folder, name, num_steps=TRANSFORMERS_STEPS, max_staleness=2))) as live:
        async for _ in live.steps():
            pass
    return live.run_folder


def short_quickstart(folder: Path, name: str, *, num_steps: int, max_staleness: int) -> dict[str, Any]:
    """Return the quickstart's model, task and algorithm, with a warm start just long enough for answers of the right length."""
    return {
        "name": name,
        "folder": str(folder),
        "num_steps": num_steps,
        "task": {"kind": "addition", "digits": 2},
        "model": {"kind": "scratch", "hidden_size": 128, "num_layers": 2, "num_heads": 4, "max_positions": 64,
                  "warm_start": {"steps": 60, "batch_size": 64, "learning_rate": 2e-3}},
        "generate": {"num_workers": 2, "engine": {"kind": "transformers", "num_slots": 64, "max_sequence_tokens": 16},
                     "sampling": {"max_new_tokens": 4}},
        "packing": {"tokens_per_row": 512},
        "algorithm": {"groups_per_step": 64, "group_size": 4, "proximal": "behaviour"},
        "learner": {"learning_rate": 1e-4},
        "buffer": {"max_staleness": max_staleness},
        "eval": {"at_start": False, "at_end": False},
        "checkpoint": {"every_steps": 0},
    }  # fmt: skip


def _version(number: int) -> WeightsAvailable:
    return WeightsAvailable(number, "none", "", WeightsManifest((), 0), "", time.time())  # noqa: TID251 - wall clock of a message
