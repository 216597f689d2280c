"""One optimizer step: exactly this batch trains version k and makes version k + 1.

Order: advantages over the whole batch; proximal log-probabilities under the weights as they are before the first update; then
for each update its rows one after the other (a row is a micro-batch), clip, and the optimizer. Denominators are those of the
whole update, so how samples share rows changes nothing.

Invariants: the same weights and batch give the same bits on a CPU; weights change only if loss and gradients are finite; the
maths is that of asyncrl/algorithms, none of it is here. Called by learner/worker.py (off the event loop), experiments and
tests.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel

from asyncrl.algorithms.advantage_types import AdvantageConfig, AdvantageInputs, FloatArray
from asyncrl.algorithms.advantages import ADVANTAGES
from asyncrl.algorithms.losses import LOSSES
from asyncrl.algorithms.types import Denominators, LossConfig, LossInputs
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.run import RunConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.measure import StepTokens, TokenRecord, batch_metrics
from asyncrl.learner.model import row_logprobs
from asyncrl.learner.optim import PolicyOptimizer
from asyncrl.learner.rows import PreparedBatch, Row, prepare
from asyncrl.models.causal import use_packed_attention
from asyncrl.schema.batches import StepBatch


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step was like."""

    version: int
    """The version that exists now."""
    num_tokens: int
    """Trained tokens."""
    metrics: dict[str, float]


def train_step(
    model: PreTrainedModel,
    optimizer: PolicyOptimizer,
    batch: StepBatch | PreparedBatch,
    config: RunConfig,
    *,
    failed_folder: Path | None = None,
) -> StepResult:
    """Train one batch.

    Args:
        model: The policy at version `step`; changed in place, and switched to packed attention if it has another.
        optimizer: Of this model.
        batch: As it came, or decoded already (`rows.prepare`).
        config: `algorithm` and `learner` are read.
        failed_folder: Where the batch is saved if loss or gradient is not finite; None: nowhere.

    Returns:
        The new version and the step's metrics, named as in observe/metrics.py.

    Raises:
        LearnerError: Nothing to train, or a loss or gradient is not finite (the weights are those before the update).
    """
    prepared = batch if isinstance(batch, PreparedBatch) else prepare(batch)
    batch, rows = _checked(prepared, model.device)
    use_packed_attention(model)
    advantages = _advantages(batch, config.algorithm)
    updates = _split_updates(rows, config.learner.minibatches) * config.learner.epochs
    proximal = None if len(updates) == 1 else _proximal_logprobs(model, rows, batch, config)
    tokens, losses, norms, rate = StepTokens(len(rows), 2.0), [], [], 0.0
    for update in updates:
        losses.append(_accumulate(model, update, advantages, proximal, batch, config, tokens))
        norms.append(optimizer.clip())
        if not (math.isfinite(losses[-1]) and math.isfinite(norms[-1])):
            optimizer.zero_grad()
            raise LearnerError(_describe_failure(batch, losses[-1], norms[-1], failed_folder))
        rate = optimizer.step(batch.step)
    metrics = (
        batch_metrics(batch, advantages)
        | tokens.metrics()
        | {
            "policy/loss": float(np.mean(losses)),
            "policy/grad_norm": float(np.mean(norms)),
            "policy/learning_rate": rate,
            "policy/updates": float(len(updates)),
        }
    )
    return StepResult(batch.step + 1, batch.num_trained_tokens, metrics)


