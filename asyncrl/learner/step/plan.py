"""Plans one step (which algorithm, which rows) and runs the forward-only passes that must come before its first update.

The value head and the proximal log-probabilities share one forward of the policy.

Invariant: a plan depends only on batch, config and memory, so every rank makes the same plan.

Legend: M targets of a row.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from asyncrl.algorithms.auto import Choice, applied, choose
from asyncrl.algorithms.diagnostics import batch_staleness
from asyncrl.algorithms.types import LossConfig
from asyncrl.config.algorithm import READS_CURRENT_POLICY, AlgorithmConfig, CorrectionConfig, sees_whole_update
from asyncrl.config.learner import LearnerConfig
from asyncrl.config.run import RunConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.checkpoint_folder import StepMemory
from asyncrl.learner.model.policy import RowOutputs, row_hidden, run_row
from asyncrl.learner.step.microbatch import PreparedBatch, Row
from asyncrl.learner.train_state import TrainState
from asyncrl.schema.samples import StepBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The algorithm, rows and settings of one step."""

    prepared: PreparedBatch
    """On the model's device."""
    batch: StepBatch
    rows: tuple[Row, ...]
    """This rank's rows, update by update, fillers included."""
    algorithm: AlgorithmConfig
    """The algorithm in use; with `kind = "auto"`, the one that it chose for this step."""
    learner: LearnerConfig
    choice: Choice | None
    kl_coefficient: float
    """The coefficient in use; 0 if there is no KL penalty."""
    loss_config: LossConfig
    num_updates: int
    """How often the optimizer is called."""
    trains_policy: bool
    """False while the critic is trained alone (`critic.warmup_steps`)."""
    has_token_kl: bool
    """Whether the KL penalty is taken from token rewards."""
    plans_corrections: bool
    """Whether corrections are computed for a whole update before its first row."""
    planned_corrections: tuple[CorrectionConfig, ...]
    """The corrections that are computed for a whole update."""
    corrections_of_rows: tuple[CorrectionConfig, ...]
    """The other corrections, which each row computes from the current policy."""
    wants_log_ratios: bool
    """Whether the advantage reads proximal / behaviour."""
    needs_proximal: bool
    """Whether the policy runs over the rows before the first update. If not, its first forward gives the same values."""
    needs_reference: bool
    kept_samples: int
    """How many samples are recorded token by token (`observe.samples`); 0: none."""


def make_plan(prepared: PreparedBatch, config: RunConfig, memory: StepMemory) -> StepPlan:
    """Return the plan of a step.

    Args:
        prepared: The batch, on the model's device.
        config: `algorithm`, `learner` and `observe` are read.
        memory: What is remembered from the steps before.
    """
    algorithm, learner, batch, choice = config.algorithm, config.learner, prepared.batch, None
    if algorithm.kind == "auto":
        choice = choose(memory.measured | batch_staleness(batch), memory.recipe)
        algorithm = applied(algorithm, choice.recipe)
    kl, critic, kl_coefficient = algorithm.kl, algorithm.critic, 0.0
    if kl is not None:
        is_adapted = kl.target is not None and memory.kl_coefficient >= 0
        kl_coefficient = memory.kl_coefficient if is_adapted else kl.coefficient
    num_updates = len(prepared.updates) * learner.epochs
    trains_policy = critic is None or batch.step >= critic.warmup_steps
    has_token_kl = kl is not None and kl.where == "reward"
    must_see_all = algorithm.denominator == "kept" or any(map(sees_whole_update, algorithm.corrections))
    plans_corrections = trains_policy and must_see_all
    # With `kept`, what is dropped must be counted before the first row.
    reads_current = () if algorithm.denominator == "kept" else READS_CURRENT_POLICY
    wants_log_ratios = algorithm.advantage == "vtrace" or (":" in algorithm.advantage and critic is not None)
    recomputes = num_updates > 1 and trains_policy and algorithm.proximal == "recompute"
    return StepPlan(
        prepared=prepared,
        batch=batch,
        rows=prepared.rows,
        algorithm=algorithm,
        learner=learner,
        choice=choice,
        kl_coefficient=kl_coefficient,
        loss_config=LossConfig.of(algorithm, kl_coefficient),
        num_updates=num_updates,
        trains_policy=trains_policy,
        has_token_kl=has_token_kl,
        plans_corrections=plans_corrections,
        planned_corrections=tuple(item for item in algorithm.corrections if not isinstance(item, reads_current)),
        corrections_of_rows=tuple(item for item in algorithm.corrections if isinstance(item, reads_current)),
        wants_log_ratios=wants_log_ratios,
        needs_proximal=algorithm.kind != "dpo" and (recomputes or has_token_kl or wants_log_ratios or plans_corrections),
        needs_reference=algorithm.needs_reference and (trains_policy or has_token_kl),
        kept_samples=config.observe.samples,
    )


RowValues = list[torch.Tensor]
"""[M] for each of the plan's rows."""


@dataclass(slots=True)
class Passes:
    """Results of the forward-only passes; empty where nothing needs them."""

    proximal: RowValues = field(default_factory=list)
    """Log-probabilities of the learner before the step."""
    values: RowValues = field(default_factory=list)
    """Values of the critic before the step."""
    reference: RowValues = field(default_factory=list)
    timings_s: dict[str, float] = field(default_factory=dict)
    """By metric name."""


@torch.no_grad()
def run_passes(state: TrainState, plan: StepPlan) -> Passes:
    """Run the forward-only passes that the plan needs.

    Raises:
        LearnerError: The plan needs reference log-probabilities, and neither the state nor the batch has them.
    """
    passes, critic = Passes(), state.critic
    is_head = critic is not None and critic.body is None
    if plan.needs_reference:
        started_s = time.perf_counter()
        if state.reference is None and all(row.reference_logprobs for row in plan.batch.rows):
            passes.reference = [row.reference_logprobs for row in plan.rows if row.reference_logprobs is not None]
        elif state.reference is None:
            raise LearnerError(
                f"step {plan.batch.step} needs log-probabilities of the reference: give the learner a reference "
                "(TrainState.reference), or set algorithm.reference.where = 'worker', so that batches bring them"
            )
        else:
            state.bring("inference")
            passes.reference = [state.reference.logprobs(row, plan.batch.temperature) for row in plan.rows]
        state.bring("train")
        passes.timings_s["time/reference_s"] = time.perf_counter() - started_s
    else:
        state.bring("train")  # a reference that this step does not read may be on the device
    if plan.needs_proximal or is_head:
        started_s = time.perf_counter()
        for row in plan.rows:
            if plan.needs_proximal:
                outputs = run_policy(state, plan, row)
                passes.proximal.append(outputs.logprobs)
            if critic is not None and is_head:
                hidden = outputs.hidden if plan.needs_proximal else row_hidden(state.model.base_model, row)
                passes.values.append(critic(hidden))
        passes.timings_s["time/proximal_s"] = time.perf_counter() - started_s
    if critic is not None and not is_head:
        started_s = time.perf_counter()
        passes.values = [critic(row) for row in plan.rows]
        passes.timings_s["time/values_s"] = time.perf_counter() - started_s
    return passes


def run_policy(state: TrainState, plan: StepPlan, row: Row, *, entropy_gradient: bool = False) -> RowOutputs:
    """Run the policy over a row with the plan's settings; see `run_row`."""
    return run_row(
        state.model,
        row,
        temperature=plan.batch.temperature,
        chunk_tokens=plan.learner.logprob_chunk_tokens,
        entropy_gradient=entropy_gradient,
        fused=plan.learner.logprobs == "fused",
    )
