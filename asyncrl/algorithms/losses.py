"""Losses by name: pure functions `(LossInputs, LossConfig) -> LossOutputs`, and the critic's value loss.

A new loss is one function here and one row of LOSS_RULES in config/algorithm_table.py, which has the function's name and says
what the loss needs from the rest of the config. Terms common to all losses are in loss_terms.py.

Legend: N tokens of one micro-batch, concatenated, S sequences in it; A advantage, X loss per token, sg: no gradient.

Invariants: at ratio 1 the gradient of every policy loss is the policy gradient (times the correction weight; in `rloo_product`
also times the sequence's length); a masked token has gradient exactly 0, and a dropped token has no policy gradient; the value
at a masked token (even NaN) changes nothing; the losses of micro-batches and ranks add up to that of the whole update.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from asyncrl.algorithms.diagnostics import LOG_RATIO_LIMIT
from asyncrl.algorithms.loss_terms import Objective, aggregate, corrections_of, finish, known_advantages
from asyncrl.algorithms.types import (
    CorrectionOutputs,
    Denominators,
    LossConfig,
    LossInputs,
    LossOutputs,
    bounded_exp,
    log_ratio,
    log_rho,
    masked,
    sequence_mean,
    sequence_sum,
)
from asyncrl.config.algorithm import PythonCorrection, is_importance_weight
from asyncrl.config.algorithm_table import LOSS_RULES
from asyncrl.user_code import load_own, wrong_shape


def ppo_clip(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute PPO's clipped objective against the proximal policy.

    Per token X = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = current / proximal; with dual clip, X = min(X, -A c)
    where A < 0. The only weights are those of the corrections.

    Source: Schulman et al. (arXiv 1707.06347), equation 7; clip-higher: DAPO (arXiv 2503.14476); dual clip: Ye et al.
    (arXiv 1912.09729), equation 5, verl `clip_ratio_c`, slime `eps_clip_c`, AReaL `c_clip`. With c > 1 + clip_high it is the
    two-sided bound min(r, c) of INTELLECT-2 (arXiv 2505.07291), TRL's `delta`.
    """
    corrections = corrections_of(inputs, config)
    ratio = log_ratio(inputs.logprobs, inputs.proximal_logprobs.detach(), inputs.mask).exp()
    return _clipped(ratio, inputs, config, corrections)


