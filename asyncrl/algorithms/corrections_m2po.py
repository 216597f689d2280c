"""M2PO, second-moment trust: two algorithms that share the name. Both look at all tokens of an update at once.

`m2po_mask` drops tokens, as AReaL does and the paper's algorithm 1 describes; `m2po_clip` chooses PPO's clip range, as the
authors' code does. Legend: N tokens, K of them looked at. Called through corrections.CORRECTIONS.
"""

from __future__ import annotations

import math

import torch

from asyncrl.algorithms.ratios import LOG_RATIO_LIMIT, log_ratio, log_rho
from asyncrl.algorithms.types import CorrectionOutputs, LossInputs
from asyncrl.config.corrections import SecondMomentClip, SecondMomentMask


def m2po_mask(inputs: LossInputs, config: SecondMomentMask) -> CorrectionOutputs:
    """Drop the tokens of largest (log rho)^2, as few as possible, until the mean of the rest is under the threshold.

    At least one token stays. Goes with denominator `kept` in AReaL.

    Source: M2PO (arXiv 2510.01161), algorithm 1; AReaL `_apply_m2po_masking`.
    """
    kept = inputs.mask.clone()
    squares_K, order_K = log_rho(inputs)[inputs.mask].double().square().sort(stable=True)
    means_K = squares_K.cumsum(0) / torch.arange(1, len(squares_K) + 1, device=squares_K.device)
    # Sorted upwards, the running mean only grows: what is under the threshold is a prefix.
    num_kept = max(int((means_K < config.threshold).sum()), 1)
    positions_K = inputs.mask.nonzero().squeeze(-1)[order_K]
    kept[positions_K[num_kept:]] = False
    return CorrectionOutputs(weights=kept.to(inputs.behaviour_logprobs.dtype), kept=kept)


def m2po_clip(inputs: LossInputs, config: SecondMomentClip) -> CorrectionOutputs:
    """Choose one clip range [exp(-tau), exp(tau)] for the update, so that harmful tokens keep their second moment in bounds.

    Harmful are the K tokens that PPO's clipping can act on: advantage over 0 and ratio over 1, or both under, of the ratio that
    the loss clips, r = current / proximal (so this goes with `proximal = "behaviour"`, where r spans the whole staleness; against
    a recomputed proximal policy r is 1 at the first update and nothing is clipped). With d = (log r)^2 of the harmful tokens in
    rising order: if their mean is at most the threshold, or there is none, nothing is clipped (range [0, infinity)); else tau^2
    is the largest d_j with sum_i min(d_i, d_j) < K threshold, and 0 if the first is too large. No token is dropped. Two things of
    that code are left out: its optional floor under the range, off in its scripts, and its 1e-12 offsets.

    Source: github.com/Infini-AI-Lab/M2PO, `kpo_clip_harmful_tokens` and `_solve_tau_from_sorted_delta2`, for arXiv 2510.01161;
    threshold 0.04 there. That code chooses the range for each micro-batch, this one for the update.
    """
    log_r = log_ratio(inputs.logprobs.detach(), inputs.proximal_logprobs.detach(), inputs.mask)
    harmful = inputs.mask & (log_r * inputs.advantages.detach() > 0)
    squares_K = log_r[harmful].double().square().sort().values
    clip_low, clip_high = 1.0, math.inf
    if len(squares_K) and squares_K.mean() > config.threshold:
        num_larger_K = torch.arange(len(squares_K) - 1, -1, -1, device=squares_K.device)
        capped_sums_K = squares_K.cumsum(0) + squares_K * num_larger_K
        num_under = int((capped_sums_K < len(squares_K) * config.threshold).sum())
        tau = math.sqrt(squares_K[num_under - 1].item()) if num_under else 0.0
        assert tau <= LOG_RATIO_LIMIT
        clip_low, clip_high = 1.0 - math.exp(-tau), math.exp(tau) - 1.0
    return CorrectionOutputs(
        weights=inputs.mask.to(inputs.behaviour_logprobs.dtype), kept=inputs.mask, clip_low=clip_low, clip_high=clip_high
    )
