"""Importance ratios between two policies, bounded so that `exp` stays finite. Called by losses, corrections and diagnostics."""

from __future__ import annotations

import torch

from asyncrl.algorithms.types import LossInputs, masked, segment_sum

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are held within plus and minus this before `exp`: e^20 is far past every cap, and e^90 is infinite in float32."""


def log_ratio(numerator: torch.Tensor, denominator: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return numerator - denominator [N], bounded, 0 and without gradient at masked tokens."""
    return masked(numerator - denominator, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_ratio(numerator: torch.Tensor, denominator: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """Return [S], the product of numerator / denominator over each sequence's trained tokens, detached."""
    difference = masked(numerator.detach() - denominator.detach(), inputs.mask)
    log_product_S = segment_sum(difference, inputs.sequence_ids, inputs.num_sequences)
    return log_product_S.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def effective_sample_size(weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return (sum w)^2 / (N sum w^2) over the N unmasked tokens: 1 when all weights agree, 1/N when one token has them all.

    Source: Kish 1965; as a fraction, verl `eff_sample_size`.
    """
    kept = weights[mask]
    return kept.sum().square() / (kept.numel() * kept.square().sum())
