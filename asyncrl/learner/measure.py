"""What a step's tokens say about it: kept a few floats a token while rows go by, summed up once at the end.

Computing once over all tokens keeps every figure independent of how samples share rows. Called by learner/step.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.algorithms.diagnostics import mismatch
from asyncrl.algorithms.types import LossInputs, LossOutputs


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """One row's trained tokens, detached."""

    proximal_logprobs: torch.Tensor
    behaviour_logprobs: torch.Tensor
    current_logprobs: torch.Tensor
    entropy: torch.Tensor
    weights: torch.Tensor
    clipped: torch.Tensor
    sequence_ids: torch.Tensor
    num_sequences: int

    @classmethod
    def of(cls, inputs: LossInputs, outputs: LossOutputs) -> TokenRecord:
        """Return the record of one row's loss."""
        entropy = torch.zeros_like(inputs.logprobs) if inputs.entropy is None else inputs.entropy
        return cls(
            proximal_logprobs=inputs.proximal_logprobs,
            behaviour_logprobs=inputs.behaviour_logprobs,
            current_logprobs=inputs.logprobs.detach(),
            entropy=entropy.detach(),
            weights=outputs.weights,
            clipped=outputs.clipped,
            sequence_ids=inputs.sequence_ids,
            num_sequences=inputs.num_sequences,
        )


class StepTokens:
    """Collects the records of a step."""

    def __init__(self) -> None:
        self._records: list[TokenRecord] = []

    def add(self, record: TokenRecord) -> None:
        """Add one row of one update."""
        self._records.append(record)

    def metrics(self) -> dict[str, float]:
        """Return the step's figures. `ratio/*` and `kl/*` compare the current policy with the one that sampled."""
        offsets = [0]
        for record in self._records:
            offsets.append(offsets[-1] + record.num_sequences)
        ids = torch.cat([record.sequence_ids + offset for record, offset in zip(self._records, offsets, strict=False)])
        current = self._joined("current_logprobs")
        distance = mismatch(
            current, self._joined("behaviour_logprobs"), torch.ones_like(current, dtype=torch.bool), ids, offsets[-1]
        )
        return {
            "policy/entropy": self._joined("entropy").mean().item(),
            "policy/clip_fraction": self._joined("clipped").float().mean().item(),
            "ratio/mean": distance.ratio_mean,
            "ratio/max": distance.ratio_max,
            "ratio/ess": distance.ess,
            "ratio/weight_mean": self._joined("weights").mean().item(),
            "ratio/chi2_token": distance.chi2_token,
            "kl/mean": distance.kl_k3,
            "kl/max": distance.kl_max,
            "kl/k1_mean": distance.kl_k1,
        }

    def _joined(self, name: str) -> torch.Tensor:
        return torch.cat([getattr(record, name) for record in self._records])
