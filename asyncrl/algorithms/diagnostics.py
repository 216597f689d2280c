"""How far the data is from the policy that trains on it. Pure, without gradient; masked tokens never count.

Legend: N tokens, S sequences; rho = learner / behaviour, log rho = learner - behaviour. Called by learner/step.py and
experiments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.algorithms.ratios import LOG_RATIO_LIMIT, effective_sample_size
from asyncrl.algorithms.types import masked, segment_sum


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Learner against behaviour, over the trained tokens of a step. All plain floats."""

    ratio_mean: float
    """Mean of rho."""
    ratio_max: float
    ratio_min: float
    ess: float
    """Effective sample size of the unbounded rho, as a fraction."""
    kl_k1: float
    """Mean of -log rho: KL(behaviour || learner)."""
    kl_k3: float
    """Mean of rho - log rho - 1."""
    kl_max: float
    """Largest rho - log rho - 1 of a token."""
    chi2_token: float
    """Mean of rho^2, minus 1."""
    chi2_sequence: float
    """Mean over sequences of (product of rho)^2, minus 1."""
    perplexity_ratio: float
    """Mean over sequences of exp(mean(behaviour - learner)): the learner's perplexity over the behaviour policy's."""


@torch.no_grad()
def mismatch(
    learner: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor, sequence_ids: torch.Tensor, num_sequences: int
) -> Mismatch:
    """Compare the learner's log-probabilities [N] with those of the policy that sampled.

    Args:
        learner: float [N], proximal or current.
        behaviour: float [N].
        mask: bool [N]; at least one token is true.
        sequence_ids: int64 [N].
        num_sequences: S; sequences without a trained token do not count.

    Source: Kish 1965 (effective sample size); Schulman 2020 (k1, k3); verl `compute_offpolicy_metrics` (chi-squared, perplexity).
    """
    log_rho = (learner - behaviour)[mask].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    rho = log_rho.exp()
    k3 = torch.expm1(log_rho) - log_rho
    lengths_S = segment_sum(mask.to(learner.dtype), sequence_ids, num_sequences)
    sums_S = segment_sum(masked(learner - behaviour, mask), sequence_ids, num_sequences)[lengths_S > 0]
    lengths_S = lengths_S[lengths_S > 0]
    return Mismatch(
        ratio_mean=rho.mean().item(),
        ratio_max=rho.max().item(),
        ratio_min=rho.min().item(),
        ess=effective_sample_size(rho, torch.ones_like(rho, dtype=torch.bool)).item(),
        kl_k1=-log_rho.mean().item(),
        kl_k3=k3.mean().item(),
        kl_max=k3.max().item(),
        chi2_token=rho.square().mean().item() - 1.0,
        chi2_sequence=(2.0 * sums_S).clamp(max=2 * LOG_RATIO_LIMIT).exp().mean().item() - 1.0,
        perplexity_ratio=(-sums_S / lengths_S).exp().mean().item(),
    )


def entropy_of_logits(logits: torch.Tensor) -> torch.Tensor:
    """Return H = -sum p log p over the last axis, [..., V] -> [...]."""
    logprobs = logits.log_softmax(dim=-1)
    return -(logprobs.exp() * logprobs).sum(dim=-1)
