"""One optimizer update: its rows forward and backward one after the other, then clip and step, or nothing at all.

Losses are numerators of this rank over denominators of all ranks; gradients are summed over ranks, by whoever shards the
policy's weights and here for a critic, which every rank has whole. So every rank sees the same loss and norm and decides alike.

Invariants: weights change only if loss and gradients are finite; while the critic is trained alone, the policy has neither
gradient nor optimizer step. Called by learner/step.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from asyncrl.algorithms.types import Denominators
from asyncrl.algorithms.values import ValueInputs, value_loss
from asyncrl.learner.critic import ValueHead
from asyncrl.learner.measure import StepTokens, TokenRecord
from asyncrl.learner.micro_batches import MicroBatch, Update
from asyncrl.learner.model import RowOutputs, row_hidden, run_row
from asyncrl.learner.passes import critic_values
from asyncrl.learner.plan import StepPlan
from asyncrl.learner.policy_loss import policy_loss
from asyncrl.learner.rows import Row
from asyncrl.learner.trainee import Trainee


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """What an update was like; NaN where it had no such part."""

    loss: float = math.nan
    value_loss: float = math.nan
    grad_norm: float = math.nan
    value_grad_norm: float = math.nan
    learning_rate: float = math.nan


class NonFiniteError(Exception):
    """Loss or gradient is not finite; the weights are those before the update."""


def run_update(trainee: Trainee, plan: StepPlan, update: Update, tokens: StepTokens, *, is_first: bool) -> UpdateOutcome:
    """Train one update.

    Args:
        trainee: Changed in place.
        plan: Of the step.
        update: Its rows.
        tokens: Gets a record a row.
        is_first: Whether the weights are still those from before the step.

    Raises:
        NonFiniteError: See there; gradients are dropped.
    """
    parts = [_train_row(trainee, plan, micro, update.denominators, tokens, is_first=is_first) for micro in update.micro_batches]
    loss, value = trainee.ranks.sum(torch.stack(parts).sum(dim=0)).tolist()
    norm = trainee.optimizer.clip() if plan.trains_policy else 0.0
    value_norm = 0.0 if trainee.critic_optimizer is None else trainee.critic_optimizer.clip()
    if not all(map(math.isfinite, (loss, value, norm, value_norm))):
        _drop_gradients(trainee)
        raise NonFiniteError(_figures(plan, trainee, loss, value, norm, value_norm))
    if trainee.critic_optimizer is not None:
        trainee.critic_optimizer.step(plan.batch.step)
    if not plan.trains_policy:
        return UpdateOutcome(value_loss=value, value_grad_norm=value_norm)
    rate = trainee.optimizer.step(plan.batch.step)
    if trainee.critic is None:
        return UpdateOutcome(loss, grad_norm=norm, learning_rate=rate)
    return UpdateOutcome(loss, value, norm, value_norm, rate)


def _train_row(
    trainee: Trainee, plan: StepPlan, micro: MicroBatch, denominators: Denominators, tokens: StepTokens, *, is_first: bool
) -> torch.Tensor:
    """Add a row's gradients; return its policy loss and its value loss, [2]."""
    outputs = None
    loss = value = torch.zeros((), device=micro.row.target_ids.device)
    if plan.trains_policy:
        outputs = _run_policy(trainee, plan, micro.row)
        inputs, judged = policy_loss(plan, micro, denominators, outputs)
        exact = plan.algorithm.proximal == "recompute"
        tokens.add(TokenRecord.of(inputs, judged, proximal_is_learner=exact, is_first_update=is_first))
        loss = judged.loss
    if isinstance(trainee.critic, ValueHead):
        value = _head_loss(trainee, plan, micro, denominators, outputs)
        _backward(loss + _coefficient(plan) * value)
    else:
        if plan.trains_policy:
            _backward(loss)
        if trainee.critic is not None:
            value = _value_loss(plan, micro, denominators, critic_values(trainee.critic, micro.row, None))
            _backward(value)
    return torch.stack([loss.detach().double(), value.detach().double()])


def _run_policy(trainee: Trainee, plan: StepPlan, row: Row) -> RowOutputs:
    return run_row(
        trainee.model,
        row,
        temperature=plan.batch.temperature,
        chunk_tokens=plan.learner.logprob_chunk_tokens,
        entropy_gradient=plan.algorithm.entropy_coefficient != 0.0,
    )


def _head_loss(
    trainee: Trainee, plan: StepPlan, micro: MicroBatch, denominators: Denominators, outputs: RowOutputs | None
) -> torch.Tensor:
    """Return the value loss of a head on the policy's forward; on one without gradient where the policy is not trained."""
    assert trainee.critic is not None
    if outputs is not None:
        hidden = outputs.hidden
    else:
        with torch.no_grad():
            hidden = row_hidden(trainee.model.base_model, micro.row)
    return _value_loss(plan, micro, denominators, critic_values(trainee.critic, micro.row, hidden))


def _value_loss(plan: StepPlan, micro: MicroBatch, denominators: Denominators, values: torch.Tensor) -> torch.Tensor:
    assert plan.algorithm.critic is not None
    assert micro.values is not None
    assert micro.returns is not None
    row = micro.row
    inputs = ValueInputs(
        values=values,
        old_values=micro.values.to(values),
        returns=micro.returns.to(values),
        mask=torch.full_like(row.target_ids, not row.is_filler, dtype=torch.bool),
        sequence_ids=row.sequence_ids,
        num_sequences=row.num_sequences,
        denominators=denominators,
    )
    return value_loss(inputs, clip=plan.algorithm.critic.value_clip, aggregation=plan.algorithm.aggregation).loss


def _coefficient(plan: StepPlan) -> float:
    assert plan.algorithm.critic is not None
    return plan.algorithm.critic.coefficient


def _backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def _drop_gradients(trainee: Trainee) -> None:
    trainee.optimizer.zero_grad()
    if trainee.critic_optimizer is not None:
        trainee.critic_optimizer.zero_grad()


def _figures(plan: StepPlan, trainee: Trainee, loss: float, value: float, norm: float, value_norm: float) -> str:
    policy = f"loss {loss}, gradient norm {norm}" if plan.trains_policy else ""
    critic = f"value loss {value}, its gradient norm {value_norm}" if trainee.critic is not None else ""
    return ", ".join(filter(None, (policy, critic)))
