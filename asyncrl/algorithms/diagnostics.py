"""How far the data is from the policy that trains on it. Pure, without gradient; the caller leaves masked tokens out.

Legend: N tokens, S sequences; rho = learner / behaviour, log rho = learner - behaviour. Sums are taken in float64, so that the
order of tokens, and with it the packing, does not show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from asyncrl.algorithms.types import LOG_RATIO_LIMIT, segment_sum

STALENESS_BUCKETS = ("0", "1", "2", "3-4", "5-8", "9+")
"""Versions behind the learner, in the groups that figures are told by."""
_BUCKET_STARTS = (1, 2, 3, 5, 9)
RATIO_LEVELS = (0.01, 0.05, 0.5, 0.95, 0.99)
"""Quantiles of rho that are told."""


@dataclass(frozen=True, slots=True)
class TokenMismatch:
    """Two policies over some tokens. All plain floats."""

    ratio_mean: float
    """Mean of rho."""
    ratio_max: float
    ratio_min: float
    ratio_quantiles: tuple[float, ...]
    """Of rho, at RATIO_LEVELS."""
    ess: float
    """Effective sample size of the unbounded rho, as a fraction."""
    kl_k1: float
    """Mean of -log rho: KL(behaviour || learner)."""
    kl_k3: float
    """Mean of rho - log rho - 1."""
    kl_max: float
    """Largest rho - log rho - 1 of a token."""
    chi2: float
    """Mean of rho^2, minus 1."""


@dataclass(frozen=True, slots=True)
class SequenceMismatch:
    """Two policies over some sequences; a perplexity is exp(-mean log-probability) of a sequence. All plain floats."""

    chi2: float
    """Mean of (product of rho)^2, minus 1."""
    perplexity_ratio: float
    """Mean of the learner's perplexity over the behaviour policy's."""
    learner_perplexity: float
    learner_log_perplexity: float
    behaviour_perplexity: float
    behaviour_log_perplexity: float
    log_perplexity_gap: float
    """Mean of the learner's log perplexity minus the behaviour policy's."""
    log_perplexity_gap_abs: float
    """Mean of its magnitude."""
    log_perplexity_gap_max: float
    log_perplexity_gap_min: float


@dataclass(frozen=True, slots=True)
class WeightFigures:
    """Importance weights as they were applied, and the ratios behind them. All plain floats."""

    mean: float
    std: float
    """Of the population."""
    ess: float
    """Effective sample size, as a fraction."""
    high_fraction: float
    """Share of raw ratios over the cap."""
    low_fraction: float
    """Share of raw ratios under 1 / cap."""
    max: float
    min: float


def ratio_terms(learner: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """Return float64 [4, N]: rho, rho^2, -log rho (k1) and rho - log rho - 1 (k3); their means are distances of two policies.

    Source: Schulman 2020 (k1, k3).
    """
    log_rho = (learner.detach().double() - behaviour.double()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    rho = log_rho.exp()
    return torch.stack([rho, rho.square(), -log_rho, torch.expm1(log_rho) - log_rho])


def token_mismatch(learner: torch.Tensor, behaviour: torch.Tensor) -> TokenMismatch:
    """Compare the learner's log-probabilities [N] with those of the policy that sampled.

    Args:
        learner: float [N], proximal or current, N at least 1.
        behaviour: float [N].

    Source: Kish 1965 (effective sample size); verl `compute_offpolicy_metrics` (chi-squared).
    """
    terms = ratio_terms(learner, behaviour)
    mean, second_moment, kl_k1, kl_k3 = terms.mean(dim=1).tolist()
    rho, k3 = terms[0], terms[3]
    return TokenMismatch(
        ratio_mean=mean,
        ratio_max=rho.max().item(),
        ratio_min=rho.min().item(),
        ratio_quantiles=quantiles(rho, RATIO_LEVELS),
        ess=mean * mean / second_moment,
        kl_k1=kl_k1,
        kl_k3=kl_k3,
        kl_max=k3.max().item(),
        chi2=second_moment - 1.0,
    )


def divergence(learner: torch.Tensor, behaviour: torch.Tensor) -> tuple[float, float]:
    """Return the k1 and k3 estimates of KL(behaviour || learner), means over tokens [N], N at least 1."""
    k1, k3 = ratio_terms(learner, behaviour)[2:].mean(dim=1).tolist()
    return k1, k3


def sequence_terms(log_ratio_sums: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return float64 [2, S]: (product of rho)^2, and the learner's perplexity over the behaviour policy's.

    Args:
        log_ratio_sums: float64 [S], sum of log rho over each sequence.
        lengths: float64 [S], tokens of each, at least 1.
    """
    log_products = log_ratio_sums.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    gaps = (-log_ratio_sums / lengths).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.stack([(2.0 * log_products).exp(), gaps.exp()])


