"""Forward-only passes over a step's rows: what must be known of them before the first update, and no more.

A value head and the proximal log-probabilities share one forward of the policy.

Legend: M targets of a row.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from asyncrl.errors import LearnerError
from asyncrl.learner.model.critic import ValueHead
from asyncrl.learner.model.policy import RowOutputs, row_hidden, run_row
from asyncrl.learner.step.microbatch import Row
from asyncrl.learner.step.plan import StepPlan
from asyncrl.learner.train_state import TrainState

RowValues = list[torch.Tensor]
"""[M] for each of the plan's rows."""


@dataclass(slots=True)
class Passes:
    """What the passes found; None where nothing needs it."""

    proximal: RowValues | None = None
    """The learner before the step."""
    values: RowValues | None = None
    """The critic before the step."""
    reference: RowValues | None = None
    timings_s: dict[str, float] = field(default_factory=dict)
    """By metric name."""


@torch.no_grad()
def run_passes(state: TrainState, plan: StepPlan) -> Passes:
    """Run what the plan needs.

    Raises:
        LearnerError: The plan needs something that neither the state nor the batch has.
    """
    passes = Passes()
    if plan.needs_reference:
        started_s = time.perf_counter()
        passes.reference = _reference(state, plan)
        passes.timings_s["time/reference_s"] = time.perf_counter() - started_s
    if plan.needs_proximal or isinstance(state.critic, ValueHead):
        started_s = time.perf_counter()
        passes.proximal, passes.values = _policy(state, plan)
        passes.timings_s["time/proximal_s"] = time.perf_counter() - started_s
    if state.critic is not None and passes.values is None:
        started_s = time.perf_counter()
        passes.values = [state.critic(row, None) for row in plan.rows]
        passes.timings_s["time/values_s"] = time.perf_counter() - started_s
    return passes


def run_policy(state: TrainState, plan: StepPlan, row: Row, *, entropy_gradient: bool = False) -> RowOutputs:
    """Run the policy over a row, as the plan's settings say; see `run_row`."""
    return run_row(
        state.model,
        row,
        temperature=plan.batch.temperature,
        chunk_tokens=plan.learner.logprob_chunk_tokens,
        entropy_gradient=entropy_gradient,
        fused=plan.learner.logprobs == "fused",
    )


def _reference(state: TrainState, plan: StepPlan) -> RowValues:
    # Every row of every rank must bring them: ranks that share a reference call it equally often.
    if all(row.reference_logprobs for row in plan.batch.rows):
        return [row.reference_logprobs for row in plan.rows if row.reference_logprobs is not None]
    if state.reference is None:
        raise LearnerError(
            f"step {plan.batch.step} needs log-probabilities of the reference: neither does the batch bring them "
            "(algorithm.reference.where = 'worker') nor has the learner a reference (TrainState.reference)"
        )
    state.bring("inference")
    logprobs = [state.reference.logprobs(row, plan.batch.temperature) for row in plan.rows]
    state.bring("train")
    return logprobs


def _policy(state: TrainState, plan: StepPlan) -> tuple[RowValues | None, RowValues | None]:
    """Return proximal log-probabilities where they are needed, and a value head's values where there is one."""
    proximal: RowValues = []
    values: RowValues = []
    for row in plan.rows:
        if plan.needs_proximal:
            outputs = run_policy(state, plan, row)
            proximal.append(outputs.logprobs)
            hidden = outputs.hidden
        else:
            hidden = row_hidden(state.model.base_model, row)
        if isinstance(state.critic, ValueHead):
            values.append(state.critic(row, hidden))
    return proximal or None, values or None
