"""What several benchmarks work with: models of random weights, and groups of scored samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.config.learner import LearnerConfig
from asyncrl.config.run import RunConfig
from asyncrl.schema.samples import Prompt, ScoredGroup, ScoredSample
from benchmarks.samples import make_sample

PRETRAINED = Path("models/SmolLM2-135M-Instruct")
"""Where docs/models.md has `asyncrl model import` put the real one, from the working directory."""


def llama(hidden: int, layers: int, heads: int, inner: int, vocabulary: int, **more: Any) -> LlamaForCausalLM:
    """Return a Llama with random weights, always the same."""
    torch.manual_seed(0)
    settings = {"max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0} | more
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
                    num_attention_heads=heads, **settings)
    )  # fmt: skip


def smollm2_model(dtype: torch.dtype = torch.float32, **more: Any) -> LlamaForCausalLM:
    """Return a model of SmolLM2-135M's shape with random weights."""
    model: LlamaForCausalLM = llama(576, 30, 9, 1536, 49152, num_key_value_heads=3, tie_word_embeddings=True, **more).to(dtype)
    return model


def random_groups(prompt_tokens: int, lengths_GN: NDArray[np.int64], vocabulary: int, step: int = 0) -> list[ScoredGroup]:
    """Return groups of random tokens whose members share a prompt; every other member is right, and all are of version `step`.

    Args:
        prompt_tokens: Of every prompt.
        lengths_GN: Tokens of each response, by group and member.
        vocabulary: Tokens are below it.
        step: Also seeds the tokens.
    """
    rng, groups = np.random.default_rng(step), []
    for number, lengths in enumerate(lengths_GN):
        prompt = rng.integers(2, vocabulary, prompt_tokens)
        responses = [rng.integers(2, vocabulary, length) for length in lengths]
        members = [make_sample(number, index, prompt, response, version=step) for index, response in enumerate(responses)]
        scored = tuple(ScoredSample(member, float(member.index % 2)) for member in members)
        groups.append(ScoredGroup(number, Prompt(f"bench/{number}"), scored))
    return groups


def train_config(learning_rate: float) -> RunConfig:
    """Return a config of the default algorithm with a learning rate that holds from the first step on."""
    return RunConfig(learner=LearnerConfig(learning_rate=learning_rate, warmup_steps=0))
