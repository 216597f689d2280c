"""Forward-only passes over a step's rows: what must be known of them before the first update, and no more.

A value head and the proximal log-probabilities share one forward of the policy. Called by learner/step.py.

Legend: M targets of a row.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from asyncrl.errors import LearnerError
from asyncrl.learner.critic import Critic, ValueHead
from asyncrl.learner.model import row_hidden, run_row
from asyncrl.learner.plan import StepPlan
from asyncrl.learner.rows import Row
from asyncrl.learner.trainee import Trainee

RowValues = list[torch.Tensor]
"""[M] for each of the plan's rows."""


@dataclass(slots=True)
class Passes:
    """What the passes found; None where nothing asked."""

    proximal: RowValues | None = None
    """The learner before the step."""
    values: RowValues | None = None
    """The critic before the step."""
    reference: RowValues | None = None
    timings_s: dict[str, float] = field(default_factory=dict)
    """By metric name."""


@torch.no_grad()
def run_passes(trainee: Trainee, plan: StepPlan) -> Passes:
    """Run what the plan needs.

    Raises:
        LearnerError: Something is needed that neither the trainee nor the batch has.
    """
    passes = Passes()
    if plan.needs_reference:
        started_s = time.perf_counter()
        passes.reference = _reference(trainee, plan)
        passes.timings_s["time/reference_s"] = time.perf_counter() - started_s
    if plan.needs_proximal or isinstance(trainee.critic, ValueHead):
        started_s = time.perf_counter()
        passes.proximal, passes.values = _policy(trainee, plan)
        passes.timings_s["time/proximal_s"] = time.perf_counter() - started_s
    if trainee.critic is not None and passes.values is None:
        started_s = time.perf_counter()
        passes.values = [critic_values(trainee.critic, row, None) for row in plan.rows]
        passes.timings_s["time/values_s"] = time.perf_counter() - started_s
    return passes


def critic_values(critic: Critic, row: Row, hidden: torch.Tensor | None) -> torch.Tensor:
    """Return [M], the critic's values; `hidden` is the policy's, which a value head reads."""
    values: torch.Tensor = critic(row, hidden)
    return values


def _reference(trainee: Trainee, plan: StepPlan) -> RowValues:
    if plan.batch_has_reference:
        return [row.reference_logprobs for row in plan.rows if row.reference_logprobs is not None]
    if trainee.reference is None:
        raise LearnerError(
            f"step {plan.batch.step} needs log-probabilities of the reference: neither does the batch bring them "
            "(algorithm.reference.where = 'worker') nor has the learner a reference (Trainee.reference)"
        )
    trainee.bring("inference")
    logprobs = [trainee.reference.logprobs(row, plan.batch.temperature) for row in plan.rows]
    trainee.bring("train")
    return logprobs


def _policy(trainee: Trainee, plan: StepPlan) -> tuple[RowValues | None, RowValues | None]:
    """Return proximal log-probabilities where they are needed, and a value head's values where there is one."""
    head = trainee.critic if isinstance(trainee.critic, ValueHead) else None
    proximal: RowValues = []
    values: RowValues = []
    for row in plan.rows:
        if plan.needs_proximal:
            outputs = run_row(
                trainee.model,
                row,
                temperature=plan.batch.temperature,
                chunk_tokens=plan.learner.logprob_chunk_tokens,
                fused=plan.learner.logprobs == "fused",
            )
            proximal.append(outputs.logprobs)
            hidden = outputs.hidden
        else:
            hidden = row_hidden(trainee.model.base_model, row)
        if head is not None:
            values.append(critic_values(head, row, hidden))
    return proximal or None, values or None
