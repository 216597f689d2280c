"""One optimizer step: trains version k on exactly one batch, which gives version k + 1.

1. Forward-only passes with the weights before the step, if needed: proximal and reference log-probabilities, values. A step with
   one update and neither reference nor critic makes none.
2. Advantages, and corrections that see a whole update, over the samples of all ranks (step/objective.py;
   for preferences step/preference.py).
3. For each update: its rows one after the other (a row is a micro-batch), then gradient clipping, then the optimizer.

Each rank divides its sums by denominators over all ranks, and FSDP sums gradients over ranks (ranks/fsdp.py). So the division of
samples into rows and ranks changes nothing, and every rank sees the same loss and norm and makes the same decisions.

Invariants: the same weights, memory and batch give the same bits on a CPU; weights change only if loss and gradients are finite;
a parameter without a gradient in a step has no optimizer step either.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch

from asyncrl.algorithms.auto import RECIPE_NAMES, SIGNALS
from asyncrl.algorithms.diagnostics import batch_metrics
from asyncrl.algorithms.loss_terms import next_coefficient
from asyncrl.algorithms.losses import Loss
from asyncrl.config.run import RunConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.metrics import token_rows
from asyncrl.learner.optim.optimizer import skip_update
from asyncrl.learner.step.microbatch import Division, PreparedBatch, prepare
from asyncrl.learner.step.objective import PolicyObjective
from asyncrl.learner.step.plan import make_plan, run_passes
from asyncrl.learner.step.preference import PreferenceObjective
from asyncrl.learner.train_state import TrainState
from asyncrl.models.attention import use_packed_attention
from asyncrl.observe.samples import TokenRow
from asyncrl.schema.samples import StepBatch

Objective = PolicyObjective | PreferenceObjective
OUT_OF_MEMORY_ADVICE = (
    "lower packing.tokens_per_row, or set learner.gradient_checkpointing = true or a smaller learner.logprob_chunk_tokens"
)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step."""

    version: int
    """The new version."""
    num_tokens: int
    """Trained tokens of all ranks."""
    metrics: dict[str, float]
    timings_s: dict[str, float] = field(default_factory=dict, compare=False)
    """By metric name."""
    recipe_reason: str = ""
    """Why `kind = "auto"` changed its recipe; empty if it did not."""
    tokens: list[TokenRow] = field(default_factory=list, compare=False)
    """The learner's figures for each token of the samples that are recorded (`observe.samples`), without texts."""


def train_step(
    state: TrainState, batch: StepBatch | PreparedBatch, config: RunConfig, *, failed_folder: Path | None = None
) -> StepResult:
    """Train one batch. Every rank calls it with the same batch.

    Args:
        state: The policy at version `step` and what belongs to it; changed in place. The model is switched to packed attention
            if it uses another kind.
        batch: As received, or already decoded (`prepare` with `division_of(state, config)`).
        config: `algorithm`, `learner` and `observe` are read.
        failed_folder: Where the batch is saved if loss or gradient is not finite; None: nowhere.

    Returns:
        The new version and the step's metrics, named as in observe/metrics.py.

    Raises:
        LearnerError: Nothing to train, something needed is missing, the device is out of memory, or a loss or gradient is not
            finite (the weights are those before the update).
    """
    step = OpenStep(state, batch, config, failed_folder=failed_folder)
    for _ in range(config.learner.epochs):
        for number in range(len(step.plan.prepared.updates)):
            step.backward(number)
            step.update()
    return step.result()


