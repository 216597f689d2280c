"""One optimizer update: its rows forward and backward one after the other, then clip and step, or nothing at all.

Losses are numerators of this rank over denominators of all ranks; gradients are summed over ranks by whoever divides the models
(learner/sharded.py). So every rank sees the same loss and norm and decides alike.

Invariants: weights change only if loss and gradients are finite; what has no gradient in a step has no optimizer step either.
Called by learner/step.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from asyncrl.learner.optim import skip_update
from asyncrl.learner.passes import Passes
from asyncrl.learner.plan import StepPlan
from asyncrl.learner.trainee import Trainee


class Objective(Protocol):
    """What a step minimises."""

    def begin_update(self) -> None:
        """Note that the rows of an update follow."""
        ...

    def restart_update(self, plan: StepPlan, passes: Passes) -> None:
        """Forget the rows since `begin_update`: those of `plan`, smaller ones of the same samples, follow in their place."""
        ...

    def train_row(self, update: int, place: int) -> torch.Tensor:
        """Add the gradients of row `place` of an update; return this rank's shares of policy and value loss, float64 [2]."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return what it has to say after the last update; every rank calls."""
        ...


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """What an update was like."""

    loss: float
    value_loss: float
    grad_norm: float
    """0 where the policy is not trained."""
    value_grad_norm: float
    learning_rate: float
    """The policy's; 0 where it is not trained or the update was skipped."""
    is_skipped: bool
    """float16 gradients overflowed: no weights changed, and the loss scale they were under is halved."""
    seconds: float


class NonFiniteError(Exception):
    """Loss or gradient is not finite; the weights are those before the update."""


def run_update(trainee: Trainee, plan: StepPlan, train_rows: Callable[[], torch.Tensor]) -> UpdateOutcome:
    """Train one update of a pass over the batch.

    Args:
        trainee: Whose weights change.
        plan: Of the step.
        train_rows: Adds the gradients of the update's rows; returns this rank's shares of policy and value loss, [2].

    Raises:
        NonFiniteError: See there; gradients are dropped.
    """
    started_s = time.perf_counter()
    loss, value_loss = trainee.ranks.sum(train_rows()).tolist()
    policy = trainee.optimizer if plan.trains_policy else None
    optimizers = [own for own in (policy, trainee.critic_optimizer) if own is not None]
    norms = {own: own.clip() for own in optimizers}
    norm, value_norm = (0.0 if own is None else norms[own] for own in (policy, trainee.critic_optimizer))
    is_finite = all(map(math.isfinite, norms.values()))
    if not math.isfinite(loss + value_loss) or not (is_finite or skip_update(list(norms.items()))):
        for own in optimizers:
            own.zero_grad()
        raise NonFiniteError(_figures(trainee, plan, (loss, norm), (value_loss, value_norm)))
    trainee.bring("train")
    rates = [own.step(plan.batch.step) for own in optimizers] if is_finite else []
    rate = rates[0] if rates and plan.trains_policy else 0.0
    return UpdateOutcome(loss, value_loss, norm, value_norm, rate, not is_finite, time.perf_counter() - started_s)


def _figures(trainee: Trainee, plan: StepPlan, policy: tuple[float, float], critic: tuple[float, float]) -> str:
    said = []
    if plan.trains_policy:
        said.append(f"loss {policy[0]}, gradient norm {policy[1]}")
    if trainee.critic is not None:
        said.append(f"value loss {critic[0]}, its gradient norm {critic[1]}")
    return ", ".join(said)
