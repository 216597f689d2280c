"""Policy losses: pure functions `(LossInputs, LossConfig) -> LossOutputs`, one row of `LOSSES` each.

Invariants: at ratio 1 the gradient of every loss is the policy gradient (times the correction weight); a masked token has
gradient exactly 0. Called by learner/step.py through the registry.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncrl.algorithms.aggregation import AGGREGATIONS
from asyncrl.algorithms.corrections import correct
from asyncrl.algorithms.ratios import log_ratio
from asyncrl.algorithms.types import LossConfig, LossInputs, LossOutputs

Loss = Callable[[LossInputs, LossConfig], LossOutputs]


def ppo_clip(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute PPO's clipped objective against the proximal policy, without importance weights.

    Per token X = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = current / proximal; with dual clip, X = min(X, -A c)
    where A < 0.

    Source: Schulman et al. (arXiv 1707.06347), equation 7; clip-higher: DAPO (arXiv 2503.14476); dual clip: Ye et al.
    (arXiv 1912.09729), equation 5.
    """
    return _finish(inputs, config, _clipped_objective(inputs, config), correct(inputs, ()).weights)


def decoupled_ppo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute the decoupled objective: `ppo_clip`'s X, then each token times its weight proximal / behaviour.

    The weight is detached, bounded as `config.correction` says, and multiplies after clipping and dual clip.

    Source: Hilton et al. (arXiv 2110.00641), equation 4; AReaL (arXiv 2505.24298), equation 5.
    """
    return _finish(inputs, config, _clipped_objective(inputs, config), correct(inputs, config.corrections).weights)


LOSSES: dict[str, Loss] = {"ppo_clip": ppo_clip, "decoupled_ppo": decoupled_ppo}

_Objective = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(loss [N], clipped [N], dual clipped [N])."""


def _clipped_objective(inputs: LossInputs, config: LossConfig) -> _Objective:
    ratio = log_ratio(inputs.logprobs, inputs.proximal_logprobs, inputs.mask).exp()
    advantages = torch.where(inputs.mask, inputs.advantages, 0.0)
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    clipped = bounded > free
    loss = torch.maximum(free, bounded)
    if config.dual_clip is None:
        return loss, clipped, torch.zeros_like(clipped)
    ceiling = -advantages * config.dual_clip
    dual_clipped = (advantages < 0) & (ceiling < loss)
    return torch.where(dual_clipped, ceiling, loss), clipped, dual_clipped


def _finish(inputs: LossInputs, config: LossConfig, objective: _Objective, weights: torch.Tensor) -> LossOutputs:
    loss, clipped, dual_clipped = objective
    loss = loss * weights
    if config.entropy_coefficient and inputs.entropy is not None:
        loss = loss - config.entropy_coefficient * inputs.entropy
    aggregate = AGGREGATIONS[config.aggregation]
    total = aggregate(loss, inputs.mask, inputs.sequence_ids, inputs.num_sequences, inputs.denominators)
    return LossOutputs(loss=total, weights=weights, clipped=clipped.detach(), dual_clipped=dual_clipped.detach())
