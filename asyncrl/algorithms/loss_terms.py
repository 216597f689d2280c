"""What all policy losses share: corrections, entropy bonus, KL penalty, and the sum of it all.

Legend: N tokens. A loss computes its objective X [N] and hands it to `finish`. Called by the losses_*.py modules and by a user's
own loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from asyncrl.algorithms.aggregation import AGGREGATIONS
from asyncrl.algorithms.corrections import correct
from asyncrl.algorithms.kl import kl_penalty
from asyncrl.algorithms.types import CorrectionOutputs, LossConfig, LossInputs, LossOutputs, masked


@dataclass(frozen=True, slots=True)
class Objective:
    """A policy loss a token, before corrections."""

    loss: torch.Tensor
    """float [N], X, with gradient."""
    clipped: torch.Tensor
    """bool [N]."""
    dual_clipped: torch.Tensor | None = None
    """bool [N]; None: nowhere."""


def corrections_of(inputs: LossInputs, config: LossConfig) -> CorrectionOutputs:
    """Return the update's corrections where the caller has them, else those of this micro-batch."""
    return inputs.corrections if inputs.corrections is not None else correct(inputs, config.corrections)


def clipping_of(config: LossConfig, corrections: CorrectionOutputs) -> LossConfig:
    """Return the config with the clip range that a correction put in its place, if one did."""
    if corrections.clip_low is None or corrections.clip_high is None:
        return config
    return replace(config, clip_low=corrections.clip_low, clip_high=corrections.clip_high)


def known_advantages(inputs: LossInputs) -> torch.Tensor:
    """Return the advantages [N], detached, 0 at masked tokens."""
    return masked(inputs.advantages.detach(), inputs.mask)


def finish(inputs: LossInputs, config: LossConfig, objective: Objective, corrections: CorrectionOutputs) -> LossOutputs:
    """Weigh the objective, add entropy bonus and KL penalty, and aggregate.

    Weights multiply the policy term alone. Under denominator `all`, a dropped token keeps its entropy bonus and its KL penalty
    (as in TRL, whose KL term is added after the weights); under `kept` it is out of every term (as in verl, whose rejection
    changes the mask).

    Args:
        inputs: The micro-batch.
        config: What the run says.
        objective: X and where it was clipped.
        corrections: Weights and kept tokens.

    Returns:
        This micro-batch's share of the loss, over the global denominators.
    """
    loss = objective.loss * corrections.weights
    if config.entropy_coefficient:
        assert inputs.entropy is not None, "entropy_coefficient is set and LossInputs.entropy is missing"
        loss = loss - config.entropy_coefficient * masked(inputs.entropy, inputs.mask)
    reference_kl = None
    if config.kl is not None:
        assert inputs.reference_logprobs is not None, "a KL penalty is set and LossInputs.reference_logprobs is missing"
        penalty = kl_penalty(inputs.logprobs, inputs.behaviour_logprobs, inputs.reference_logprobs, inputs.mask, config.kl)
        loss = loss + config.kl_coefficient * penalty
        reference_kl = penalty.detach()
    counted = corrections.kept if config.denominator == "kept" else inputs.mask
    total = AGGREGATIONS[config.aggregation](loss, counted, inputs.sequence_ids, inputs.num_sequences, inputs.denominators)
    nowhere = torch.zeros_like(inputs.mask)
    return LossOutputs(
        loss=total,
        weights=corrections.weights,
        clipped=objective.clipped.detach(),
        dual_clipped=nowhere if objective.dual_clipped is None else objective.dual_clipped.detach(),
        kept=corrections.kept,
        reference_kl=reference_kl,
    )
