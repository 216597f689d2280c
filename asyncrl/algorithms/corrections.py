"""Off-policy corrections: a function for each kind of config struct, and all of a run's applied together.

Three kinds: importance weights rho = proximal / behaviour, truncated or masked outside a band; masks and weights by other
statistics (veto, opsm, staleness); second-moment trust (m2po_mask, m2po_clip: two algorithms that share the name).

Legend: N tokens of a micro-batch or of a whole update (its micro-batches laid end to end, sequences numbered through), S
sequences, K tokens looked at. A correction is `(LossInputs, its struct) -> CorrectionOutputs`. Truncation keeps every token and
bounds its weight; masking drops what lies outside [low, high]. Bands are compared on logarithms, so that no product overflows.

Invariants: everything is detached; a token that is masked or dropped weighs exactly 0; a correction without a weight gives 1; on
policy every correction gives weight 1 and keeps all. Those that `config.algorithm.sees_whole_update` means something else on a
part of an update, so the caller runs `correct` on the whole of it and hands each micro-batch its slice (`combined` with those
that read the current policy).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from asyncrl.algorithms.types import (
    LOG_RATIO_LIMIT,
    CorrectionOutputs,
    LossInputs,
    bounded_exp,
    log_ratio,
    log_rho,
    masked,
    sequence_mean,
    sequence_sum,
)
from asyncrl.config.algorithm import (
    CorrectionConfig,
    MaskedGeometric,
    MaskedSequence,
    MaskedToken,
    OffPolicySequenceMask,
    PythonCorrection,
    SecondMomentClip,
    SecondMomentMask,
    StalenessMask,
    StalenessWeight,
    TruncatedSequence,
    TruncatedToken,
    Veto,
)
from asyncrl.user_code import load_own, wrong_shape

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


def veto(inputs: LossInputs, config: Veto) -> CorrectionOutputs:
    """Drop every sequence that has a token whose rho is under the threshold.

    Source: verl `rollout_token_veto_threshold`; slime `use_mis` veto.
    """
    catastrophic = (log_rho(inputs) < math.log(config.threshold)).to(inputs.behaviour_logprobs.dtype)
    return _keep(inputs, (sequence_sum(catastrophic, inputs) == 0)[inputs.sequence_ids])


def opsm(inputs: LossInputs, config: OffPolicySequenceMask) -> CorrectionOutputs:
    """Drop sequences of negative advantage whose mean of behaviour - current log-probability exceeds the threshold.

    The current policy is meant, not the proximal one, so the answer changes within a step of several updates. A sequence's
    advantage is the sum of its tokens'.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 3.1, off-policy sequence masking; TRL `off_policy_mask_threshold`, slime
    `compute_opsm_mask`.
    """
    divergence_S = sequence_mean(inputs.behaviour_logprobs.detach() - inputs.logprobs.detach(), inputs.mask, inputs)
    advantage_S = sequence_sum(inputs.advantages.detach(), inputs)
    return _keep(inputs, ((advantage_S >= 0) | (divergence_S <= config.threshold))[inputs.sequence_ids])


def staleness_weight(inputs: LossInputs, config: StalenessWeight) -> CorrectionOutputs:
    """Weigh each token by decay^staleness; staleness is the learner's version minus the token's, 0 where unknown.

    Source: ours, after staleness-aware asynchronous SGD, Zhang et al. 2016 (arXiv 1511.05950).
    """
    weights = torch.full_like(inputs.behaviour_logprobs, config.decay) ** _staleness(inputs)
    return CorrectionOutputs(weights=masked(weights, inputs.mask), kept=inputs.mask)


def staleness_mask(inputs: LossInputs, config: StalenessMask) -> CorrectionOutputs:
    """Drop tokens more than `max_versions` behind the learner; tokens of unknown version stay.

    Source: ours; the per-token form of the staleness bound of AReaL (arXiv 2505.24298), section 5.1.
    """
    return _keep(inputs, _staleness(inputs) <= config.max_versions)


def _staleness(inputs: LossInputs) -> torch.Tensor:
    assert inputs.versions is not None, "a staleness correction is set and LossInputs.versions is missing"
    return torch.where(inputs.versions >= 0, (inputs.learner_version - inputs.versions).clamp(min=0), 0)


def _keep(inputs: LossInputs, wanted: torch.Tensor) -> CorrectionOutputs:
    kept = inputs.mask & wanted
    return CorrectionOutputs(weights=kept.to(inputs.behaviour_logprobs.dtype), kept=kept)


Correction = Callable[[LossInputs, Any], CorrectionOutputs]


def python(inputs: LossInputs, config: PythonCorrection) -> CorrectionOutputs:
    """Ask a user's own function; its answer is detached by `correct` like any other.

    Raises:
        ConfigError: The path names no function.
        LearnerError: It raised, or its answer is not one token's weight each.
    """
    return load_correction(config.path)(inputs, config)


CORRECTIONS: dict[type, Correction] = {
    TruncatedToken: tis_token,
    TruncatedSequence: tis_sequence,
    MaskedToken: icepop,
    MaskedSequence: masked_sequence,
    MaskedGeometric: masked_geometric,
    Veto: veto,
    OffPolicySequenceMask: opsm,
    SecondMomentMask: m2po_mask,
    SecondMomentClip: m2po_clip,
    StalenessWeight: staleness_weight,
    StalenessMask: staleness_mask,
    PythonCorrection: python,
}


def correct(inputs: LossInputs, corrections: tuple[CorrectionConfig, ...]) -> CorrectionOutputs:
    """Apply all corrections: weights multiply, a token stays where all keep it, the narrowest clip range wins.

    Args:
        inputs: A micro-batch, or a whole update laid end to end. `logprobs` are read by `opsm` and `m2po_clip` only, as the
            current policy's.
        corrections: In any order; none of them sees another's answer.

    Returns:
        Weights and kept tokens [N], detached; the clip range where a correction sets one.
    """
    weights, kept = inputs.mask.to(inputs.behaviour_logprobs.dtype), inputs.mask
    clip_low, clip_high = None, None
    for item in corrections:
        outputs = CORRECTIONS[type(item)](inputs, item)
        kept = kept & outputs.kept
        weights = weights * masked(outputs.weights.detach(), inputs.mask)
        clip_low, clip_high = _narrower(clip_low, outputs.clip_low), _narrower(clip_high, outputs.clip_high)
    return CorrectionOutputs(masked(weights, kept), kept, clip_low, clip_high)


def combined(first: CorrectionOutputs, second: CorrectionOutputs) -> CorrectionOutputs:
    """Return what two answers of `correct` for the same tokens say together."""
    kept = first.kept & second.kept
    return CorrectionOutputs(
        masked(first.weights * second.weights, kept),
        kept,
        _narrower(first.clip_low, second.clip_low),
        _narrower(first.clip_high, second.clip_high),
    )


def _narrower(first: float | None, second: float | None) -> float | None:
    return min((value for value in (first, second) if value is not None), default=None)


@functools.cache
def load_correction(path: str) -> Correction:
    """Return a user's own correction; one import a process: a file named by its path would run again at every micro-batch.

    Raises:
        ConfigError: The path names no function.
    """
    return load_own(path, "algorithm.corrections.path", CorrectionOutputs, _fault_in)


def _fault_in(inputs: LossInputs, outputs: CorrectionOutputs) -> str:
    """Return what is wrong with a user's answer."""
    for name in ("weights", "kept"):
        if fault := wrong_shape(name, getattr(outputs, name), tuple(inputs.logprobs.shape), "[N]"):
            return fault
    return "" if outputs.kept.dtype == torch.bool else f"kept must be bool, got {outputs.kept.dtype}"
