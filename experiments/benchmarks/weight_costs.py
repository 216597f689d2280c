"""How much of the weights one RL step changes, and so how large a delta is.

The steps: SmolLM2-135M, learning rate 1e-6, sent as bfloat16.

Real `train_step`s (decoupled PPO, AdamW, float32 masters) on a few short samples with random rewards; after each, the weights as
they would be sent are encoded against those before, applied, and compared bit for bit. The model is the pretrained one where
`models/SmolLM2-135M-Instruct` is there, else one of its shape with random weights.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from asyncrl.learner.model.policy import publishable_tensors
from asyncrl.learner.step.train_step import train_step
from asyncrl.models.layout import copy_out, make_manifest, view_tensors
from asyncrl.packing.tensors import pack_step
from asyncrl.weights.delta import apply_delta, encode_delta
from benchmarks.harness import medians
from benchmarks.workload import PRETRAINED, random_groups, smollm2_model, train_config, train_state

LEARNING_RATE = 1e-6
VOCABULARY, PROMPT_TOKENS = 40_000, 16
LENGTHS = np.full((2, 2), 16)
"""Two groups of two responses."""


def delta_costs(num_steps: int) -> dict[str, float]:
    """Train and return what a step changed, after a first one, where AdamW moves every element by the learning rate.

    `delta_bytes`: bytes of the delta over those of the whole. `delta_changed_share`: elements that changed. Medians.
    `delta_identical`: 1 where the deltas, applied to one buffer one after the other, always gave the very bytes of the version.
    """
    config, is_there = train_config(LEARNING_RATE), (PRETRAINED / "config.json").is_file()
    pretrained = partial(AutoModelForCausalLM.from_pretrained, PRETRAINED, dtype=torch.float32, local_files_only=True)
    trainee = train_state(pretrained() if is_there else smollm2_model(), config)
    sent = publishable_tensors(trainee.model)
    manifest = make_manifest(sent, "bfloat16")
    before, after, received = (torch.zeros(manifest.total_bytes, dtype=torch.uint8) for _ in range(3))
    copy_out(sent, view_tensors(before, manifest))
    received.copy_(before)
    steps: list[dict[str, float]] = []
    for step in range(num_steps + 1):
        groups = random_groups(PROMPT_TOKENS, LENGTHS, VOCABULARY, step)
        train_step(trainee, pack_step(step, groups, tokens_per_row=256, temperature=1.0), config)
        copy_out(publishable_tensors(trainee.model), view_tensors(after, manifest))
        blob = encode_delta(manifest, before.numpy().data, after.numpy().data)
        assert blob is not None
        apply_delta(manifest, blob, received.numpy().data)
        changed = int((before.view(torch.int16) != after.view(torch.int16)).sum()) / (manifest.total_bytes // 2)
        shares = {"delta_bytes": len(blob) / manifest.total_bytes, "delta_changed_share": changed}
        steps.append(shares | {"delta_identical": float(torch.equal(received, after))})
        before, after = after, before
    identical = min(step["delta_identical"] for step in steps)
    return {"delta_pretrained": float(is_there), **medians(steps[1:]), "delta_identical": identical}
