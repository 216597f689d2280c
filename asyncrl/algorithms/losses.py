"""Policy losses by name: pure functions `(LossInputs, LossConfig) -> LossOutputs`, one row of `LOSSES` each.

Invariants: at ratio 1 the gradient of every loss is the policy gradient (times the correction weight); a masked token has
gradient exactly 0, and a dropped one no policy gradient. The functions are in losses_clipped.py and losses_weighted.py, what
they share in loss_terms.py. Called by learner/policy_loss.py.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.algorithms.losses_clipped import decoupled_ppo, gspo, gspo_token, ppo_clip
from asyncrl.algorithms.losses_weighted import aipo, cispo, importance_sampling, reinforce, sapo, topr
from asyncrl.algorithms.types import LossConfig, LossInputs, LossOutputs
from asyncrl.algorithms.user_function import load_own, wrong_shape
from asyncrl.errors import ConfigError

Loss = Callable[[LossInputs, LossConfig], LossOutputs]

LOSSES: dict[str, Loss] = {
    "ppo_clip": ppo_clip,
    "decoupled_ppo": decoupled_ppo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
    "importance_sampling": importance_sampling,
    "aipo": aipo,
    "topr": topr,
}


def load_loss(name: str) -> Loss:
    """Return the loss of that name, or a user's own.

    Args:
        name: A key of LOSSES, `module:function` or `file.py:function`. Call once and keep the answer: a file runs at each call.

    Raises:
        ConfigError: There is no such loss.
    """
    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name:
        raise ConfigError(
            f"algorithm.loss must be one of {', '.join(LOSSES)}, or your own function as module:function, got {name!r}"
        )
    return load_own(name, "algorithm.loss", LossOutputs, _fault_in)


def _fault_in(inputs: LossInputs, outputs: LossOutputs) -> str:
    """Return what is wrong with a user's answer."""
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