class OpenStep:
    """A step in progress: its passes are done; each of its updates is a `backward`, then an `update`.

    Args:
        state: As in `train_step`.
        batch: As in `train_step`.
        config: As in `train_step`.
        failed_folder: As in `train_step`.
        loss: Replaces the config's loss.
        advantages: By group id and member index; they replace those of the config's advantage.
    """

    def __init__(
        self,
        state: TrainState,
        batch: StepBatch | PreparedBatch,
        config: RunConfig,
        *,
        failed_folder: Path | None = None,
        loss: Loss | None = None,
        advantages: Mapping[tuple[int, int], float] | None = None,
    ) -> None:
        """Run the forward-only passes.

        Raises:
            LearnerError: As in `train_step`; or a loss or advantages are given although preference pairs are trained.
        """
        self._state, self._failed_folder = state, failed_folder
        division = division_of(state, config)
        prepared = batch if isinstance(batch, PreparedBatch) else prepare(batch, division)
        whole = prepared.batch
        if prepared.division != division:
            raise LearnerError(f"step {whole.step} was prepared for {prepared.division}; the run divides by {division}")
        if not prepared.mask.any():
            raise LearnerError(
                f"step {whole.step} has nothing to train: no token of its {len(whole.samples)} samples is unmasked"
            )
        use_packed_attention(state.model)
        updates = tuple(tuple(row.to(state.model.device) for row in update) for update in prepared.updates)
        self.plan = make_plan(replace(prepared, updates=updates), config, state.memory)
        self._updates: list[dict[str, float]] = []
        self._shares = torch.zeros(2, dtype=torch.float64)
        """This rank's shares of policy and value loss in the last `backward`."""
        self._update_s = 0.0
        with self._out_of_memory_is_said():
            self._passes = run_passes(state, self.plan)
            self._objective: Objective
            if self.plan.algorithm.kind != "dpo":
                self._objective = PolicyObjective(state, self.plan, self._passes, loss, advantages)
            elif loss is not None or advantages is not None:
                raise LearnerError('algorithm.kind = "dpo" trains pairs: it takes neither a loss nor advantages')
            else:
                self._objective = PreferenceObjective(state, self.plan, self._passes)

    def backward(self, number: int) -> None:
        """Accumulate the gradients of an update."""
        started_s = time.perf_counter()
        offload, places = self._state.offload, range(len(self.plan.prepared.updates[number]))
        with self._out_of_memory_is_said(), contextlib.nullcontext() if offload is None else offload.watch():
            shares = [self._objective.train_row(number, place, is_first_update=not self._updates) for place in places]
        self._shares = torch.stack(shares).sum(dim=0)
        self._update_s += time.perf_counter() - started_s

    @property
    def loss(self) -> float:
        """Return the policy loss of the last `backward`, over all ranks."""
        return float(self._state.ranks.sum(self._shares.clone())[0])

    def update(self) -> None:
        """Apply the gradients of `backward` to the weights: to all of them, or to none if a loss or gradient is not finite.

        If float16 gradients overflowed, no weights change, the loss scale is halved and the reported learning rate is 0. The same
        weights and rate are left by gradients that are all 0, as where the corrections drop every token.

        Raises:
            LearnerError: A loss or gradient is not finite: gradients are dropped and the batch is saved. Or the device is out of
                memory.
        """
        started_s, state, plan = time.perf_counter(), self._state, self.plan
        with self._out_of_memory_is_said():
            loss, value_loss = state.ranks.sum(self._shares).tolist()
            policy = state.optimizer if plan.trains_policy else None
            norms = {own: own.clip() for own in (policy, state.critic_optimizer) if own is not None}
            norm, value_norm = (0.0 if own is None else norms[own] for own in (policy, state.critic_optimizer))
            is_finite = all(map(math.isfinite, norms.values()))
            if not math.isfinite(loss + value_loss) or not (is_finite or skip_update(list(norms.items()))):
                self.abandon()
                figures = [f"loss {loss}, gradient norm {norm}"] if plan.trains_policy else []
                if state.critic is not None:
                    figures.append(f"value loss {value_loss}, its gradient norm {value_norm}")
                message = f"step {plan.batch.step}: {', '.join(figures)}; the weights were not changed"
                if self._failed_folder is not None:
                    self._failed_folder.mkdir(parents=True, exist_ok=True)
                    path = self._failed_folder / f"step-{plan.batch.step}.msgpack"
                    path.write_bytes(msgspec.msgpack.encode(plan.batch))
                    message += f"; the batch is in {path} (msgspec.msgpack, StepBatch); try a lower learning rate"
                raise LearnerError(message)
            state.bring("train")
            critic, rates = plan.algorithm.critic, [0.0]
            if is_finite:
                first_step = 0 if critic is None else critic.warmup_steps  # of the policy; the critic's is the run's
                rates = [own.step(plan.batch.step, first_step if own is policy else 0) for own in norms]
        told: dict[str, float] = {}
        if plan.trains_policy:
            told = {"policy/loss": loss, "policy/grad_norm": norm, "policy/learning_rate": rates[0]}
            told["policy/relative_update"] = state.optimizer.relative_update if is_finite else 0.0
        if plan.learner.dtype == "float16":
            told["policy/skipped_updates"] = float(not is_finite)
        if state.critic is not None:
            told |= {"value/loss": value_loss, "value/grad_norm": value_norm}
        self._updates.append(told)
        self._update_s += time.perf_counter() - started_s

    def gradient(self) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the policy's gradient summed over all updates, unclipped (float64, [trained parameters]), and its metrics.

        Nothing is trained, and the gradients are discarded afterwards.
        """
        for number in range(len(self.plan.prepared.updates)):
            self.backward(number)
        gradient = torch.cat([part.flatten() for part in self._state.optimizer.gradients()])
        self.abandon()
        return gradient, self._objective.metrics()

    def abandon(self) -> None:
        """Discard the gradients that `backward` has accumulated."""
        for own in (self._state.optimizer, self._state.critic_optimizer):
            if own is not None:
                own.zero_grad()

    def result(self) -> StepResult:
        """Return the step's result, once all its updates are done, and set what is remembered for the next step."""
        state, plan, updates, reason = self._state, self.plan, self._updates, ""
        advantages = self._objective.advantages if isinstance(self._objective, PolicyObjective) else None
        metrics = batch_metrics(plan.batch, advantages) | self._objective.metrics() | {"policy/updates": float(len(updates))}
        metrics |= {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
        if plan.trains_policy:
            metrics["policy/learning_rate"] = updates[-1]["policy/learning_rate"]
        if plan.learner.dtype == "float16":
            metrics["policy/skipped_updates"] *= len(updates)
            metrics["policy/updates"] -= metrics["policy/skipped_updates"]
        if plan.algorithm.kl is not None:
            metrics["kl/coefficient"] = plan.kl_coefficient
        if plan.choice is not None:
            metrics["policy/recipe"] = float(RECIPE_NAMES.index(plan.choice.recipe))
            reason = plan.choice.reason if plan.choice.recipe != state.memory.recipe else ""
            state.memory.recipe = plan.choice.recipe
            state.memory.measured = {name: metrics[name] for name in SIGNALS if name in metrics} or state.memory.measured
        kl = plan.algorithm.kl
        if kl is not None and kl.target is not None and plan.trains_policy:
            state.memory.kl_coefficient = next_coefficient(
                plan.kl_coefficient,
                measured_kl=metrics["kl/penalty_mean"],
                target=kl.target,
                horizon=kl.horizon,
                num_samples=len(plan.batch.samples),
            )
        timings_s = self._passes.timings_s | {"time/update_s": self._update_s}
        tokens = token_rows(plan.batch, self._objective.tokens.first, plan.kept_samples)
        return StepResult(plan.batch.step + 1, plan.batch.num_trained_tokens, metrics, timings_s, reason, tokens)

    @contextlib.contextmanager
    def _out_of_memory_is_said(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            held = "all the learner has" if self._state.offload is None else self._state.offload.describe()
            raise LearnerError(
                f"step {self.plan.batch.step} is out of device memory: {error}; on the device: {held}; {OUT_OF_MEMORY_ADVICE}"
            ) from error


def division_of(state: TrainState, config: RunConfig) -> Division:
    """Return how a batch must be divided for this state."""
    return Division(config.learner.minibatches, state.ranks.rank, state.ranks.size)
