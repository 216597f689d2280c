"""One micro-batch's policy loss: what the loss of the config is given.

Called by learner/policy_objective.py, and by learner/planned_corrections.py for the proximal policy.

Legend: M targets of a row.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from asyncrl.algorithms.corrections import combined, correct
from asyncrl.algorithms.losses import load_loss
from asyncrl.algorithms.proximal import interpolated_proximal
from asyncrl.algorithms.types import Denominators, LossInputs, LossOutputs
from asyncrl.learner.model import RowOutputs
from asyncrl.learner.plan import StepPlan
from asyncrl.learner.rows import Row

if TYPE_CHECKING:
    from asyncrl.learner.micro_batches import MicroBatch

load_loss_once = functools.cache(load_loss)
"""A user's file runs once, not at each row."""


def policy_loss(
    plan: StepPlan, micro: MicroBatch, denominators: Denominators, outputs: RowOutputs
) -> tuple[LossInputs, LossOutputs]:
    """Return the loss of a row under the current policy, and what it was made from."""
    row, logprobs = micro.row, outputs.logprobs
    behaviour = row.behaviour_logprobs.to(logprobs)
    inputs = LossInputs(
        logprobs=logprobs,
        proximal_logprobs=proximal_of(plan, logprobs.detach(), behaviour, row.versions, micro.proximal),
        behaviour_logprobs=behaviour,
        advantages=micro.advantages.to(logprobs),
        mask=trained_mask(row),
        sequence_ids=row.sequence_ids,
        num_sequences=row.num_sequences,
        denominators=denominators,
        entropy=outputs.entropy,
        reference_logprobs=None if micro.reference is None else micro.reference.to(logprobs),
        versions=row.versions,
        learner_version=plan.batch.step,
    )
    if micro.corrections is not None:
        inputs = replace(inputs, corrections=combined(micro.corrections, correct(inputs, plan.corrections_of_rows)))
    return inputs, load_loss_once(plan.algorithm.loss)(inputs, plan.loss_config)


def trained_mask(row: Row) -> torch.Tensor:
    """Return bool [M], which targets count: all, or none of a filler."""
    return torch.full_like(row.target_ids, not row.is_filler, dtype=torch.bool)


def proximal_of(
    plan: StepPlan, current: torch.Tensor, behaviour: torch.Tensor, versions: torch.Tensor, before: torch.Tensor | None
) -> torch.Tensor:
    """Return the proximal policy's log-probabilities [M], as the config says; with a single update they are the current ones.

    Args:
        plan: Of the step.
        current: float [M], detached.
        behaviour: float [M].
        versions: int64 [M].
        before: float [M], of the learner before the step, where a pass was made.
    """
    if plan.algorithm.proximal == "behaviour":
        return behaviour
    if plan.algorithm.proximal == "loglinear":
        everywhere = torch.ones_like(current, dtype=torch.bool)
        return interpolated_proximal(current, behaviour, versions, everywhere, current_version=plan.batch.step)
    return current if before is None or plan.num_updates == 1 else before.to(current)
