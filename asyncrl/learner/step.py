"""One optimizer step: exactly this batch trains version k and makes version k + 1.

Order: what must be known first (forward-only passes under the weights as they are: proximal and reference log-probabilities,
values); advantages and, where they need it, corrections over the samples of all ranks; then for each update its rows one after
the other (a row is a micro-batch), clip, and the optimizer. Denominators are those of the whole update, so how samples share
rows and ranks changes nothing. A step with one update and neither reference nor critic makes no pass beforehand.

Invariants: the same weights, memory and batch give the same bits on a CPU; weights change only if loss and gradients are
finite; the maths is that of asyncrl/algorithms, none of it is here; what happens when memory runs out is in
learner/out_of_memory.py. Called by learner/worker.py (off the event loop), learner/follower.py, experiments and tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from asyncrl.algorithms.auto import signals_of
from asyncrl.algorithms.kl import next_coefficient
from asyncrl.config.run import RunConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.measure import batch_metrics
from asyncrl.learner.out_of_memory import RoomyStep
from asyncrl.learner.plan import StepPlan, make_plan
from asyncrl.learner.policy_objective import PolicyObjective
from asyncrl.learner.preference_step import PreferenceObjective
from asyncrl.learner.rows import Division, PreparedBatch, prepare
from asyncrl.learner.trainee import Trainee
from asyncrl.learner.update import NonFiniteError, UpdateOutcome, run_update
from asyncrl.models.causal import use_packed_attention
from asyncrl.schema.batches import StepBatch


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step was like."""

    version: int
    """The version that exists now."""
    num_tokens: int
    """Trained tokens, of all ranks."""
    metrics: dict[str, float]
    timings_s: dict[str, float] = field(default_factory=dict, compare=False)
    """By metric name."""
    recipe_reason: str = ""
    """Why `kind = "auto"` changed its recipe; empty where it did not."""


def train_step(
    trainee: Trainee, batch: StepBatch | PreparedBatch, config: RunConfig, *, failed_folder: Path | None = None
) -> StepResult:
    """Train one batch. Every rank calls it with the same batch.

    Args:
        trainee: The policy at version `step` and what belongs to it; changed in place. The model is switched to packed
            attention if it has another.
        batch: As it came, or decoded already (`rows.prepare` with `division_of(trainee, config)`).
        config: `algorithm` and `learner` are read.
        failed_folder: Where the batch is saved if loss or gradient is not finite; None: nowhere.

    Returns:
        The new version and the step's metrics, named as in observe/metrics.py.

    Raises:
        LearnerError: Nothing to train, something needed is missing, memory ran out twice, or a loss or gradient is not finite
            (the weights are those before the update).
    """
    step = RoomyStep(trainee, _plan(trainee, batch, config))
    passes = step.run_passes()
    plan = step.plan
    build = PreferenceObjective if plan.algorithm.kind == "dpo" else PolicyObjective
    objective = build(trainee, plan, passes)
    outcomes = []
    try:
        for _ in range(config.learner.epochs):
            outcomes += [
                run_update(trainee, plan, partial(step.train_rows, objective, number))
                for number in range(len(plan.prepared.updates))
            ]
    except NonFiniteError as error:
        raise LearnerError(_describe_failure(plan.batch, str(error), failed_folder)) from error
    metrics = _metrics(plan, objective, outcomes)
    reason = plan.choice.reason if plan.choice is not None and plan.choice.recipe != trainee.memory.recipe else ""
    _remember(trainee, plan, metrics)
    timings_s = passes.timings_s | {"time/update_s": sum(outcome.seconds for outcome in outcomes)}
    return StepResult(plan.batch.step + 1, plan.batch.num_trained_tokens, metrics, timings_s, reason)


def division_of(trainee: Trainee, config: RunConfig) -> Division:
    """Return how a batch is to be prepared for this trainee."""
    return Division(config.learner.minibatches, trainee.ranks.rank, trainee.ranks.size)


def _plan(trainee: Trainee, batch: StepBatch | PreparedBatch, config: RunConfig) -> StepPlan:
    division = division_of(trainee, config)
    prepared = batch if isinstance(batch, PreparedBatch) else prepare(batch, division)
    if prepared.division != division:
        prepared = prepare(prepared.batch, division)
    _check(prepared)
    use_packed_attention(trainee.model)
    device = trainee.model.device
    prepared = replace(prepared, updates=tuple(tuple(row.to(device) for row in update) for update in prepared.updates))
    return make_plan(prepared, config, trainee.memory)


def _check(prepared: PreparedBatch) -> None:
    batch, targets = prepared.batch, int(prepared.table.mask.sum())
    if targets == 0:
        raise LearnerError(f"step {batch.step} has nothing to train: no token of its {len(batch.samples)} samples is unmasked")
    if targets != batch.num_trained_tokens:
        raise LearnerError(f"step {batch.step} promises {batch.num_trained_tokens} trained tokens and its rows hold {targets}")


def _metrics(
    plan: StepPlan, objective: PolicyObjective | PreferenceObjective, outcomes: Sequence[UpdateOutcome]
) -> dict[str, float]:
    advantages = objective.advantages if isinstance(objective, PolicyObjective) else None
    metrics = batch_metrics(plan.batch, advantages) | objective.metrics() | {"policy/updates": float(len(outcomes))}
    if plan.trains_policy:
        metrics |= {
            "policy/loss": _mean([outcome.loss for outcome in outcomes]),
            "policy/grad_norm": _mean([outcome.grad_norm for outcome in outcomes]),
            "policy/learning_rate": outcomes[-1].learning_rate,
        }
    if plan.learner.dtype == "float16":
        metrics["policy/skipped_updates"] = float(sum(outcome.is_skipped for outcome in outcomes))
    if plan.algorithm.critic is not None:
        metrics |= {
            "value/loss": _mean([outcome.value_loss for outcome in outcomes]),
            "value/grad_norm": _mean([outcome.value_grad_norm for outcome in outcomes]),
        }
    if plan.algorithm.kl is not None:
        metrics["kl/coefficient"] = plan.kl_coefficient
    if plan.choice is not None:
        metrics["policy/recipe"] = plan.choice.number
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _remember(trainee: Trainee, plan: StepPlan, metrics: dict[str, float]) -> None:
    """Note what the next step is decided by."""
    if plan.choice is not None:
        trainee.memory.recipe = plan.choice.recipe
        trainee.memory.measured = signals_of(metrics) or trainee.memory.measured
    kl = plan.algorithm.kl
    if kl is not None and kl.target is not None and plan.trains_policy:
        trainee.memory.kl_coefficient = next_coefficient(
            plan.kl_coefficient,
            measured_kl=metrics["kl/penalty_mean"],
            target=kl.target,
            horizon=kl.horizon,
            num_samples=len(plan.batch.samples),
        )


def _describe_failure(batch: StepBatch, figures: str, failed_folder: Path | None) -> str:
    what = f"step {batch.step}: {figures}; the weights were not changed"
    if failed_folder is None:
        return what
    failed_folder.mkdir(parents=True, exist_ok=True)
    path = failed_folder / f"step-{batch.step}.msgpack"
    path.write_bytes(msgspec.msgpack.encode(batch))
    return f"{what}; the batch is in {path} (msgspec.msgpack, StepBatch); try a lower learning rate"
