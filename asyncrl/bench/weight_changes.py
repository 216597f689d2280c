"""How much of the weights one RL step changes, and so how large a delta is: SmolLM2-135M, learning rate 1e-6, sent as bfloat16.

Real `train_step`s (decoupled PPO, AdamW, float32 masters) on a few short samples with random rewards; after each, the weights as
they would be sent are encoded against those before, applied, and compared bit for bit. The model is the pretrained one where
`models/SmolLM2-135M-Instruct` is there, else one of its shape with random weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from asyncrl.bench.smollm2 import PRETRAINED, smollm2_model
from asyncrl.broadcast.delta import apply_delta, encode_delta
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.learner import LearnerConfig
from asyncrl.config.run import RunConfig
from asyncrl.learner.lora import publishable_tensors
from asyncrl.learner.model import made_ready
from asyncrl.learner.optim import build_optimizer
from asyncrl.learner.step import train_step
from asyncrl.learner.trainee import Trainee
from asyncrl.models.layout import copy_out, make_manifest, view_tensors
from asyncrl.packing.tensors import pack_step
from asyncrl.schema.batches import StepBatch
from asyncrl.schema.samples import Prompt, Sample, ScoredGroup, ScoredSample, ids_to_bytes, logprobs_to_bytes
from asyncrl.schema.weights import WeightsManifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEARNING_RATE = 1e-6
NUM_GROUPS, GROUP_SIZE, PROMPT_TOKENS, RESPONSE_TOKENS = 2, 2, 16, 16


@dataclass(frozen=True, slots=True)
class Change:
    """From one version to the next."""

    delta_share: float
    """Bytes of the delta over those of the whole."""
    changed_share: float
    """Elements whose bytes changed."""
    is_identical: bool
    """Whether the deltas so far, applied to one buffer, gave the very bytes of the new version."""


def changes(num_steps: int, folder: Path = PRETRAINED) -> Iterator[Change]:
    """Train and yield what each step changed, after a first one, where AdamW moves every element by the learning rate."""
    config = RunConfig(
        algorithm=AlgorithmConfig(groups_per_step=NUM_GROUPS, group_size=GROUP_SIZE),
        learner=LearnerConfig(learning_rate=LEARNING_RATE, warmup_steps=0),
    )
    model = made_ready(_opened(folder), config.learner)
    trainee = Trainee(model, build_optimizer(model, config.learner, num_steps + 1))
    manifest = make_manifest(publishable_tensors(model), "bfloat16")
    before, after, received = (torch.zeros(manifest.total_bytes, dtype=torch.uint8) for _ in range(3))
    _send(model, manifest, before)
    received.copy_(before)
    for step in range(num_steps + 1):
        train_step(trainee, _batch(step), config)
        _send(model, manifest, after)
        change = _change(manifest, before, after, received)
        if step:
            yield change
        before, after = after, before


def is_pretrained(folder: Path = PRETRAINED) -> bool:
    """Return whether the pretrained model is there."""
    return (folder / "config.json").is_file()


def _opened(folder: Path) -> PreTrainedModel:
    if not is_pretrained(folder):
        return smollm2_model()
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model


def _send(model: PreTrainedModel, manifest: WeightsManifest, flat: torch.Tensor) -> None:
    copy_out(publishable_tensors(model), manifest, view_tensors(flat, manifest), lambda _: None)


def _change(manifest: WeightsManifest, before: torch.Tensor, after: torch.Tensor, received: torch.Tensor) -> Change:
    blob = encode_delta(manifest, before.numpy().data, after.numpy().data)
    assert blob is not None
    apply_delta(manifest, blob, received.numpy().data)
    changed = int((before.view(torch.int16) != after.view(torch.int16)).sum())
    share = len(blob) / manifest.total_bytes
    return Change(share, changed / (manifest.total_bytes // 2), torch.equal(received, after))


def _batch(step: int) -> StepBatch:
    rng = np.random.default_rng(step)

    def sample(group: int, index: int) -> ScoredSample:
        tokens = rng.integers(2, 40_000, RESPONSE_TOKENS).tolist()
        made = Sample(
            group_id=group, index=index, attempt=0,
            prompt_ids=ids_to_bytes(prompts[group]), token_ids=ids_to_bytes(tokens),
            logprobs=logprobs_to_bytes([-10.0] * RESPONSE_TOKENS), versions=ids_to_bytes([step] * RESPONSE_TOKENS),
            finish_reason="stop", text="", generator="bench", started_s=0.0, finished_s=0.0,
        )  # fmt: skip
        return ScoredSample(made, float(index))

    prompts = [rng.integers(2, 40_000, PROMPT_TOKENS).tolist() for _ in range(NUM_GROUPS)]
    groups = [
        ScoredGroup(group, Prompt(f"bench/{group}"), tuple(sample(group, index) for index in range(GROUP_SIZE)))
        for group in range(NUM_GROUPS)
    ]
    return pack_step(step, groups, tokens_per_row=256, temperature=1.0)
