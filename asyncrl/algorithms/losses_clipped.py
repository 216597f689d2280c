"""Policy losses that clip an importance ratio: PPO and its decoupled form over tokens, GSPO over sequences.

Legend: N tokens, S sequences; A advantage, X loss a token. A clip range from a correction (m2po_clip) takes the place of the
config's. Called through losses.LOSSES.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from asyncrl.algorithms.loss_terms import Objective, clipping_of, corrections_of, finish, known_advantages
from asyncrl.algorithms.ratios import bounded_exp, log_ratio, log_rho, sequence_mean
from asyncrl.algorithms.types import CorrectionOutputs, LossConfig, LossInputs, LossOutputs, masked
from asyncrl.config.corrections import PythonCorrection, is_importance_weight


def ppo_clip(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute PPO's clipped objective against the proximal policy.

    Per token X = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = current / proximal; with dual clip, X = min(X, -A c)
    where A < 0. No weight but that of the corrections.

    Source: Schulman et al. (arXiv 1707.06347), equation 7; clip-higher: DAPO (arXiv 2503.14476); dual clip: Ye et al.
    (arXiv 1912.09729), equation 5.
    """
    corrections = corrections_of(inputs, config)
    ratio = log_ratio(inputs.logprobs, inputs.proximal_logprobs.detach(), inputs.mask).exp()
    return finish(inputs, config, _clip(ratio, inputs, clipping_of(config, corrections)), corrections)


def decoupled_ppo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute the decoupled objective: `ppo_clip`'s X, then each token times its weight proximal / behaviour.

    The weight is detached and multiplies after clipping and dual clip. Where the config names an importance weight (tis_*,
    icepop, masked_* with a weight, or a user's own correction) it is that one; where it names none, the weight is uncapped.

    Source: Hilton et al. (arXiv 2110.00641), equation 4; AReaL (arXiv 2505.24298), equation 5, uncapped there.
    """
    corrections = corrections_of(inputs, config)
    if not any(is_importance_weight(item) or isinstance(item, PythonCorrection) for item in config.corrections):
        rho = masked(bounded_exp(log_rho(inputs)), corrections.kept)
        corrections = replace(corrections, weights=corrections.weights * rho)
    ratio = log_ratio(inputs.logprobs, inputs.proximal_logprobs.detach(), inputs.mask).exp()
    return finish(inputs, config, _clip(ratio, inputs, clipping_of(config, corrections)), corrections)


def gspo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute GSPO: PPO's clipping of one ratio a sequence, s = exp(mean_t log(current / proximal)).

    Every token of the sequence carries X = max(-A s, -A clip(s)), and the gradient runs through the mean: under
    seq-mean-token-mean (the paper's) an unclipped sequence of length L gives each of its tokens -A s / (S L). Tokens that a
    correction dropped are not in the mean. An advantage that differs within a sequence reaches all its tokens as their mean;
    where that is not wanted, take `gspo_token`.

    Source: GSPO (arXiv 2507.18071), equations 5 to 7.
    """
    corrections = corrections_of(inputs, config)
    ratio_S = bounded_exp(_mean_log_ratio(inputs, corrections))
    return finish(inputs, config, _clip(ratio_S[inputs.sequence_ids], inputs, clipping_of(config, corrections)), corrections)


def gspo_token(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute GSPO's token form: s as in `gspo`, detached, times current / sg(current) of the token.

    Same values and clipping; each token has its own advantage and its own gradient, -A_t s / (S L) under seq-mean-token-mean.

    Source: GSPO (arXiv 2507.18071), equations 13 and 14; verl `compute_policy_loss_gspo`.
    """
    corrections = corrections_of(inputs, config)
    ratio_S = bounded_exp(_mean_log_ratio(inputs, corrections)).detach()
    logprobs = masked(inputs.logprobs, inputs.mask)
    ratio = ratio_S[inputs.sequence_ids] * (logprobs - logprobs.detach()).exp()
    return finish(inputs, config, _clip(ratio, inputs, clipping_of(config, corrections)), corrections)


def _clip(ratio: torch.Tensor, inputs: LossInputs, config: LossConfig) -> Objective:
    advantages = known_advantages(inputs)
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    clipped = bounded > free
    loss = torch.maximum(free, bounded)
    if config.dual_clip is None:
        return Objective(loss, clipped)
    ceiling = -advantages * config.dual_clip
    dual_clipped = (advantages < 0) & (ceiling < loss)
    return Objective(torch.where(dual_clipped, ceiling, loss), clipped, dual_clipped)


def _mean_log_ratio(inputs: LossInputs, corrections: CorrectionOutputs) -> torch.Tensor:
    """Return [S], the mean of log(current / proximal) over kept tokens."""
    return sequence_mean(inputs.logprobs - inputs.proximal_logprobs.detach(), corrections.kept, inputs)
