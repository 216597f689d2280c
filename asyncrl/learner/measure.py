"""What a step's tokens and samples say about it: kept a few floats a token while rows go by, summed up once at the end.

Computing once over all tokens keeps every figure independent of how samples share rows. Names are those of observe/metrics.py.
Called by learner/step.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from asyncrl.algorithms.advantage_types import FloatArray
from asyncrl.algorithms.diagnostics import mismatch
from asyncrl.algorithms.types import LossInputs, LossOutputs
from asyncrl.schema.batches import StepBatch


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """One row's trained tokens [M], detached."""

    learner_logprobs: torch.Tensor
    """Of the learner before the step."""
    behaviour_logprobs: torch.Tensor
    entropy: torch.Tensor
    weights: torch.Tensor
    clipped: torch.Tensor
    dual_clipped: torch.Tensor
    sequence_ids: torch.Tensor
    num_sequences: int

    @classmethod
    def of(cls, inputs: LossInputs, outputs: LossOutputs, *, proximal_is_learner: bool) -> TokenRecord:
        """Return the record of one row's loss; the current policy stands in where no proximal one was computed."""
        learner = inputs.proximal_logprobs if proximal_is_learner else inputs.logprobs.detach()
        entropy = torch.zeros_like(learner) if inputs.entropy is None else inputs.entropy.detach()
        return cls(
            learner,
            inputs.behaviour_logprobs,
            entropy,
            outputs.weights,
            outputs.clipped,
            outputs.dual_clipped,
            inputs.sequence_ids,
            inputs.num_sequences,
        )


class StepTokens:
    """Collects the records of a step."""

    def __init__(self, rows: int, correction_cap: float) -> None:
        """Begin a step.

        Args:
            rows: Rows of one pass over the batch; what is said about the policy before the step is said by the first pass.
            correction_cap: Where a correction weight counts as capped.
        """
        self._rows = rows
        self._correction_cap = correction_cap
        self._records: list[TokenRecord] = []

    def add(self, record: TokenRecord) -> None:
        """Add one row of one update."""
        self._records.append(record)

    def metrics(self) -> dict[str, float]:
        """Return the step's figures."""
        first, every = self._records[: self._rows], self._records
        offsets = np.cumsum([0, *(record.num_sequences for record in first)])
        ids = torch.cat([record.sequence_ids + int(offset) for record, offset in zip(first, offsets, strict=False)])
        learner = _joined(first, "learner_logprobs")
        everywhere = torch.ones_like(learner, dtype=torch.bool)
        distance = mismatch(learner, _joined(first, "behaviour_logprobs"), everywhere, ids, int(offsets[-1]))
        weights = _joined(first, "weights")
        return {
            "policy/entropy": _joined(first, "entropy").mean().item(),
            "policy/clip_fraction": _joined(every, "clipped").float().mean().item(),
            "policy/dual_clip_fraction": _joined(every, "dual_clipped").float().mean().item(),
            "ratio/mean": distance.ratio_mean,
            "ratio/max": distance.ratio_max,
            "ratio/min": distance.ratio_min,
            "ratio/ess": distance.ess,
            "ratio/correction_mean": weights.mean().item(),
            "ratio/capped_fraction": (weights >= self._correction_cap).float().mean().item(),
            "ratio/chi2_token": distance.chi2_token,
            "ratio/chi2_sequence": distance.chi2_sequence,
            "ratio/perplexity": distance.perplexity_ratio,
            "kl/mean": distance.kl_k3,
            "kl/max": distance.kl_max,
            "kl/k1": distance.kl_k1,
        }


def batch_metrics(batch: StepBatch, advantages: FloatArray) -> dict[str, float]:
    """Return what rewards, advantages and lengths say.

    Args:
        batch: The step's batch.
        advantages: [S], in the order of `batch.samples`.
    """
    samples = batch.samples
    rewards = np.array([sample.reward for sample in samples])
    lengths = np.array([sample.response_tokens for sample in samples])
    _, groups, counts = np.unique([sample.group_id for sample in samples], return_inverse=True, return_counts=True)
    means = np.bincount(groups, rewards) / counts
    spreads = np.sqrt(np.bincount(groups, (rewards - means[groups]) ** 2) / counts)
    return {
        **_spread("reward", rewards),
        **_spread("advantage", advantages),
        "reward/group_std_mean": float(spreads.mean()),
        "reward/zero_spread_fraction": float((spreads == 0).mean()),
        "data/samples": float(len(samples)),
        "data/rows": float(len(batch.rows)),
        "data/trained_tokens": float(batch.num_trained_tokens),
        "data/prompt_tokens_mean": float(np.mean([sample.prompt_tokens for sample in samples])),
        "data/response_tokens_mean": float(lengths.mean()),
        "data/response_tokens_max": float(lengths.max()),
    }


def _spread(name: str, values: FloatArray) -> dict[str, float]:
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/std": float(values.std()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _joined(records: list[TokenRecord], name: str) -> torch.Tensor:
    return torch.cat([getattr(record, name) for record in records])
