"""What a learner's steps really take: prints the peak resident bytes of one on the CPU, beyond those before its model was made.

A scratch Llama with the learner's own optimizer and `train_step`, float32, rows of one sample each. The first step makes the
optimizer's state; in the second, the second row's forward meets the first one's gradients: that is the peak. A tiny model is
trained before, so that libraries are loaded and not counted. `python -m asyncrl.plan.learner_peak JSON`, the JSON a `PeakCase`,
in a process of its own.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.learner import LearnerConfig
from asyncrl.config.run import RunConfig
from asyncrl.learner.model.policy import made_ready
from asyncrl.learner.optim.optimizer import build_optimizer
from asyncrl.learner.step.train_step import train_step
from asyncrl.learner.train_state import TrainState
from asyncrl.models.memory import ModelShape
from asyncrl.packing.tensors import pack_step
from asyncrl.plan.spec import PeakCase
from asyncrl.schema.batches import StepBatch
from asyncrl.schema.samples import Prompt, Sample, ScoredGroup, ScoredSample, ids_to_bytes, logprobs_to_bytes

NUM_ROWS, NUM_STEPS, PROMPT_TOKENS = 2, 2, 16
LEARNING_RATE = 1e-6


def peak_bytes(case: PeakCase) -> int:
    """Return the peak resident bytes that making and training the model adds to this process; Linux only."""
    torch.set_num_threads(1)
    _train(PeakCase(ModelShape(32, 2, 2, 2, 16, 64, 128, name="tiny"), 64, case.checkpointing))
    gc.collect()
    before = _resident_bytes("VmRSS")
    _train(case)
    return _resident_bytes("VmHWM") - before


def _train(case: PeakCase) -> None:
    config = RunConfig(
        algorithm=AlgorithmConfig(groups_per_step=1, group_size=NUM_ROWS),
        learner=LearnerConfig(learning_rate=LEARNING_RATE, warmup_steps=0, gradient_checkpointing=case.checkpointing),
    )
    model = made_ready(LlamaForCausalLM(_llama(case)), config.learner)
    trainee = TrainState(model, build_optimizer(model, config.learner, NUM_STEPS))
    for step in range(NUM_STEPS):
        train_step(trainee, _batch(case, step), config)


def _llama(case: PeakCase) -> LlamaConfig:
    size = case.model
    return LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_size,
        intermediate_size=size.intermediate,
        max_position_embeddings=case.tokens_per_row,
        tie_word_embeddings=size.is_tied,
    )


def _batch(case: PeakCase, step: int) -> StepBatch:
    """Return a group of NUM_ROWS samples, each as long as a row."""
    rng, length = np.random.default_rng(step), case.tokens_per_row - PROMPT_TOKENS
    prompt = ids_to_bytes(rng.integers(2, case.model.vocabulary, PROMPT_TOKENS, dtype=np.int32))

    def sample(index: int) -> ScoredSample:
        made = Sample(
            group_id=0, index=index, attempt=0, prompt_ids=prompt,
            token_ids=ids_to_bytes(rng.integers(2, case.model.vocabulary, length, dtype=np.int32)),
            logprobs=logprobs_to_bytes(np.full(length, -9.0, np.float32)), versions=ids_to_bytes(np.full(length, step, np.int32)),
            finish_reason="stop", text="", generator="validate", started_s=0.0, finished_s=0.0,
        )  # fmt: skip
        return ScoredSample(made, float(index))

    group = ScoredGroup(0, Prompt("validate"), tuple(sample(index) for index in range(NUM_ROWS)))
    return pack_step(step, [group], tokens_per_row=case.tokens_per_row, temperature=1.0)


def _resident_bytes(kind: str) -> int:
    """Return a line of Linux's account of this process: VmRSS now, VmHWM at its highest."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


if __name__ == "__main__":
    print(peak_bytes(msgspec.json.decode(sys.argv[1], type=PeakCase)))  # noqa: T201 - its result
