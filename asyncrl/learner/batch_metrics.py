"""What a step's batch says of itself, whatever the model: rewards, advantages, lengths, staleness. No torch."""

from __future__ import annotations

import numpy as np

from asyncrl.algorithms.advantage_types import FloatArray
from asyncrl.schema.batches import StepBatch


def batch_metrics(batch: StepBatch, advantages: FloatArray | None) -> dict[str, float]:
    """Return what rewards, advantages and lengths say; greedy baselines are left out.

    Args:
        batch: The step's batch.
        advantages: [S], in the order of `batch.samples`; None: the step has none (preferences).
    """
    drawn = [index for index, sample in enumerate(batch.samples) if not sample.is_greedy]
    samples = [batch.samples[index] for index in drawn]
    rewards = np.array([sample.reward for sample in samples])
    lengths = np.array([sample.response_tokens for sample in samples])
    pieces = {(sample.group_id, sample.row): sample.prompt_tokens for sample in samples}
    prompts = {sample.group_id: sample.prompt_tokens for sample in samples}
    _, groups, counts = np.unique([sample.group_id for sample in samples], return_inverse=True, return_counts=True)
    means = np.bincount(groups, rewards) / counts
    spreads = np.sqrt(np.bincount(groups, (rewards - means[groups]) ** 2) / counts)
    return {
        **batch_staleness(batch),
        **_spread("reward", rewards),
        **({} if advantages is None else _spread("advantage", advantages[drawn])),
        "reward/group_std_mean": float(spreads.mean()),
        "reward/zero_spread_fraction": float((spreads == 0).mean()),
        "data/samples": float(len(samples)),
        "data/rows": float(len(batch.rows)),
        "data/trained_tokens": float(batch.num_trained_tokens),
        "data/repeated_prompt_tokens": float(sum(pieces.values()) - sum(prompts.values())),
        "data/prompt_tokens_mean": float(np.mean([sample.prompt_tokens for sample in samples])),
        "data/response_tokens_mean": float(lengths.mean()),
        "data/response_tokens_max": float(lengths.max()),
    }


def batch_staleness(batch: StepBatch) -> dict[str, float]:
    """Return mean and largest staleness of the trained samples, each that of its oldest trained token; empty if there is none."""
    ages = [batch.step - sample.oldest_version for sample in batch.samples if sample.oldest_version >= 0]
    return {"staleness/mean": float(np.mean(ages)), "staleness/max": float(max(ages))} if ages else {}


def _spread(name: str, values: FloatArray) -> dict[str, float]:
    return {f"{name}/{kind}": float(getattr(values, kind)()) for kind in ("mean", "std", "max", "min")}
