"""Inputs and outputs of policy losses, ratios between two policies, and estimators of KL(policy || reference).

An estimator gives one value per token, from the sampled token; d = logprobs - reference. k1 is unbiased and may be negative;
k2 is biased, low variance; k3 is unbiased and never negative. This holds for the values. If they are differentiated directly on
the policy's own samples, k1's gradient is zero on average, k3's is that of KL(reference || policy), and k2's is unbiased.
Source: Schulman 2020, "Approximating KL divergence"; on the gradients: Liu et al. 2025 (arXiv 2510.01555).

Legend: N tokens of one micro-batch, concatenated (trained tokens and possibly masked ones), S sequences in it. Log-probabilities
are of the sampled token, natural logarithm, at the sampling temperature. Three policies: `behaviour` sampled the token,
`proximal` is the learner before this step's first update, `current` has the gradient. There may also be a frozen `reference`.

Invariants: the value at a masked token (even NaN) changes no value and no gradient; advantages, proximal, behaviour and reference
have no gradient; the loss of a micro-batch is its numerator over the *global* denominator, so that losses and gradients of
micro-batches and ranks add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from asyncrl.algorithms.diagnostics import LOG_RATIO_LIMIT
from asyncrl.config.algorithm import AlgorithmConfig, CorrectionConfig, KLConfig


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts over the whole update: all micro-batches, all ranks."""

    num_tokens: float
    """Trained tokens."""
    num_sequences: float
    """Sequences with at least one trained token."""
    constant: float = 1.0
    """Divides the sum over a sequence in some aggregations (for example, the maximum length)."""


@dataclass(frozen=True, slots=True)
class CorrectionOutputs:
    """Weight and selection of each token by corrections. Detached."""

    weights: torch.Tensor
    """float [N], multiplies the token's loss; 0 where the token is dropped or masked."""
    kept: torch.Tensor
    """bool [N], false where a correction dropped the token; false at masked tokens."""
    clip_low: float | None = None
    """Replaces the config's clip range for this update (m2po_clip); None: the config's is used."""
    clip_high: float | None = None


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One micro-batch, flat: float [N] unless stated otherwise."""

    logprobs: torch.Tensor
    """Current policy, with gradient."""
    proximal_logprobs: torch.Tensor
    behaviour_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    """bool [N], true on trained tokens."""
    sequence_ids: torch.Tensor
    """int64 [N], in [0, S); S is `num_sequences`."""
    num_sequences: int
    denominators: Denominators
    entropy: torch.Tensor | None = None
    """Entropy of the current policy's distribution; with gradient if `entropy_coefficient` is not 0."""
    reference_logprobs: torch.Tensor | None = None
    versions: torch.Tensor | None = None
    """int64 [N], the version that sampled each token; -1: unknown."""
    learner_version: int = 0
    """The version of `proximal_logprobs`."""
    corrections: CorrectionOutputs | None = None
    """Corrections already computed for the whole update; None: the loss computes them from its config."""


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Parameters of losses; each loss reads the fields that it uses."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    """Distances of the lower and upper clipping bounds from 1."""
    dual_clip: float | None = None
    """c of dual clip, at least 1; None switches it off."""
    max_ratio: float = 5.0
    min_ratio: float = 0.0
    """Absolute bounds of a detached ratio (CISPO; AIPO and DPPO use only the upper one)."""
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    """Temperatures of SAPO's gate for positive and for other advantages."""
    vespo_positive: tuple[float, float] = (2.0, 3.0)
    vespo_negative: tuple[float, float] = (3.0, 2.0)
    """k and lambda of VESPO's weight, for advantages >= 0 and < 0."""
    log_ratio_penalty: float = 0.0
    """Coefficient of (log current / behaviour)^2, which is added to the loss."""
    corrections: tuple[CorrectionConfig, ...] = ()
    aggregation: str = "token-mean"
    """A name in AGGREGATIONS."""
    denominator: str = "all"
    """`all` or `kept`; with `kept` the caller's denominators count kept tokens and sequences only."""
    entropy_coefficient: float = 0.0
    kl: KLConfig | None = None
    """The KL penalty, if it is in the loss."""
    kl_coefficient: float = 0.0
    """The present coefficient (adaptive or fixed)."""

    @classmethod
    def of(cls, algorithm: AlgorithmConfig, kl_coefficient: float) -> LossConfig:
        """Return the part of a run's config that losses read, with the present KL coefficient."""
        kl = algorithm.kl if algorithm.kl is not None and algorithm.kl.where == "loss" else None
        same = {field.name for field in fields(cls)} & set(algorithm.__struct_fields__) - {"kl"}
        return cls(**{name: getattr(algorithm, name) for name in same}, kl=kl, kl_coefficient=kl_coefficient)


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """The scalar to differentiate, and values for diagnostics. All except `loss` are detached."""

    loss: torch.Tensor
    """float [], this micro-batch's share of the update's loss."""
    weights: torch.Tensor
    """float [N], the correction weight that multiplied each token's loss."""
    clipped: torch.Tensor
    """bool [N], whether the clipped term was the larger one."""
    dual_clipped: torch.Tensor
    """bool [N], whether dual clip bounded the token."""
    kept: torch.Tensor | None = None
    """bool [N], false where a correction dropped the token; None: all trained tokens are kept."""
    reference_kl: torch.Tensor | None = None
    """float [N], estimate of KL(current || reference), without coefficient; None: no penalty in the loss."""


def segment_sum(values: torch.Tensor, sequence_ids: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Return [S], the sum of `values` [N] over each sequence."""
    return values.new_zeros(num_sequences).index_add(0, sequence_ids, values)


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `values` with exact zeros, and zero gradient, where `mask` is false."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def log_ratio(numerator: torch.Tensor, denominator: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return numerator - denominator [N], bounded; 0 and without gradient at masked tokens."""
    return masked(numerator - denominator, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def bounded_exp(log_values: torch.Tensor) -> torch.Tensor:
    """Return exp of values clamped to plus and minus LOG_RATIO_LIMIT, with gradient 0 outside."""
    return log_values.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def log_rho(inputs: LossInputs) -> torch.Tensor:
    """Return proximal - behaviour [N], detached and unbounded, 0 at masked tokens."""
    return masked(inputs.proximal_logprobs.detach() - inputs.behaviour_logprobs.detach(), inputs.mask)


def sequence_sum(values: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """Return [S], the sum of `values` [N] over each sequence's trained tokens."""
    return segment_sum(masked(values, inputs.mask), inputs.sequence_ids, inputs.num_sequences)


def sequence_mean(values: torch.Tensor, mask: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """Return [S], the mean of `values` [N] over each sequence's tokens in `mask` [N]; 0 if there are none."""
    sums_S = segment_sum(masked(values, mask), inputs.sequence_ids, inputs.num_sequences)
    lengths_S = segment_sum(mask.to(values.dtype), inputs.sequence_ids, inputs.num_sequences)
    return sums_S / lengths_S.clamp(min=1)


def k3(difference: torch.Tensor) -> torch.Tensor:
    """Return exp(-d) - 1 + d, with d clamped to plus and minus LOG_RATIO_LIMIT (as in verl)."""
    difference = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(-difference) + difference


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda difference: difference,
    "k2": lambda difference: 0.5 * difference.square(),
    "k3": k3,
    "abs": torch.abs,
}
"""Functions of d [N]. `abs` is not an estimate of KL, but is 0 where the policies agree (verl)."""
