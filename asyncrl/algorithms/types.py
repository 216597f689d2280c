"""What every loss takes and gives.

Legend: N tokens of one micro-batch laid end to end (trained tokens and, where a caller has them, masked ones), S sequences of
it. Log-probabilities are of the sampled token, natural logarithm, at the sampling temperature. Three policies: `behaviour`
sampled the token, `proximal` is the learner before this step's first update, `current` carries the gradient.

Invariants: whatever stands at a masked token (NaN too) changes no value and no gradient; advantages, proximal and behaviour
carry no gradient; the loss of a micro-batch is its numerator over the *global* denominator, so that losses and gradients of
micro-batches and ranks add up.

Called by learner/step.py and by outside losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.config.algorithm import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts over the whole update: all micro-batches, all ranks."""

    num_tokens: float
    """Trained tokens."""
    num_sequences: float
    """Sequences with at least one trained token."""
    constant: float = 1.0
    """Divides the sum over a sequence, where the aggregation says so (a longest length, say)."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One micro-batch, flat."""

    logprobs: torch.Tensor
    """float [N], current policy, with gradient."""
    proximal_logprobs: torch.Tensor
    """float [N]."""
    behaviour_logprobs: torch.Tensor
    """float [N]."""
    advantages: torch.Tensor
    """float [N]."""
    mask: torch.Tensor
    """bool [N], true on trained tokens."""
    sequence_ids: torch.Tensor
    """int64 [N], in [0, S)."""
    num_sequences: int
    """S."""
    denominators: Denominators
    entropy: torch.Tensor | None = None
    """float [N], of the current policy's distribution; with gradient where `entropy_coefficient` is not 0."""


@dataclass(frozen=True, slots=True)
class LossConfig:
    """What a loss is told; each loss reads what it knows."""

    clip_low: float = 0.2
    """Distance of the lower clipping bound from 1."""
    clip_high: float = 0.2
    """Distance of the upper clipping bound from 1."""
    dual_clip: float | None = None
    """c of dual clip, at least 1; None switches it off."""
    correction: str = "none"
    """A name in CORRECTIONS."""
    correction_cap: float = 2.0
    """Upper bound of an importance weight."""
    correction_floor: float = 0.0
    """Lower bound of an importance weight."""
    aggregation: str = "token-mean"
    """A name in AGGREGATIONS."""
    entropy_coefficient: float = 0.0

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> LossConfig:
        """Return the part of a run's config that losses read."""
        return cls(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
            correction=algorithm.correction,
            correction_cap=algorithm.correction_cap,
            aggregation=algorithm.aggregation,
            entropy_coefficient=algorithm.entropy_coefficient,
        )


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """The scalar to differentiate, and what diagnostics read. All but `loss` are detached."""

    loss: torch.Tensor
    """float [], this micro-batch's share of the update's loss."""
    weights: torch.Tensor
    """float [N], importance weight that multiplied each token's loss."""
    clipped: torch.Tensor
    """bool [N], the clipped term was the larger one."""
    dual_clipped: torch.Tensor
    """bool [N], dual clip bounded the token."""


def segment_sum(values: torch.Tensor, sequence_ids: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Return [S], the sum of `values` [N] over each sequence."""
    return values.new_zeros(num_sequences).index_add(0, sequence_ids, values)


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `values` with exact zeros, and zero gradient, where `mask` is false."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
