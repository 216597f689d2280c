"""How much of the weights one RL step changes, and so how large a delta is.

The steps: SmolLM2-135M, learning rate 1e-6, sent as bfloat16.

Real `train_step`s (decoupled PPO, AdamW, float32 masters) on a few short samples with random rewards; after each, the weights as
they would be sent are encoded against those before, applied, and compared bit for bit. The model is the pretrained one where
`models/SmolLM2-135M-Instruct` is there, else one of its shape with random weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.learner import LearnerConfig
from asyncrl.config.run import RunConfig
from asyncrl.learner.model.policy import made_ready, publishable_tensors
from asyncrl.learner.optim.optimizer import PolicyOptimizer
from asyncrl.learner.step.train_step import train_step
from asyncrl.learner.train_state import TrainState
from asyncrl.models.layout import copy_out, make_manifest, view_tensors
from asyncrl.packing.tensors import pack_step
from asyncrl.schema.batches import StepBatch
from asyncrl.weights.delta import apply_delta, encode_delta
from benchmarks.harness import medians
from benchmarks.workload import PRETRAINED, scored_group, smollm2_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEARNING_RATE = 1e-6
NUM_GROUPS, GROUP_SIZE, PROMPT_TOKENS, RESPONSE_TOKENS = 2, 2, 16, 16


def delta_costs(num_steps: int, folder: Path = PRETRAINED) -> dict[str, float]:
    """Train and return what a step changed, after a first one, where AdamW moves every element by the learning rate.

    `delta_bytes`: bytes of the delta over those of the whole. `delta_changed_share`: elements that changed. Medians.
    `delta_identical`: 1 where the deltas, applied to one buffer one after the other, always gave the very bytes of the version.
    """
    config = RunConfig(
        algorithm=AlgorithmConfig(groups_per_step=NUM_GROUPS, group_size=GROUP_SIZE),
        learner=LearnerConfig(learning_rate=LEARNING_RATE, warmup_steps=0),
    )
    model = made_ready(_opened(folder), config.learner)
    trainee = TrainState(model, PolicyOptimizer(model.named_parameters(), config.learner, num_steps + 1))
    manifest = make_manifest(publishable_tensors(model), "bfloat16")
    before, after, received = (torch.zeros(manifest.total_bytes, dtype=torch.uint8) for _ in range(3))
    copy_out(publishable_tensors(model), view_tensors(before, manifest))
    received.copy_(before)
    steps: list[dict[str, float]] = []
    for step in range(num_steps + 1):
        train_step(trainee, _batch(step), config)
        copy_out(publishable_tensors(model), view_tensors(after, manifest))
        blob = encode_delta(manifest, before.numpy().data, after.numpy().data)
        assert blob is not None
        apply_delta(manifest, blob, received.numpy().data)
        changed = int((before.view(torch.int16) != after.view(torch.int16)).sum()) / (manifest.total_bytes // 2)
        shares = {"delta_bytes": len(blob) / manifest.total_bytes, "delta_changed_share": round(changed, 5)}
        steps.append(shares | {"delta_identical": float(torch.equal(received, after))})
        before, after = after, before
    identical = min(step["delta_identical"] for step in steps)
    return {"delta_pretrained": float(_is_there(folder)), **medians(steps[1:]), "delta_identical": identical}


def _is_there(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _opened(folder: Path) -> PreTrainedModel:
    if not _is_there(folder):
        return smollm2_model()
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model


def _batch(step: int) -> StepBatch:
    rng, rewards = np.random.default_rng(step), [float(index) for index in range(GROUP_SIZE)]
    prompts = rng.integers(2, 40_000, (NUM_GROUPS, PROMPT_TOKENS)).tolist()
    texts = rng.integers(2, 40_000, (NUM_GROUPS, GROUP_SIZE, RESPONSE_TOKENS)).tolist()
    groups = [
        scored_group(number, prompt, responses, rewards, version=[step] * GROUP_SIZE)
        for number, (prompt, responses) in enumerate(zip(prompts, texts, strict=True))
    ]
    return pack_step(step, groups, tokens_per_row=256, temperature=1.0)