def sequence_mismatch(
    learner: torch.Tensor, behaviour: torch.Tensor, sequence_ids: torch.Tensor, num_sequences: int
) -> SequenceMismatch:
    """Compare the learner with the policy that sampled, a sequence at a time.

    Args:
        learner: float [N], log-probabilities, proximal or current, N at least 1.
        behaviour: float [N].
        sequence_ids: int64 [N].
        num_sequences: S; sequences without a token here do not count.

    Source: verl `compute_offpolicy_metrics`.
    """
    lengths_S = segment_sum(torch.ones_like(learner, dtype=torch.float64), sequence_ids, num_sequences)
    present_S = lengths_S > 0
    lengths_S = lengths_S[present_S]
    learner_S = segment_sum(learner.detach().double(), sequence_ids, num_sequences)[present_S] / lengths_S
    behaviour_S = segment_sum(behaviour.double(), sequence_ids, num_sequences)[present_S] / lengths_S
    gap_S = behaviour_S - learner_S
    second_moment, ratio = sequence_terms(-gap_S * lengths_S, lengths_S).mean(dim=1).tolist()
    each = torch.stack([(-learner_S).exp(), -learner_S, (-behaviour_S).exp(), -behaviour_S, gap_S, gap_S.abs()])
    ours, our_log, theirs, their_log, gap, gap_abs = each.mean(dim=1).tolist()
    return SequenceMismatch(
        chi2=second_moment - 1.0,
        perplexity_ratio=ratio,
        learner_perplexity=ours,
        learner_log_perplexity=our_log,
        behaviour_perplexity=theirs,
        behaviour_log_perplexity=their_log,
        log_perplexity_gap=gap,
        log_perplexity_gap_abs=gap_abs,
        log_perplexity_gap_max=gap_S.max().item(),
        log_perplexity_gap_min=gap_S.min().item(),
    )


def weight_figures(weights: torch.Tensor, ratios: torch.Tensor, cap: float, level: Literal["token", "sequence"]) -> WeightFigures:
    """Describe importance weights.

    Mean, deviation and effective sample size are over tokens at both levels. Fractions are over `ratios`. The extremes are those
    of the weights at token level, and those of the uncapped products at sequence level.

    Args:
        weights: float [N], of unmasked tokens, as they multiplied the loss; at least one.
        ratios: float, before any bound: rho of the same N tokens, or its product over each of S sequences.
        cap: Where a ratio counts as high; under 1 / cap it counts as low.
        level: Which of the two `ratios` are.

    Source: Kish 1965; verl `compute_is_metrics`, whose choices these are.
    """
    weights, ratios = weights.double(), ratios.double()
    extremes = weights if level == "token" else ratios
    mean, second_moment = weights.mean(), weights.square().mean()
    return WeightFigures(
        mean=mean.item(),
        std=weights.std(correction=0).item(),
        ess=(mean.square() / second_moment).item() if second_moment > 0 else 0.0,
        high_fraction=(ratios > cap).double().mean().item(),
        low_fraction=(ratios < 1.0 / cap).double().mean().item(),
        max=extremes.max().item(),
        min=extremes.min().item(),
    )