def decoupled_ppo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute the decoupled objective: `ppo_clip`'s X, with each token multiplied by its weight proximal / behaviour.

    The weight is detached and applied after clipping and dual clip. If the config has an importance weight (tis_*, icepop,
    masked_* with a weight, or a user's own correction), that weight is used; else the weight is uncapped.

    Source: Hilton et al. (arXiv 2110.00641), equation 4; AReaL (arXiv 2505.24298), equation 5, uncapped there.
    """
    corrections = corrections_of(inputs, config)
    if not any(is_importance_weight(item) or isinstance(item, PythonCorrection) for item in config.corrections):
        rho = masked(bounded_exp(log_rho(inputs)), corrections.kept)
        corrections = replace(corrections, weights=corrections.weights * rho)
    return ppo_clip(replace(inputs, corrections=corrections), config)


def gspo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute GSPO: PPO's clipping of one ratio per sequence, s = exp(mean_t log(current / proximal)).

    Every token of the sequence has X = max(-A s, -A clip(s)), with the gradient through the mean: under seq-mean-token-mean (the
    paper's) each token of an unclipped sequence of length L has gradient -A s / (S L). Dropped tokens are not in the mean. If
    advantages differ within a sequence, all its tokens get their mean; use `gspo_token` to keep them separate.

    Source: GSPO (arXiv 2507.18071), equations 5 to 7.
    """
    corrections = corrections_of(inputs, config)
    ratio_S = _sequence_ratio(inputs, corrections)
    return _clipped(ratio_S[inputs.sequence_ids], inputs, config, corrections)


def gspo_token(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute GSPO's token form: s as in `gspo`, detached, times current / sg(current) of the token.

    Values and clipping are the same; each token has its own advantage and gradient, -A_t s / (S L) under seq-mean-token-mean.

    Source: GSPO (arXiv 2507.18071), equations 13 and 14; verl `compute_policy_loss_gspo`.
    """
    corrections = corrections_of(inputs, config)
    ratio_S = _sequence_ratio(inputs, corrections).detach()
    logprobs = masked(inputs.logprobs, inputs.mask)
    ratio = ratio_S[inputs.sequence_ids] * (logprobs - logprobs.detach()).exp()
    return _clipped(ratio, inputs, config, corrections)


def rloo_product(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute RLOO's objective: PPO's clipping of one ratio per sequence, the product s of current / proximal over its tokens.

    Every token has X = max(-A s, -A clip(s)), with the gradient through the product. Under seq-mean-token-mean value and gradient
    are TRL's: each token of an unclipped sequence of any length has gradient -A s / S, which at ratio 1 is the gradient of the
    sequence's log-likelihood.

    Source: Ahmadian et al. (arXiv 2402.14740); TRL `RLOOTrainer`.
    """
    corrections = corrections_of(inputs, config)
    differences = masked(inputs.logprobs - inputs.proximal_logprobs.detach(), corrections.kept)
    ratio = bounded_exp(sequence_sum(differences, inputs))[inputs.sequence_ids]
    return _clipped(ratio, inputs, config, corrections)


def gmpo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute GMPO: the geometric mean over a sequence of ratios whose logarithms are clipped token by token.

    With l = log(current / proximal), every token of the sequence has X = -A exp(mean of min(l, clip_high) where A > 0, else of
    max(l, -clip_low)): clip_low and clip_high are bounds of the logarithm (0.4 in the paper). Aggregate by seq-mean-token-mean;
    advantages within a sequence and dropped tokens are handled as in `gspo`.

    Source: GMPO (arXiv 2507.20673), equation 4; verl `geo_mean`.
    """
    corrections, advantages = corrections_of(inputs, config), known_advantages(inputs)
    log_r = log_ratio(inputs.logprobs, inputs.proximal_logprobs.detach(), inputs.mask)
    held = torch.where(advantages > 0, log_r.clamp(max=config.clip_high), log_r.clamp(min=-config.clip_low))
    ratio_S = bounded_exp(sequence_mean(held, corrections.kept, inputs))
    return finish(inputs, config, Objective(-advantages * ratio_S[inputs.sequence_ids], held != log_r), corrections)


def _clipped(ratio: torch.Tensor, inputs: LossInputs, config: LossConfig, corrections: CorrectionOutputs) -> LossOutputs:
    """Return the loss with PPO's clipping of this ratio [N]; a correction's clip range replaces the config's."""
    low, high = corrections.clip_low, corrections.clip_high
    low, high = (config.clip_low if low is None else low), (config.clip_high if high is None else high)
    advantages = known_advantages(inputs)
    free, bounded = -advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    loss, dual_clipped = torch.maximum(free, bounded), None
    if config.dual_clip is not None:
        ceiling = -advantages * config.dual_clip
        dual_clipped = (advantages < 0) & (ceiling < loss)
        loss = torch.where(dual_clipped, ceiling, loss)
    return finish(inputs, config, Objective(loss, bounded > free, dual_clipped), corrections)


def _sequence_ratio(inputs: LossInputs, corrections: CorrectionOutputs) -> torch.Tensor:
    """Return [S], exp of the mean of log(current / proximal) over kept tokens."""
    return bounded_exp(sequence_mean(inputs.logprobs - inputs.proximal_logprobs.detach(), corrections.kept, inputs))


def dppo_tv(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute DPPO with binary total variation: X = -sg(min(r, max_ratio)) A log current, and 0 beyond the trust region.

    p and q are the current and the proximal probability of the token, r = p / q. A token is beyond if p - q > clip_high where
    A > 0, and if p - q < -clip_low elsewhere: bounds of a probability, not of a ratio. The paper uses the behaviour policy for q:
    set `proximal = "behaviour"`. With `max_ratio = inf` and `log_ratio_penalty` the gradient is that of prime-rl's default loss.

    Source: DPPO (arXiv 2602.04879), sections 4 and 5.4; verl `dppo_tv`.
    """
    _, p, q = _probabilities(inputs)
    beyond = torch.where(known_advantages(inputs) > 0, p - q > config.clip_high, q - p > config.clip_low)
    return _trusted(inputs, config, beyond)


def dppo_kl(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute DPPO with binary KL: as `dppo_tv`, but beyond if KL(q || p) of the token against all others exceeds the bound.

    The bound is clip_high where A > 0 and p > q, clip_low where A <= 0 and p < q; a token that moves back is never beyond.

    Source: DPPO (arXiv 2602.04879), section 4; verl `dppo_kl`.
    """
    log_r, p, q = _probabilities(inputs)
    kl = (1.0 - q) * ((1.0 - q + 1e-8) / (1.0 - p + 1e-8)).log() - q * log_r
    positive = known_advantages(inputs) > 0
    return _trusted(inputs, config, torch.where(positive, (kl > config.clip_high) & (p > q), (kl > config.clip_low) & (p < q)))


def _probabilities(inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log(current / proximal), and the token's current and proximal probability, [N] each, detached."""
    current, proximal = inputs.logprobs.detach(), inputs.proximal_logprobs.detach()
    log_r = log_ratio(current, proximal, inputs.mask)
    return log_r, masked(current, inputs.mask).exp(), masked(proximal, inputs.mask).exp()


def _trusted(inputs: LossInputs, config: LossConfig, beyond: torch.Tensor) -> LossOutputs:
    ratio = log_ratio(inputs.logprobs, inputs.proximal_logprobs, inputs.mask).detach().exp().clamp(max=config.max_ratio)
    return finish(inputs, config, Objective(masked(ratio * _negative_likelihood(inputs), ~beyond), inputs.mask & beyond))


def cispo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute CISPO: X = -sg(clip(r, min_ratio, max_ratio)) A log current, r = current / proximal.

    The bounds are absolute ratios, as in TRL; verl and slime give distances from 1 (their clip_high 0.28 is max_ratio 1.28 here).
    With min_ratio 0 (the default) there is no lower bound, as in the paper. Every token keeps its gradient.

    Source: MiniMax-M1 (arXiv 2506.13585), equations 4 and 5.
    """
    ratio = log_ratio(inputs.logprobs, inputs.proximal_logprobs, inputs.mask).detach().exp()
    bounded = ratio.clamp(config.min_ratio, config.max_ratio)
    return finish(inputs, config, Objective(bounded * _negative_likelihood(inputs), inputs.mask & (bounded != ratio)))


def sapo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute SAPO's soft gate: X = -A sigmoid(tau (r - 1)) 4 / tau, r = current / proximal.

    tau is tau_positive where A > 0, else tau_negative. At r = 1 the gate's slope is 1; it decreases on both sides.

    Source: SAPO (arXiv 2511.20347); verl and TRL take the mean of sequences, AReaL that of tokens.
    """
    ratio = log_ratio(inputs.logprobs, inputs.proximal_logprobs.detach(), inputs.mask).exp()
    advantages = known_advantages(inputs)
    tau = torch.full_like(advantages, config.tau_negative).masked_fill(advantages > 0, config.tau_positive)
    return finish(inputs, config, Objective(-advantages * torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau))


def reinforce(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute the plain policy gradient: X = -A log current.

    Off-policy it is unbiased only with an importance weight among the corrections.

    Source: Williams 1992.
    """
    return finish(inputs, config, Objective(_negative_likelihood(inputs)))


def dro(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute DRO: X = -A log current + beta / 2 (log current / behaviour)^2, beta / 2 being `log_ratio_penalty`.

    `finish` adds the square; importance weights and masks of corrections do not change it. Tinker uses the sum over tokens
    (`token-sum`).

    Source: Richemond et al. (arXiv 2405.19107), equation 4; Kimi k1.5 (arXiv 2501.12599), equation 3; Tinker's loss `dro`.
    """
    return reinforce(inputs, config)


def importance_sampling(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute the importance-weighted policy gradient: X = -A current / behaviour, with the gradient through the ratio.

    The only bound is LOG_RATIO_LIMIT, beyond which a token has no gradient.

    Source: Degris et al. 2012 (arXiv 1205.4839), per token; Tinker's loss `importance_sampling`.
    """
    ratio = log_ratio(inputs.logprobs, inputs.behaviour_logprobs.detach(), inputs.mask).exp()
    return finish(inputs, config, Objective(-known_advantages(inputs) * ratio))


def aipo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute AIPO: X = -sg(min(current / behaviour, max_ratio)) A log current.

    The weight is detached, so a token over the bound keeps its gradient, with weight max_ratio.

    Source: LlamaRL (arXiv 2505.24034), asynchronous importance-weighted policy optimization.
    """
    ratio = log_ratio(inputs.logprobs, inputs.behaviour_logprobs, inputs.mask).detach().exp()
    bounded = ratio.clamp(max=config.max_ratio)
    return finish(inputs, config, Objective(bounded * _negative_likelihood(inputs), inputs.mask & (ratio > config.max_ratio)))


def topr(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute TOPR: X = -w A log current; w is 1 where A >= 0, else the sequence's current / behaviour in [0, 1], detached.

    Good samples of any staleness have full weight; bad samples count less as the policy moves away from them, which bounds the
    objective. Aggregate by seq-mean-token-sum or constant for the paper's log-likelihood of whole sequences.

    Source: Tapered off-policy REINFORCE (arXiv 2503.14286).
    """
    difference = inputs.logprobs.detach() - inputs.behaviour_logprobs.detach()
    ratio = bounded_exp(sequence_sum(difference, inputs))[inputs.sequence_ids]
    negative = known_advantages(inputs) < 0
    weight = torch.where(negative, ratio.clamp(max=1.0), 1.0)
    return finish(inputs, config, Objective(weight * _negative_likelihood(inputs), negative & (ratio > 1.0)))


def vespo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute VESPO: X = -sg(w^k exp(lambda (1 - w))) A log current, w the product of the sequence's current / behaviour.

    k and lambda are `vespo_positive` where A >= 0, else `vespo_negative`. At w = 1 the weight is 1; it decreases on both sides,
    so no bound is needed.

    Source: VESPO (arXiv 2602.10693); TRL `loss_type="vespo"`.
    """
    log_ratios = log_ratio(inputs.logprobs.detach(), inputs.behaviour_logprobs.detach(), inputs.mask)
    log_w = sequence_sum(log_ratios, inputs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[inputs.sequence_ids]
    good, bad = ((k * log_w - rate * torch.expm1(log_w)).exp() for k, rate in (config.vespo_positive, config.vespo_negative))
    weight = torch.where(known_advantages(inputs) >= 0, good, bad)
    return finish(inputs, config, Objective(weight * _negative_likelihood(inputs)))


def _negative_likelihood(inputs: LossInputs) -> torch.Tensor:
    """Return -A log current [N], 0 at masked tokens."""
    return -known_advantages(inputs) * masked(inputs.logprobs, inputs.mask)


@dataclass(frozen=True, slots=True)
class ValueInputs:
    """One micro-batch, flat: float [N], the last four as in `LossInputs`."""

    values: torch.Tensor
    """The present critic, with gradient."""
    old_values: torch.Tensor
    """The critic before this step's first update."""
    returns: torch.Tensor
    """Training targets of the values."""
    mask: torch.Tensor
    sequence_ids: torch.Tensor
    num_sequences: int
    denominators: Denominators


def value_loss(inputs: ValueInputs, *, clip: float, aggregation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute 0.5 max((v - R)^2, (clip(v, old - c, old + c) - R)^2), aggregated.

    Args:
        inputs: One micro-batch.
        clip: c, the distance from the old value beyond which the loss stops decreasing; inf: 0.5 (v - R)^2.
        aggregation: A name in AGGREGATIONS.

    Returns:
        This micro-batch's share [] of the update's value loss; and bool [N], where the clipped term was strictly larger, so that
        the token has no gradient (false at masked tokens).

    Source: OpenAI baselines `ppo2`; InstructGPT (arXiv 2203.02155); verl `compute_value_loss`.
    """
    values = masked(inputs.values, inputs.mask)
    old_values = masked(inputs.old_values.detach(), inputs.mask)
    returns = masked(inputs.returns.detach(), inputs.mask)
    errors = (values - returns).square()
    clipped_errors = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    clipped = clipped_errors.detach() > errors.detach()
    larger = torch.maximum(errors, clipped_errors)
    loss = aggregate(aggregation, 0.5 * larger, inputs.mask, inputs.sequence_ids, inputs.num_sequences, inputs.denominators)
    return loss, clipped


Loss = Callable[[LossInputs, LossConfig], LossOutputs]

LOSSES: dict[str, Loss] = {name: globals()[name] for name in LOSS_RULES}
"""Losses by the names of their rows in config/algorithm_table.py."""


@functools.cache
def load_loss(name: str) -> Loss:
    """Return the loss of this name, or a user's own function, whose file runs once per process and not at each row.

    Args:
        name: A key of LOSSES, `module:function` or `file.py:function`.

    Raises:
        ConfigError: The user's function cannot be imported.
    """
    if name in LOSSES:
        return LOSSES[name]
    return load_own(name, "algorithm.loss", LossOutputs, fault_in)


def fault_in(inputs: LossInputs, outputs: LossOutputs) -> str:
    """Return what is wrong with the result of a user's function; empty if nothing is."""
    by_token = {"weights": outputs.weights, "clipped": outputs.clipped, "dual_clipped": outputs.dual_clipped}
    by_token |= {name: value for name in ("kept", "reference_kl") if (value := getattr(outputs, name)) is not None}
    for name, value in by_token.items():
        if fault := wrong_shape(name, value, tuple(inputs.logprobs.shape), "[N]"):
            return fault
    if fault := wrong_shape("loss", outputs.loss, (), "[]"):
        return fault
    if inputs.logprobs.requires_grad and not outputs.loss.requires_grad:
        return "loss has no gradient: it must be made of inputs.logprobs, not detached"
    return ""
