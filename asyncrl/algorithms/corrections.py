"""Off-policy corrections, one function a kind, applied together.."""

from __future__ import annotations

import torch

from asyncrl.algorithms.ratios import log_ratio, sequence_ratio
from asyncrl.algorithms.types import CorrectionOutputs, LossInputs, masked
from asyncrl.config.corrections import CorrectionConfig, TruncatedSequence, TruncatedToken


def correct(inputs: LossInputs, corrections: tuple[CorrectionConfig, ...]) -> CorrectionOutputs:
    """Return the product of the corrections' weights, and the tokens that all of them keep."""
    weights = inputs.mask.to(inputs.behaviour_logprobs.dtype)
    for item in corrections:
        if isinstance(item, TruncatedToken):
            log_rho = log_ratio(inputs.proximal_logprobs, inputs.behaviour_logprobs, inputs.mask).detach()
            weights = weights * log_rho.exp().clamp(item.floor, item.cap)
        elif isinstance(item, TruncatedSequence):
            weights_S = sequence_ratio(inputs.proximal_logprobs, inputs.behaviour_logprobs, inputs)
            weights = weights * weights_S.clamp(item.floor, item.cap)[inputs.sequence_ids]
    return CorrectionOutputs(masked(weights, inputs.mask), inputs.mask & torch.ones_like(inputs.mask))
