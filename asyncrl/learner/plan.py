"""What one step is going to do: by which algorithm, on which rows, and what must be known before its first update.

Invariant: a plan follows from batch, config and memory alone, so every rank makes the same one. Called by learner/step.py; read
by all that a step consists of.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from asyncrl.algorithms.auto import Choice, applied, choose
from asyncrl.algorithms.types import LossConfig
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.algorithm_rules import looks_at_whole_update
from asyncrl.config.corrections import READS_CURRENT_POLICY, CorrectionConfig
from asyncrl.config.learner import LearnerConfig
from asyncrl.config.run import RunConfig
from asyncrl.learner.rows import PreparedBatch, Row
from asyncrl.learner.trainee import StepMemory
from asyncrl.schema.batches import StepBatch


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step."""

    prepared: PreparedBatch
    """On the model's device."""
    algorithm: AlgorithmConfig
    """In force: what `auto` picked, where it picks."""
    learner: LearnerConfig
    kl_coefficient: float
    """In force; 0 where there is no penalty."""
    choice: Choice | None = None
    """What `auto` picked, and why."""

    @property
    def batch(self) -> StepBatch:
        """Return the batch."""
        return self.prepared.batch

    @property
    def rows(self) -> tuple[Row, ...]:
        """Return this rank's rows, update by update, fillers included."""
        return self.prepared.rows

    @property
    def num_updates(self) -> int:
        """Return how often the optimizer is called."""
        return len(self.prepared.updates) * self.learner.epochs

    @property
    def trains_policy(self) -> bool:
        """Return false while the critic is trained alone (`critic.warmup_steps`)."""
        critic = self.algorithm.critic
        return critic is None or self.batch.step >= critic.warmup_steps

    @property
    def has_token_kl(self) -> bool:
        """Return whether the KL penalty is taken from token rewards."""
        return self.algorithm.kl is not None and self.algorithm.kl.where == "reward"

    @property
    def plans_corrections(self) -> bool:
        """Return whether corrections are worked out for a whole update before its first row."""
        return self.trains_policy and looks_at_whole_update(self.algorithm)

    @property
    def corrections_of_rows(self) -> tuple[CorrectionConfig, ...]:
        """Return those of a planned step that each row still asks of the current policy; none where `kept` counts beforehand."""
        if self.algorithm.denominator == "kept":
            return ()
        return tuple(item for item in self.algorithm.corrections if isinstance(item, READS_CURRENT_POLICY))

    @property
    def planned_corrections(self) -> tuple[CorrectionConfig, ...]:
        """Return the others: what is worked out for a whole update."""
        return tuple(item for item in self.algorithm.corrections if item not in self.corrections_of_rows)

    @property
    def wants_log_ratios(self) -> bool:
        """Return whether the advantage reads proximal / behaviour."""
        return self.algorithm.advantage == "vtrace" or (":" in self.algorithm.advantage and self.algorithm.critic is not None)

    @property
    def needs_proximal(self) -> bool:
        """Return whether the policy runs over the rows before the first update: otherwise its first forward says the same."""
        several = self.num_updates > 1 and self.trains_policy and self.algorithm.proximal == "recompute"
        if self.algorithm.kind == "dpo":
            return False
        return several or self.has_token_kl or self.wants_log_ratios or self.plans_corrections

    @property
    def needs_reference(self) -> bool:
        """Return whether reference log-probabilities are read."""
        return self.algorithm.needs_reference and (self.trains_policy or self.has_token_kl)

    @property
    def batch_has_reference(self) -> bool:
        """Return whether every row, of every rank, brings reference log-probabilities."""
        return all(row.reference_logprobs for row in self.batch.rows)

    @property
    def loss_config(self) -> LossConfig:
        """Return what the loss is told."""
        return LossConfig.of(self.algorithm, self.kl_coefficient)


def make_plan(prepared: PreparedBatch, config: RunConfig, memory: StepMemory) -> StepPlan:
    """Return the plan of a step.

    Args:
        prepared: On the model's device.
        config: `algorithm` and `learner` are read.
        memory: Of the steps before.
    """
    algorithm, coefficient = config.algorithm, coefficient_in_force(config.algorithm, memory)
    if algorithm.kind != "auto":
        return StepPlan(prepared, algorithm, config.learner, coefficient)
    choice = choose(memory.measured | staleness_signals(prepared), memory.recipe)
    return StepPlan(prepared, applied(algorithm, choice.recipe), config.learner, coefficient, choice)


def rows_to_come(plan: StepPlan, updates_begun: int) -> int:
    """Return how many rows of the first pass over the batch follow from the update in hand on, it included; 0 after that pass."""
    return sum(len(rows) for rows in plan.prepared.updates[updates_begun - 1 :])


def staleness_signals(prepared: PreparedBatch) -> dict[str, float]:
    """Return mean and largest staleness of the samples to be trained, by metric name."""
    samples = prepared.batch.samples
    versions = [samples[index].oldest_version for index in np.flatnonzero(prepared.update_of_sample >= 0)]
    behind = [prepared.batch.step - version for version in versions if version >= 0]
    return {"staleness/mean": float(np.mean(behind)), "staleness/max": float(max(behind))} if behind else {}


def coefficient_in_force(algorithm: AlgorithmConfig, memory: StepMemory) -> float:
    """Return the KL coefficient: the adapted one, the config's, or 0 where there is no penalty."""
    if algorithm.kl is None:
        return 0.0
    return memory.kl_coefficient if algorithm.kl.target is not None and memory.kl_coefficient >= 0 else algorithm.kl.coefficient
