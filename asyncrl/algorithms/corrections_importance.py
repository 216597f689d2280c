"""Corrections by an importance weight rho = proximal / behaviour: truncated, or masked where it leaves a band.

Legend: N tokens, S sequences. Truncation keeps every token and bounds its weight; masking drops what lies outside [low, high].
Bands are compared on logarithms, so that no product overflows first. Called through corrections.CORRECTIONS.
"""

from __future__ import annotations

import math

import torch

from asyncrl.algorithms.ratios import bounded_exp, log_rho, sequence_mean, sequence_sum
from asyncrl.algorithms.types import CorrectionOutputs, LossInputs, masked
from asyncrl.config.corrections import MaskedGeometric, MaskedSequence, MaskedToken, TruncatedSequence, TruncatedToken

LEAST_MEAN_WEIGHT = 1e-8
"""Weights whose mean is less are left as they are (verl's bound)."""


def tis_token(inputs: LossInputs, config: TruncatedToken) -> CorrectionOutputs:
    """Weigh each token by clamp(rho, floor, cap).

    Source: truncated importance sampling, Ionides 2008; on tokens, Yao et al. 2025 ("Your efficient RL framework secretly brings
    you off-policy RL training"); verl `rollout_is: token`, OpenRLHF and slime `tis`. `normalize`: self-normalized importance
    sampling (Hesterberg 1995); verl `rollout_is_batch_normalize`.
    """
    weights = bounded_exp(log_rho(inputs)).clamp(config.floor, config.cap)
    return _weigh(inputs, weights / _mean_of(weights[inputs.mask]) if config.normalize else weights)


def tis_sequence(inputs: LossInputs, config: TruncatedSequence) -> CorrectionOutputs:
    """Weigh each token by clamp(product of its sequence's rho, floor, cap).

    Source: verl `rollout_is: sequence`; slime `tis` with level sequence.
    """
    weights_S = bounded_exp(sequence_sum(log_rho(inputs), inputs)).clamp(config.floor, config.cap)
    if config.normalize:
        has_tokens_S = sequence_sum(torch.ones_like(inputs.behaviour_logprobs), inputs) > 0
        weights_S = weights_S / _mean_of(weights_S[has_tokens_S])
    return _weigh(inputs, weights_S[inputs.sequence_ids])


def icepop(inputs: LossInputs, config: MaskedToken) -> CorrectionOutputs:
    """Weigh each token by rho where it lies in [low, high], and drop it elsewhere.

    Source: IcePop, Ling team 2025 (arXiv 2510.18855); AReaL and OpenRLHF with level token.
    """
    log_rho_N = log_rho(inputs)
    return _mask(inputs, log_rho_N, bounded_exp(log_rho_N), config.low, config.high)


def masked_sequence(inputs: LossInputs, config: MaskedSequence) -> CorrectionOutputs:
    """Drop sequences whose product of rho leaves [low, high]; `config.weight` says what the others weigh.

    Source: weight `sequence`: verl and TRL (`sequence_mask`); `token`: OpenRLHF and NeMo-RL.
    """
    log_rho_N = log_rho(inputs)
    log_product = sequence_sum(log_rho_N, inputs)[inputs.sequence_ids]
    weights = {"sequence": log_product, "token": log_rho_N, "none": torch.zeros_like(log_rho_N)}[config.weight]
    return _mask(inputs, log_product, bounded_exp(weights), config.low, config.high)


def masked_geometric(inputs: LossInputs, config: MaskedGeometric) -> CorrectionOutputs:
    """Drop sequences whose geometric mean of rho leaves [low, high]; `config.weight` says what the others weigh.

    Source: Liu, Li et al. 2025 ("When speed kills stability"); weight `geometric`: AReaL; `token`: OpenRLHF and NeMo-RL. verl's
    `seq_mean_k1` bounds 1/rho: its [a, b] is [1/b, 1/a] here.
    """
    log_rho_N = log_rho(inputs)
    log_mean = sequence_mean(log_rho_N, inputs.mask, inputs)[inputs.sequence_ids]
    weights = {"geometric": log_mean, "token": log_rho_N, "none": torch.zeros_like(log_rho_N)}[config.weight]
    return _mask(inputs, log_mean, bounded_exp(weights), config.low, config.high)


def _mean_of(weights: torch.Tensor) -> torch.Tensor:
    """Return the mean that weights are divided by; 1 where there is none, or where all but vanish."""
    mean = weights.mean() if weights.numel() else weights.new_ones(())
    return torch.where(mean > LEAST_MEAN_WEIGHT, mean, 1.0)


def _weigh(inputs: LossInputs, weights: torch.Tensor) -> CorrectionOutputs:
    return CorrectionOutputs(weights=masked(weights, inputs.mask), kept=inputs.mask)


def _mask(inputs: LossInputs, log_statistic: torch.Tensor, weights: torch.Tensor, low: float, high: float) -> CorrectionOutputs:
    log_low = math.log(low) if low > 0 else -math.inf
    kept = inputs.mask & (log_statistic >= log_low) & (log_statistic <= math.log(high))
    return CorrectionOutputs(weights=masked(weights, kept), kept=kept)