def logprob_gap(learner: torch.Tensor, behaviour: torch.Tensor) -> tuple[float, float, float]:
    """Compare two computations of what should be the same log-probabilities [N], at least one.

    Returns:
        Mean and largest magnitude of the difference, and Pearson correlation of the probabilities (NaN where one does
        not vary).

    Source: MiniMax-M1 2025, section 3.2 (correlation of the probabilities of trainer and engine).
    """
    gap = (learner.double() - behaviour.double()).abs()
    ours, theirs = learner.double().exp(), behaviour.double().exp()
    ours, theirs = ours - ours.mean(), theirs - theirs.mean()
    spread = (ours.square().sum() * theirs.square().sum()).sqrt().item()
    correlation = (ours * theirs).sum().item() / spread if spread > 0 else math.nan
    return gap.mean().item(), gap.max().item(), correlation


def staleness_bucket(staleness: torch.Tensor) -> torch.Tensor:
    """Return int64 [N], the index into STALENESS_BUCKETS of each staleness [N] in versions; -1 where it is negative (unknown)."""
    starts = torch.tensor(_BUCKET_STARTS, device=staleness.device, dtype=staleness.dtype)
    return torch.where(staleness < 0, -1, torch.bucketize(staleness, starts, right=True))


def sequence_staleness(staleness: torch.Tensor, sequence_ids: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Return [S], the staleness of each sequence's oldest token; -1 where none is known. Takes [N], -1 for unknown."""
    return staleness.new_full((num_sequences,), -1).scatter_reduce(0, sequence_ids, staleness, "amax")


def bucket_means(terms: torch.Tensor, buckets: torch.Tensor) -> dict[str, list[float]]:
    """Return the mean of each of `terms` [Q, N] over every staleness bucket that has any of N, by the bucket's name.

    Args:
        terms: float64 [Q, N].
        buckets: int64 [N], as from `staleness_bucket`; -1 is of none.
    """
    num_buckets = len(STALENESS_BUCKETS) + 1
    sums = terms.new_zeros(len(terms), num_buckets).index_add(1, buckets + 1, terms)
    counts = torch.bincount(buckets + 1, minlength=num_buckets)
    means = (sums / counts).T[1:].tolist()
    return {name: mean for name, mean, count in zip(STALENESS_BUCKETS, means, counts[1:].tolist(), strict=True) if count}


def quantiles(values: torch.Tensor, levels: Sequence[float]) -> tuple[float, ...]:
    """Return the quantiles of `values` [N] at each of `levels`, interpolated linearly between neighbours.

    Selects the few order statistics that are needed instead of sorting everything, on the CPU.

    Args:
        values: [N] of any real type, N at least 1, no NaN.
        levels: Each in [0, 1].

    Source: Hyndman and Fan 1996, definition 7: the default of numpy and torch.
    """
    array = values.detach().cpu().numpy()
    positions = np.asarray(levels, dtype=np.float64) * (len(array) - 1)
    below = np.floor(positions).astype(np.int64)
    above = np.minimum(below + 1, len(array) - 1)
    chosen = np.partition(array, np.union1d(below, above))
    low, high = chosen[below].astype(np.float64), chosen[above].astype(np.float64)
    return tuple((low + (positions - below) * (high - low)).tolist())


@torch.no_grad()
def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """Return 1 - var(R - v) / var(R) over the trained tokens: 1 is a perfect critic, 0 no better than a constant.

    Args:
        values: float [N], of the critic before the step: those the returns were made with.
        returns: float [N].
        mask: bool [N]; at least one token is true.

    Returns:
        At most 1; 0 where the returns do not vary beyond rounding: there is nothing to explain.

    Source: Schulman et al., OpenAI baselines `explained_variance`.
    """
    values_M, returns_M = values[mask].double(), returns[mask].double()
    spread = returns_M.var(correction=0).item()
    rounding = torch.finfo(returns.dtype).eps * max(returns_M.abs().max().item(), values_M.abs().max().item())
    if spread <= (4.0 * rounding) ** 2:
        return 0.0
    return 1.0 - (returns_M - values_M).var(correction=0).item() / spread
