"""One optimizer step: exactly this batch trains version k and makes version k + 1.

Order: what must be known first (forward-only passes under the weights as they are: proximal and reference log-probabilities,
values); advantages and, where they need it, corrections over the samples of all ranks; then for each update its rows one after
the other (a row is a micro-batch), clip, and the optimizer. Denominators are those of the whole update, so how samples share
rows and ranks changes nothing. A step with one update and neither reference nor critic makes no pass beforehand.

Invariants: the same weights, memory and batch give the same bits on a CPU; weights change only if loss and gradients are finite;
the maths is that of asyncrl/algorithms, none of it is here. Called by learner/worker.py (off the event loop), experiments and
tests.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from asyncrl.algorithms.advantage_types import FloatArray
from asyncrl.algorithms.kl import next_coefficient
from asyncrl.config.run import RunConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.measure import StepTokens, batch_metrics
from asyncrl.learner.micro_batches import Signals, build_signals
from asyncrl.learner.passes import run_passes
from asyncrl.learner.plan import StepPlan, coefficient_in_force
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
        LearnerError: Nothing to train, something needed is missing, or a loss or gradient is not finite (the weights are those
            before the update).
    """
    plan = _plan(trainee, batch, config)
    passes = run_passes(trainee, plan)
    signals = build_signals(plan, passes, trainee.ranks)
    tokens = StepTokens(len(plan.rows), corrections=plan.algorithm.corrections, ranks=trainee.ranks)
    started_s, outcomes = time.perf_counter(), list[UpdateOutcome]()
    for update in signals.updates * config.learner.epochs:
        try:
            outcomes.append(run_update(trainee, plan, update, tokens, is_first=not outcomes))
        except NonFiniteError as error:
            raise LearnerError(_describe_failure(plan.batch, str(error), failed_folder)) from error
    timings_s = passes.timings_s | {"time/update_s": time.perf_counter() - started_s}
    metrics = _metrics(plan, signals, outcomes, tokens)
    _remember(trainee, plan, metrics)
    return StepResult(plan.batch.step + 1, plan.batch.num_trained_tokens, metrics, timings_s)


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
    algorithm = config.algorithm
    return StepPlan(prepared, algorithm, config.learner, coefficient_in_force(algorithm, trainee.memory))


def _check(prepared: PreparedBatch) -> None:
    batch, targets = prepared.batch, int(prepared.table.mask.sum())
    if targets == 0:
        raise LearnerError(f"step {batch.step} has nothing to train: no token of its {len(batch.samples)} samples is unmasked")
    if targets != batch.num_trained_tokens:
        raise LearnerError(f"step {batch.step} promises {batch.num_trained_tokens} trained tokens and its rows hold {targets}")


def _metrics(plan: StepPlan, signals: Signals, outcomes: Sequence[UpdateOutcome], tokens: StepTokens) -> dict[str, float]:
    metrics = batch_metrics(plan.batch, _of_samples(plan, signals)) | signals.metrics | {"policy/updates": float(len(outcomes))}
    if plan.trains_policy:
        metrics |= tokens.metrics() | {
            "policy/loss": float(np.mean([outcome.loss for outcome in outcomes])),
            "policy/grad_norm": float(np.mean([outcome.grad_norm for outcome in outcomes])),
            "policy/learning_rate": outcomes[-1].learning_rate,
        }
    if plan.algorithm.critic is not None:
        metrics |= {
            "value/loss": float(np.mean([outcome.value_loss for outcome in outcomes])),
            "value/grad_norm": float(np.mean([outcome.value_grad_norm for outcome in outcomes])),
        }
    if plan.algorithm.kl is not None:
        metrics["kl/coefficient"] = plan.kl_coefficient
    return metrics


def _of_samples(plan: StepPlan, signals: Signals) -> FloatArray:
    """Return [S], the mean advantage of each sample's trained tokens."""
    mask = plan.prepared.table.mask
    means: FloatArray = np.where(mask, signals.advantages, 0.0).sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
    return means


def _remember(trainee: Trainee, plan: StepPlan, metrics: dict[str, float]) -> None:
    """Note what the next step is decided by."""
    kl = plan.algorithm.kl
    if kl is not None and kl.target is not None and "kl/reference_mean" in metrics:
        trainee.memory.kl_coefficient = next_coefficient(
            plan.kl_coefficient,
            measured_kl=metrics["kl/reference_mean"],
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
