"""What a learner's steps really take: prints the peak resident bytes of one on the CPU, beyond those before its model was made.

A scratch Llama with the learner's own optimizer and `train_step`, float32, rows of one sample each. The first step makes the
optimizer's state; in the second, the second row's forward meets the first one's gradients: that is the peak. A tiny model is
trained before, so that libraries are loaded and not counted. `python -m asyncrl.plan.learner_peak 0` (1: with gradient
checkpointing), in a process of its own.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

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
from asyncrl.schema.samples import Prompt, Sample, ScoredGroup, ScoredSample, ids_to_bytes, logprobs_to_bytes

MODEL, TOKENS_PER_ROW = ModelShape(384, 6, 6, 6, 64, 1536, 8192, name="scratch"), 1024
TINY = ModelShape(32, 2, 2, 2, 16, 64, 128, name="tiny")
NUM_ROWS, NUM_STEPS, PROMPT_TOKENS = 2, 2, 16


def peak_bytes(*, checkpointing: bool) -> int:
    """Return the peak resident bytes that making and training the model adds to this process; Linux only."""
    torch.set_num_threads(1)
    _train(TINY, 64, checkpointing=checkpointing)
    gc.collect()
    before = _resident_bytes("VmRSS")
    _train(MODEL, TOKENS_PER_ROW, checkpointing=checkpointing)
    return _resident_bytes("VmHWM") - before


def _train(size: ModelShape, tokens_per_row: int, *, checkpointing: bool) -> None:
    """Train NUM_STEPS steps of one group of NUM_ROWS samples, each as long as a row."""
    config = RunConfig(
        algorithm=AlgorithmConfig(groups_per_step=1, group_size=NUM_ROWS),
        learner=LearnerConfig(learning_rate=1e-6, warmup_steps=0, gradient_checkpointing=checkpointing),
    )
    llama = LlamaConfig(
        vocab_size=size.vocabulary, hidden_size=size.hidden, num_hidden_layers=size.layers, num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads, head_dim=size.head_size, intermediate_size=size.intermediate,
        max_position_embeddings=tokens_per_row, tie_word_embeddings=size.is_tied,
    )  # fmt: skip
    model = made_ready(LlamaForCausalLM(llama), config.learner)
    trainee = TrainState(model, build_optimizer(model, config.learner, NUM_STEPS))
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


def _resident_bytes(kind: str) -> int:
    """Return a line of Linux's account of this process: VmRSS now, VmHWM at its highest."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


if __name__ == "__main__":
    print(peak_bytes(checkpointing=sys.argv[1] == "1"))  # noqa: T201 - its result
