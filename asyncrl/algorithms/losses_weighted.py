"""Policy losses that never cut a gradient by clipping PPO's way: soft gates, detached ratios, plain policy gradient.

Legend: N tokens, S sequences; A advantage, X loss a token, sg: no gradient. Called through losses.LOSSES.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.loss_terms import Objective, corrections_of, finish, known_advantages
from asyncrl.algorithms.ratios import bounded_exp, log_ratio, sequence_sum
from asyncrl.algorithms.types import LossConfig, LossInputs, LossOutputs, masked


def cispo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute CISPO: X = -sg(clip(r, min_ratio, max_ratio)) A log current, r = current / proximal.

    The bounds are absolute ratios, as in TRL; verl and slime give distances from 1 (their clip_high 0.28 is max_ratio 1.28 here).
    With min_ratio 0 (the config's) there is no lower bound, as in the paper. No token loses its gradient.

    Source: MiniMax-M1 (arXiv 2506.13585), equations 4 and 5.
    """
    ratio = log_ratio(inputs.logprobs, inputs.proximal_logprobs, inputs.mask).detach().exp()
    bounded = ratio.clamp(config.min_ratio, config.max_ratio)
    objective = Objective(bounded * _negative_likelihood(inputs), clipped=inputs.mask & (bounded != ratio))
    return finish(inputs, config, objective, corrections_of(inputs, config))


def sapo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute SAPO's soft gate: X = -A sigmoid(tau (r - 1)) 4 / tau, r = current / proximal.

    tau is tau_positive where A > 0, else tau_negative. At r = 1 the gate's slope is 1, and it fades on both sides.

    Source: SAPO (arXiv 2511.20347); verl and TRL take the mean of sequences, AReaL that of tokens.
    """
    ratio = log_ratio(inputs.logprobs, inputs.proximal_logprobs.detach(), inputs.mask).exp()
    advantages = known_advantages(inputs)
    tau = torch.full_like(advantages, config.tau_negative).masked_fill(advantages > 0, config.tau_positive)
    objective = Objective(-advantages * torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau, clipped=_nowhere(inputs))
    return finish(inputs, config, objective, corrections_of(inputs, config))


def reinforce(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute the plain policy gradient: X = -A log current.

    Off-policy it is right only with an importance weight among the corrections.

    Source: Williams 1992.
    """
    objective = Objective(_negative_likelihood(inputs), clipped=_nowhere(inputs))
    return finish(inputs, config, objective, corrections_of(inputs, config))


def importance_sampling(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute the importance-weighted policy gradient: X = -A current / behaviour, with the gradient through the ratio.

    Unbounded but for ratios.LOG_RATIO_LIMIT, beyond which a token has no gradient.

    Source: Degris et al. 2012 (arXiv 1205.4839), per token; Tinker's loss `importance_sampling`.
    """
    ratio = log_ratio(inputs.logprobs, inputs.behaviour_logprobs.detach(), inputs.mask).exp()
    objective = Objective(-known_advantages(inputs) * ratio, clipped=_nowhere(inputs))
    return finish(inputs, config, objective, corrections_of(inputs, config))


def aipo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute AIPO: X = -sg(min(current / behaviour, max_ratio)) A log current.

    The weight is detached, so a token over the bound keeps its gradient, with weight max_ratio.

    Source: LlamaRL (arXiv 2505.24034), asynchronous importance-weighted policy optimization.
    """
    ratio = log_ratio(inputs.logprobs, inputs.behaviour_logprobs, inputs.mask).detach().exp()
    objective = Objective(
        ratio.clamp(max=config.max_ratio) * _negative_likelihood(inputs), clipped=inputs.mask & (ratio > config.max_ratio)
    )
    return finish(inputs, config, objective, corrections_of(inputs, config))


def topr(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute TOPR: X = -w A log current; w is 1 where A >= 0, else the sequence's current / behaviour held in [0, 1], detached.

    Good samples are learnt at full weight however stale; bad ones count less the further the policy has left them, which bounds
    the objective. Aggregate by seq-mean-token-sum or constant for the paper's log-likelihood of whole sequences.

    Source: Tapered off-policy REINFORCE (arXiv 2503.14286).
    """
    difference = inputs.logprobs.detach() - inputs.behaviour_logprobs.detach()
    ratio = bounded_exp(sequence_sum(difference, inputs))[inputs.sequence_ids]
    negative = known_advantages(inputs) < 0
    weight = torch.where(negative, ratio.clamp(max=1.0), 1.0)
    objective = Objective(weight * _negative_likelihood(inputs), clipped=negative & (ratio > 1.0))
    return finish(inputs, config, objective, corrections_of(inputs, config))


def _negative_likelihood(inputs: LossInputs) -> torch.Tensor:
    """Return -A log current [N], 0 at masked tokens."""
    return -known_advantages(inputs) * masked(inputs.logprobs, inputs.mask)


def _nowhere(inputs: LossInputs) -> torch.Tensor:
    return torch.zeros_like(inputs.mask)