def _accumulate(
    model: PreTrainedModel,
    update: list[Row],
    advantages: FloatArray,
    proximal: dict[int, torch.Tensor] | None,
    batch: StepBatch,
    config: RunConfig,
    tokens: StepTokens,
) -> float:
    """Add the gradients of one update's rows; return its loss."""
    loss_config, loss_function = LossConfig.of(config.algorithm), LOSSES[config.algorithm.loss]
    denominators = Denominators(sum(row.num_targets for row in update), sum(len(row.sample_index) for row in update))
    total = 0.0
    for row in update:
        logprobs, entropy = row_logprobs(
            model,
            row,
            temperature=batch.temperature,
            chunk_tokens=config.learner.logprob_chunk_tokens,
            entropy_gradient=config.algorithm.entropy_coefficient != 0.0,
        )
        row_advantages = torch.from_numpy(advantages[row.sample_index]).to(logprobs)
        inputs = LossInputs(
            logprobs=logprobs,
            proximal_logprobs=_proximal_of(row, logprobs, proximal, config.algorithm),
            behaviour_logprobs=row.behaviour_logprobs.to(logprobs),
            advantages=row_advantages[row.sequence_ids],
            mask=torch.ones_like(row.target_ids, dtype=torch.bool),
            sequence_ids=row.sequence_ids,
            num_sequences=len(row.sample_index),
            denominators=denominators,
            entropy=entropy,
        )
        outputs = loss_function(inputs, loss_config)
        outputs.loss.backward()  # type: ignore[no-untyped-call]
        total += outputs.loss.item()
        tokens.add(TokenRecord.of(inputs, outputs, proximal_is_learner=config.algorithm.proximal == "recompute"))
    return total


def _proximal_of(
    row: Row, logprobs: torch.Tensor, proximal: dict[int, torch.Tensor] | None, algorithm: AlgorithmConfig
) -> torch.Tensor:
    """Return the proximal policy's log-probabilities; with a single update they are the current ones."""
    if algorithm.proximal == "behaviour":
        return row.behaviour_logprobs.to(logprobs)
    return logprobs.detach() if proximal is None else proximal[id(row)]


@torch.no_grad()
def _proximal_logprobs(model: PreTrainedModel, rows: list[Row], batch: StepBatch, config: RunConfig) -> dict[int, torch.Tensor]:
    if config.algorithm.proximal == "behaviour":
        return {}
    chunk_tokens = config.learner.logprob_chunk_tokens
    return {id(row): row_logprobs(model, row, temperature=batch.temperature, chunk_tokens=chunk_tokens)[0] for row in rows}


def _split_updates(rows: list[Row], minibatches: int) -> list[list[Row]]:
    """Return at most `minibatches` runs of rows of about equal size; none is empty."""
    bounds = np.linspace(0, len(rows), min(minibatches, len(rows)) + 1).astype(int)
    return [rows[start:end] for start, end in itertools.pairwise(bounds)]


def _advantages(batch: StepBatch, algorithm: AlgorithmConfig) -> FloatArray:
    rewards = np.array([sample.reward for sample in batch.samples], dtype=np.float64)
    group_ids = np.array([sample.group_id for sample in batch.samples])
    inputs = AdvantageInputs(rewards, group_ids, np.ones((len(rewards), 1), dtype=bool))
    return ADVANTAGES[algorithm.advantage](inputs, AdvantageConfig.of(algorithm)).advantages[:, 0]


def _checked(prepared: PreparedBatch, device: torch.device) -> tuple[StepBatch, list[Row]]:
    batch = prepared.batch
    targets = sum(row.num_targets for row in prepared.rows)
    if targets == 0:
        raise LearnerError(f"step {batch.step} has nothing to train: no token of its {len(batch.samples)} samples is unmasked")
    if targets != batch.num_trained_tokens:
        raise LearnerError(f"step {batch.step} promises {batch.num_trained_tokens} trained tokens and its rows hold {targets}")
    return batch, [row.to(device) for row in prepared.rows]


def _describe_failure(batch: StepBatch, loss: float, norm: float, failed_folder: Path | None) -> str:
    what = f"step {batch.step}: loss {loss}, gradient norm {norm}; the weights were not changed"
    if failed_folder is None:
        return what
    failed_folder.mkdir(parents=True, exist_ok=True)
    path = failed_folder / f"step-{batch.step}.msgpack"
    path.write_bytes(msgspec.msgpack.encode(batch))
    return f"{what}; the batch is in {path} (msgspec.msgpack, StepBatch); try a lower learning rate"
