"""Compares the planner and the simulator with real runs: each run is measured and predicted, and the error is printed.

`asyncrl simulate --validate`: a run with fake engines and a learner whose step takes a fixed time, and one with the transformers
engine and the built-in learner; the simulation takes its inputs from their spans. `asyncrl plan --validate`: the learner's peak
memory on the CPU.
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from asyncrl.client import Run
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.learner import LearnerConfig
from asyncrl.config.load import load_config, resolve_config
from asyncrl.config.run import RunConfig
from asyncrl.errors import RunError
from asyncrl.learner.model.policy import made_ready
from asyncrl.learner.optim.optimizer import PolicyOptimizer
from asyncrl.learner.step.train_step import train_step
from asyncrl.learner.train_state import TrainState
from asyncrl.models.memory import ModelShape
from asyncrl.packing.pack import pack_step
from asyncrl.plan.planner import activations, training_state
from asyncrl.plan.simulator.engine import simulate
from asyncrl.plan.simulator.measured import real_figures, scenario_of_run
from asyncrl.plan.spec import Question, parse_cluster
from asyncrl.schema.samples import Prompt, Sample, ScoredGroup, ScoredSample, ids_to_bytes, logprobs_to_bytes
from asyncrl.schema.weights import WeightsAvailable, WeightsManifest

STEPS_GOAL, STALENESS_GOAL, MEMORY_GOAL = 0.1, 0.5, 0.1
FAKE_STEPS, TRANSFORMERS_STEPS = 40, 60
FAKE_STEP_S = 0.2
RETURN_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""With this setting glibc returns freed tensors to the system. By default it keeps them in a fragmented heap."""


MODEL, TOKENS_PER_ROW = ModelShape(384, 6, 6, 6, 64, 1536, 8192, name="scratch"), 1024
TINY = ModelShape(32, 2, 2, 2, 16, 64, 128, name="tiny")
NUM_ROWS, NUM_STEPS, PROMPT_TOKENS = 2, 2, 16


def validate_simulation() -> dict[str, Any]:
    """Return the figures of both runs and the largest errors, in the format of a benchmark."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="asyncrl-validate-", ignore_cleanup_errors=True) as folder:
        for name in ("fake", "transformers"):
            run_folder = asyncio.run(_real_run(Path(folder), name))
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
    """Return the learner's peak on the CPU, predicted and measured, without and with checkpointing, in a benchmark's format."""
    figures: dict[str, float] = {}
    for name, checkpointing in (("plain", False), ("checkpointed", True)):
        planned = planned_peak_bytes(MODEL, TOKENS_PER_ROW, checkpointing=checkpointing)
        command = [sys.executable, "-P", "-m", "asyncrl.plan.validate", str(int(checkpointing))]
        done = subprocess.run(command, env=os.environ | RETURN_AT_ONCE, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            raise RunError(f"the learner's peak was not measured (exit code {done.returncode}): {done.stderr[-1000:]}")
        measured = int(done.stdout)
        figures[f"{name}_planned_mib"], figures[f"{name}_measured_mib"] = planned / 2**20, measured / 2**20
        figures[f"{name}_memory_error"] = abs(planned / measured - 1)
    return _outcome("plan", figures, {"memory_error": MEMORY_GOAL})


def planned_peak_bytes(model: ModelShape, tokens_per_row: int, *, checkpointing: bool) -> float:
    """Return the peak that the planner predicts for a learner in float32 that trains alone."""
    question = Question(
        model=model, cluster=parse_cluster("2xH100"), dtype="float32", gradient_checkpointing=checkpointing,
        tokens_per_row=tokens_per_row, max_sequence_tokens=tokens_per_row, prompt_tokens=16, response_tokens=tokens_per_row - 16,
    )  # fmt: skip
    state, _ = training_state(question, model, 1, is_policy=True)
    return sum(state.values()) + activations(question, model)


def _outcome(name: str, figures: dict[str, float], goals: dict[str, float]) -> dict[str, Any]:
    """Return the figures and, for each goal, the largest figure of that name."""
    worst = {kind: max(value for key, value in figures.items() if key.endswith(kind)) for kind in goals}
    ratios = {kind: {"value": round(worst[kind], 4), "goal": goal, "holds": worst[kind] <= goal} for kind, goal in goals.items()}
    return {"bench": name, "figures": figures, "ratios": ratios}


async def _real_run(folder: Path, name: str) -> Path:
    """Train the quickstart's model, or run fake engines of long-tailed lengths under an outside learner; return its folder."""
    if name == "transformers":
        async with Run(short_quickstart(folder, name, num_steps=TRANSFORMERS_STEPS, max_staleness=2)) as live:
            async for _ in live.steps():
                pass
        return live.run_folder
    engine = {"kind": "fake", "num_slots": 32, "token_latency_s": 0.004, "max_sequence_tokens": 4096}
    settings = {
        "name": name, "folder": str(folder), "num_steps": FAKE_STEPS, "learner.kind": "external",
        "generate.engine": engine, "generate.sampling.max_new_tokens": 2000,
        "algorithm.groups_per_step": 16, "algorithm.group_size": 4, "eval.at_start": False, "eval.at_end": False,
    }  # fmt: skip
    async with Run(resolve_config({}, settings)) as live:
        await live.announce_weights(_version(0), "fake")
        for _ in range(FAKE_STEPS):
            taken = await live.take()
            await asyncio.sleep(FAKE_STEP_S)
            await live.announce_weights(_version(taken.step + 1))
            await live.trained(taken.step)
        await live.wait()
    return live.run_folder


