"""Importance ratios between two policies, bounded so that `exp` stays finite.

Called by losses, corrections, kl.py, diagnostics.py and learner/token_figures.py.

Legend: N tokens, S sequences. Statistics of a sequence are over the tokens a mask names.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.types import LossInputs, masked, segment_sum

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are held within plus and minus this before `exp`: e^20 is far past every cap, and e^90 is infinite in float32."""


def log_ratio(numerator: torch.Tensor, denominator: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return numerator - denominator [N], bounded, 0 and without gradient at masked tokens."""
    return masked(numerator - denominator, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def bounded_exp(log_values: torch.Tensor) -> torch.Tensor:
    """Return exp of values held within plus and minus LOG_RATIO_LIMIT, with gradient 0 outside."""
    return log_values.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def log_rho(inputs: LossInputs) -> torch.Tensor:
    """Return proximal - behaviour [N], detached and unbounded, 0 at masked tokens."""
    return masked(inputs.proximal_logprobs.detach() - inputs.behaviour_logprobs.detach(), inputs.mask)


def sequence_sum(values: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """Return [S], the sum of `values` [N] over each sequence's trained tokens."""
    return segment_sum(masked(values, inputs.mask), inputs.sequence_ids, inputs.num_sequences)


def sequence_mean(values: torch.Tensor, mask: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """Return [S], the mean of `values` [N] over each sequence's tokens in `mask` [N]; 0 where there is none."""
    sums_S = segment_sum(masked(values, mask), inputs.sequence_ids, inputs.num_sequences)
    lengths_S = segment_sum(mask.to(values.dtype), inputs.sequence_ids, inputs.num_sequences)
    return sums_S / lengths_S.clamp(min=1)


def effective_sample_size(weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return (sum w)^2 / (N sum w^2) over the N unmasked tokens: 1 when all weights agree, 1/N when one token has them all.

    Source: Kish 1965; as a fraction, verl `eff_sample_size`.
    """
    kept = weights[mask]
    return kept.sum().square() / (kept.numel() * kept.square().sum())
