"""Importance weights that make data of an older policy safe: proximal / behaviour, bounded.

Invariants: weights are detached; they are 1 where behaviour and proximal agree (bounds permitting) and 0 at masked tokens.
A correction is one function and one row of `CORRECTIONS`. Called by algorithms/losses.py and algorithms/diagnostics.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncrl.algorithms.types import LossConfig, LossInputs, masked, segment_sum

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are held within plus and minus this before `exp`: e^20 is far past every cap, and e^90 is infinite in float32."""

Correction = Callable[[LossInputs, LossConfig], torch.Tensor]


def log_ratio(numerator: torch.Tensor, denominator: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return numerator - denominator [N], bounded, 0 and without gradient at masked tokens."""
    return masked(numerator - denominator, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def no_correction(inputs: LossInputs, config: LossConfig) -> torch.Tensor:
    """Return 1 at every trained token."""
    del config
    return inputs.mask.to(inputs.behaviour_logprobs.dtype)


def truncated_token(inputs: LossInputs, config: LossConfig) -> torch.Tensor:
    """Return clamp(proximal / behaviour, floor, cap) of each token.

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (TIS); AReaL
    (arXiv 2505.24298) for proximal / behaviour in the decoupled objective.
    """
    log_rho = log_ratio(inputs.proximal_logprobs, inputs.behaviour_logprobs, inputs.mask).detach()
    return masked(log_rho.exp().clamp(config.correction_floor, config.correction_cap), inputs.mask)


def truncated_sequence(inputs: LossInputs, config: LossConfig) -> torch.Tensor:
    """Return clamp(product of proximal / behaviour over the sequence's trained tokens, floor, cap) on each of its tokens.

    Source: as `truncated_token`; the sequence form is verl's `rollout_is=sequence`.
    """
    weights_S = sequence_ratio(inputs.proximal_logprobs, inputs.behaviour_logprobs, inputs)
    weights_S = weights_S.clamp(config.correction_floor, config.correction_cap)
    return masked(weights_S[inputs.sequence_ids], inputs.mask)


CORRECTIONS: dict[str, Correction] = {
    "none": no_correction,
    "tis_token": truncated_token,
    "tis_sequence": truncated_sequence,
}


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