def short_quickstart(folder: Path, name: str, *, num_steps: int, max_staleness: int) -> RunConfig:
    """Return the quickstart with two generators and a warm start just long enough for answers of the right length."""
    return load_config("quickstart", {
        "name": name, "folder": str(folder), "num_steps": num_steps, "buffer.max_staleness": max_staleness,
        "model.warm_start": {"steps": 60, "batch_size": 64, "learning_rate": 2e-3}, "learner.learning_rate": 1e-4,
        "generate.num_workers": 2, "generate.engine.num_slots": 64, "packing.tokens_per_row": 512,
        "eval.at_start": False, "eval.at_end": False, "checkpoint.every_steps": 0,
    })  # fmt: skip


def _version(number: int) -> WeightsAvailable:
    return WeightsAvailable(number, "none", "", WeightsManifest((), 0), "", time.time())  # noqa: TID251 - wall clock of a message


def peak_bytes(*, checkpointing: bool) -> int:
    """Return the peak resident bytes that making and training a scratch Llama adds to this process; Linux only.

    Uses the learner's own optimizer and `train_step`, float32, rows of one sample each. The first step creates the optimizer's
    state; the peak is in the second step, when the second row's forward runs while the first row's gradients exist. A tiny model
    is trained first, so that loading the libraries is not counted.
    """
    torch.set_num_threads(1)
    _train(TINY, 64, checkpointing=checkpointing)
    gc.collect()
    before = resident_bytes("VmRSS")
    _train(MODEL, TOKENS_PER_ROW, checkpointing=checkpointing)
    return resident_bytes("VmHWM") - before


def _train(size: ModelShape, tokens_per_row: int, *, checkpointing: bool) -> None:
    """Train NUM_STEPS steps of one group of NUM_ROWS samples, each as long as a row."""
    config = RunConfig(
        num_steps=NUM_STEPS,
        algorithm=AlgorithmConfig(groups_per_step=1, group_size=NUM_ROWS),
        learner=LearnerConfig(learning_rate=1e-6, warmup_steps=0, gradient_checkpointing=checkpointing),
    )
    llama = LlamaConfig(
        vocab_size=size.vocabulary, hidden_size=size.hidden, num_hidden_layers=size.layers, num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads, head_dim=size.head_size, intermediate_size=size.intermediate,
        max_position_embeddings=tokens_per_row, tie_word_embeddings=size.is_tied,
    )  # fmt: skip
    trainee = train_state(LlamaForCausalLM(llama), config)
    rng, length = np.random.default_rng(0), tokens_per_row - PROMPT_TOKENS
    for step in range(NUM_STEPS):
        prompt, *texts = (ids_to_bytes(rng.integers(2, size.vocabulary, number, dtype=np.int32))
                          for number in (PROMPT_TOKENS, *[length] * NUM_ROWS))  # fmt: skip
        members = [
            Sample(
                group_id=0, index=index, attempt=0, prompt_ids=prompt, token_ids=text,
                logprobs=logprobs_to_bytes(np.full(length, -9.0, np.float32)),
                versions=ids_to_bytes(np.full(length, step, np.int32)),
                finish_reason="stop", text="", generator="validate", started_s=0.0, finished_s=0.0,
            ) for index, text in enumerate(texts)
        ]  # fmt: skip
        group = ScoredGroup(0, Prompt("validate"), tuple(ScoredSample(made, float(made.index)) for made in members))
        train_step(trainee, pack_step(step, [group], tokens_per_row=tokens_per_row, temperature=1.0), config)


def train_state(model: PreTrainedModel, config: RunConfig) -> TrainState:
    """Return the state that `train_step` trains."""
    ready = made_ready(model, config.learner)
    return TrainState(ready, PolicyOptimizer(ready.named_parameters(), config.learner, config.num_steps))


def resident_bytes(kind: str) -> int:
    """Return a value of /proc/self/status in bytes: VmRSS (current) or VmHWM (peak)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


if __name__ == "__main__":  # in a process of its own, whose memory is the learner's alone
    print(peak_bytes(checkpointing=sys.argv[1] == "1"))  # noqa: T201 - its result
