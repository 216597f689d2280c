"""Off-policy corrections: one function per kind of config struct, and `correct`, which applies all of a run together.

Three kinds: truncated importance weights rho = proximal / behaviour; rejection of tokens outside a range; masks and weights by
other statistics (opsm, staleness, and the second moments of m2po_mask and m2po_clip, which are two algorithms of one name).

Legend: N tokens of a micro-batch or of a whole update (its micro-batches concatenated, sequences numbered continuously), S
sequences, K selected tokens. A correction is `(LossInputs, its struct) -> CorrectionOutputs`. Truncation keeps every token and
bounds its weight; rejection drops tokens outside [low, high]. Ratios are compared as logarithms, so that no product overflows.

Invariants: everything is detached; a masked or dropped token has weight exactly 0; a correction without a weight gives 1; on
policy every correction gives weight 1 and keeps all tokens. Corrections for which `config.algorithm.sees_whole_update` is true
give other results on part of an update, so the caller runs `correct` on the whole update and gives each micro-batch its slice
(`combined` with the corrections that read the current policy).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from asyncrl.algorithms.types import (
    KL_ESTIMATORS,
    CorrectionOutputs,
    LossInputs,
    bounded_exp,
    log_ratio,
    log_rho,
    masked,
    sequence_mean,
    sequence_sum,
)
from asyncrl.config import algorithm as kinds
from asyncrl.user_code import load_own, wrong_shape

LEAST_MEAN_WEIGHT = 1e-8
"""Weights with a smaller mean are not normalized (verl's bound)."""
LEAST_PROBABILITY = 1e-6
"""Probabilities are clamped to this distance from 0 and 1 in `binary_kl` (verl's bound)."""


def truncated(inputs: LossInputs, config: kinds.Truncated) -> CorrectionOutputs:
    """Weight tokens by rho, or by the product or geometric mean of their sequence's rho, clamped to [floor, cap].

    Source: truncated importance sampling, Ionides 2008; `tis_token`: Yao et al. 2025 ("Your efficient RL framework secretly
    brings you off-policy RL training"), verl `rollout_is: token`, OpenRLHF and slime `tis`, AReaL `action: clamp`;
    `tis_sequence`: verl `rollout_is: sequence`; `tis_geometric`: AReaL `level: sequence, action: clamp`, slime `tis_level:
    geometric`. Floor and cap: slime `tis_mode: clip`. `normalize`: self-normalized importance sampling (Hesterberg 1995), verl
    `rollout_is_batch_normalize`.
    """
    weights = _ratio(inputs, WEIGHT_OF_TRUNCATED[type(config)]).clamp(config.floor, config.cap)
    if config.normalize:
        counted = weights[inputs.mask]
        if not isinstance(config, kinds.TruncatedToken):  # Count each sequence once, by its tokens' mean weight.
            has_tokens_S = sequence_sum(torch.ones_like(weights), inputs) > 0
            counted = sequence_mean(weights, inputs.mask, inputs)[has_tokens_S]
        mean = counted.mean() if counted.numel() else weights.new_ones(())
        weights = weights / torch.where(mean > LEAST_MEAN_WEIGHT, mean, 1.0)
    return CorrectionOutputs(weights=masked(weights, inputs.mask), kept=inputs.mask)


def rejection(inputs: LossInputs, config: kinds.Rejection) -> CorrectionOutputs:
    """Drop the tokens, or sequences, whose measure is outside [low, high]; `config.weight` sets the weight of the others.

    Bounds of `ratio` are ratios, compared as logarithms. Bounds of k1 (-log rho, an estimate of KL(behaviour || proximal)) and of
    the others are values. verl gives the bounds of its k1 options as ratios 1 / rho: its "a_b" is low = log a, high = log b
    here, or `ratio` in [1 / b, 1 / a]. AReaL's k1 is +log rho, and its k3 uses the inverse ratio.

    Source: verl `rollout_rs` (token, seq_sum, seq_mean, seq_max of k1, k2, k3; `binary_kl`, KPop: the larger of both
    directions); AReaL `rejection_sampling`; `tv`: DPPO (arXiv 2602.04879), binary total variation. Presets: `icepop`: Ling team
    2025 (arXiv 2510.18855); `masked_sequence`: verl and TRL, with weight `token` OpenRLHF and NeMo-RL; `masked_geometric`: Liu,
    Li et al. 2025 ("When speed kills stability"), AReaL; `veto`: verl `rollout_token_veto_threshold`, slime `use_mis`.
    """
    is_ratio, low, high = config.measure == "ratio", config.low, config.high
    if is_ratio:
        low, high = (math.log(bound) if bound > 0 else -math.inf for bound in (low, high))
    values = MEASURES[config.measure](inputs)
    if config.level == "sum":
        values = sequence_sum(values, inputs)[inputs.sequence_ids]
    elif config.level == "mean" and is_ratio:
        values = sequence_mean(bounded_exp(values), inputs.mask, inputs)[inputs.sequence_ids].log()
    elif config.level in {"mean", "geometric"}:
        values = sequence_mean(values, inputs.mask, inputs)[inputs.sequence_ids]
    inside = (values >= low) & (values <= high)
    if config.level == "max":
        inside = (sequence_sum((~inside).to(values.dtype), inputs) == 0)[inputs.sequence_ids]
    kept = inputs.mask & inside
    return CorrectionOutputs(weights=masked(_ratio(inputs, config.weight), kept), kept=kept)


def _ratio(inputs: LossInputs, of: str) -> torch.Tensor:
    """Return rho [N] of each token, or its sequence's product or geometric mean of rho, by the name of a rejection's weight."""
    log_rho_N = log_rho(inputs)
    if of == "none":
        return torch.ones_like(log_rho_N)
    if of == "token":
        return bounded_exp(log_rho_N)
    log_S = sequence_sum(log_rho_N, inputs) if of == "sequence" else sequence_mean(log_rho_N, inputs.mask, inputs)
    return bounded_exp(log_S)[inputs.sequence_ids]


WEIGHT_OF_TRUNCATED = {kinds.TruncatedToken: "token", kinds.TruncatedSequence: "sequence", kinds.TruncatedGeometric: "geometric"}


def _binary_kl(inputs: LossInputs) -> torch.Tensor:
    """Return the larger of KL(p || q) and KL(q || p) of one token against all others; p is proximal, q behaviour."""
    q = masked(inputs.behaviour_logprobs.detach(), inputs.mask).exp().clamp(LEAST_PROBABILITY, 1.0 - LEAST_PROBABILITY)
    p = masked(inputs.proximal_logprobs.detach(), inputs.mask).exp().clamp(LEAST_PROBABILITY, 1.0 - LEAST_PROBABILITY)
    taken, others = (p / q).log(), ((1.0 - p) / (1.0 - q)).log()
    return torch.maximum(p * taken + (1.0 - p) * others, -q * taken - (1.0 - q) * others)


MEASURES: dict[str, Callable[[LossInputs], torch.Tensor]] = {
    "ratio": log_rho,
    "k1": lambda inputs: -log_rho(inputs),
    "k2": lambda inputs: KL_ESTIMATORS["k2"](-log_rho(inputs)),
    "k3": lambda inputs: KL_ESTIMATORS["k3"](-log_rho(inputs)),
    "tv": lambda inputs: masked(
        inputs.proximal_logprobs.detach().exp() - inputs.behaviour_logprobs.detach().exp(), inputs.mask
    ).abs(),
    "binary_kl": _binary_kl,
}
"""Measures per token [N]; 0 where both policies agree (`ratio`: the logarithm)."""


def m2po_mask(inputs: LossInputs, config: kinds.SecondMomentMask) -> CorrectionOutputs:
    """Drop the tokens with the largest (log rho)^2, as few as possible, until the mean of the rest is under the threshold.

    At least one token stays. AReaL uses it with denominator `kept`.

    Source: M2PO (arXiv 2510.01161), algorithm 1; AReaL `_apply_m2po_masking`.
    """
    kept = inputs.mask.clone()
    squares_K, order_K = log_rho(inputs)[inputs.mask].double().square().sort(stable=True)
    means_K = squares_K.cumsum(0) / torch.arange(1, len(squares_K) + 1, device=squares_K.device)
    # In ascending order the running mean never decreases, so the means under the threshold are a prefix.
    num_kept = max(int((means_K < config.threshold).sum()), 1)
    positions_K = inputs.mask.nonzero().squeeze(-1)[order_K]
    kept[positions_K[num_kept:]] = False
    return _keep(inputs, kept)


def m2po_clip(inputs: LossInputs, config: kinds.SecondMomentClip) -> CorrectionOutputs:
    """Choose one clip range [exp(-tau), exp(tau)] for the update, which bounds the second moment of harmful tokens.

    Harmful are the K tokens on which PPO's clipping can act: advantage > 0 and r > 1, or advantage < 0 and r < 1, where
    r = current / proximal is the ratio that the loss clips. (So use `proximal = "behaviour"`, where r covers the whole staleness;
    with a recomputed proximal policy r is 1 at the first update and nothing is clipped.) With d = (log r)^2 of the harmful tokens
    in ascending order: if their mean is at most the threshold, or there is none, nothing is clipped (range [0, infinity)); else
    tau^2 is the largest d_j with sum_i min(d_i, d_j) < K threshold, and 0 if the first is too large. No token is dropped. Two
    parts of the source code are omitted: its optional lower bound of the range, off in its scripts, and its 1e-12 offsets.

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
        clip_low, clip_high = 1.0 - math.exp(-tau), math.exp(tau) - 1.0
    weights = inputs.mask.to(inputs.behaviour_logprobs.dtype)
    return CorrectionOutputs(weights=weights, kept=inputs.mask, clip_low=clip_low, clip_high=clip_high)


def opsm(inputs: LossInputs, config: kinds.OffPolicySequenceMask) -> CorrectionOutputs:
    """Drop sequences of negative advantage whose mean of behaviour - current log-probability exceeds the threshold.

    It uses the current policy, not the proximal one, so the result changes within a step of several updates. A sequence's
    advantage is the sum over its tokens.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 3.1, off-policy sequence masking; TRL `off_policy_mask_threshold`, slime
    `compute_opsm_mask`.
    """
    divergence_S = sequence_mean(inputs.behaviour_logprobs.detach() - inputs.logprobs.detach(), inputs.mask, inputs)
    advantage_S = sequence_sum(inputs.advantages.detach(), inputs)
    return _keep(inputs, ((advantage_S >= 0) | (divergence_S <= config.threshold))[inputs.sequence_ids])


def staleness_weight(inputs: LossInputs, config: kinds.StalenessWeight) -> CorrectionOutputs:
    """Weight each token by decay^staleness; staleness is the learner's version minus the token's, 0 where unknown.

    Source: ours, after staleness-aware asynchronous SGD, Zhang et al. 2016 (arXiv 1511.05950).
    """
    weights = torch.full_like(inputs.behaviour_logprobs, config.decay) ** _staleness(inputs)
    return CorrectionOutputs(weights=masked(weights, inputs.mask), kept=inputs.mask)


def staleness_mask(inputs: LossInputs, config: kinds.StalenessMask) -> CorrectionOutputs:
    """Drop tokens more than `max_versions` behind the learner; tokens of unknown version are kept.

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


@functools.cache
def load_correction(path: str) -> Correction:
    """Return a user's own correction, imported once per process; else its file would run again at every micro-batch.

    Raises:
        ConfigError: The user's function cannot be imported.
    """
    return load_own(path, "algorithm.corrections.path", CorrectionOutputs, _fault_in)


def _fault_in(inputs: LossInputs, outputs: CorrectionOutputs) -> str:
    """Return what is wrong with the result of a user's function; empty if nothing is."""
    for name in ("weights", "kept"):
        if fault := wrong_shape(name, getattr(outputs, name), tuple(inputs.logprobs.shape), "[N]"):
            return fault
    return "" if outputs.kept.dtype == torch.bool else f"kept must be bool, got {outputs.kept.dtype}"


CORRECTIONS: dict[type, Correction] = {
    **dict.fromkeys(WEIGHT_OF_TRUNCATED, truncated),
    **dict.fromkeys((kinds.Rejection, *kinds.Rejection.__subclasses__()), rejection),
    kinds.OffPolicySequenceMask: opsm,
    kinds.SecondMomentMask: m2po_mask,
    kinds.SecondMomentClip: m2po_clip,
    kinds.StalenessWeight: staleness_weight,
    kinds.StalenessMask: staleness_mask,
    kinds.PythonCorrection: lambda inputs, config: load_correction(config.path)(inputs, config),  # The user's own function.
}


def correct(inputs: LossInputs, corrections: tuple[kinds.CorrectionConfig, ...]) -> CorrectionOutputs:
    """Apply all corrections: weights multiply, a token is kept if all keep it, and the narrowest clip range is used.

    Args:
        inputs: A micro-batch, or a whole concatenated update. Only `opsm` and `m2po_clip` read `logprobs`, as those of the
            current policy.
        corrections: In any order; each is independent of the others.

    Returns:
        Weights and kept tokens [N], detached; the clip range if a correction sets one.
    """
    together = _keep(inputs, inputs.mask)
    for item in corrections:
        outputs = CORRECTIONS[type(item)](inputs, item)
        weights = masked(outputs.weights.detach(), inputs.mask)
        together = combined(together, CorrectionOutputs(weights, outputs.kept, outputs.clip_low, outputs.clip_high))
    return together


def combined(first: CorrectionOutputs, second: CorrectionOutputs) -> CorrectionOutputs:
    """Combine two results of `correct` for the same tokens."""
    kept = first.kept & second.kept
    return CorrectionOutputs(
        masked(first.weights * second.weights, kept),
        kept,
        min((value for value in (first.clip_low, second.clip_low) if value is not None), default=None),
        min((value for value in (first.clip_high, second.clip_high) if value is not None), default=None),
    )
