"""What a step of reinforcement learning minimises: the policy loss, and the value loss beside it.

First `build_signals` works over the whole step: advantages over the samples of all ranks, returns, and those corrections that
must see every token of an update. Each row then gets its part as a `MicroBatch`. `PolicyObjective.train_row` takes one row:
forward, loss, backward. The maths is that of asyncrl/algorithms; here is which numbers go in and where they come out.

Corrections that see a whole update are computed once, from the policy before the step's first update: ratios of proximal and
behaviour do not change with the updates, and m2po_clip is defined on the ratios as they are then. What reads the current policy
and needs no more than its row (opsm) is left to the row, unless `denominator = "kept"` must count it beforehand.

While the critic is trained alone the policy has no gradient, so its optimizer has nothing to do.

Legend: S samples of the step, T the most response tokens of one of them, N trained tokens of an update, M targets of a row.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.algorithms.advantage_types import AdvantageConfig, AdvantageInputs, AdvantageOutputs, FloatArray
from asyncrl.algorithms.advantages import load_advantage
from asyncrl.algorithms.corrections import combined, correct
from asyncrl.algorithms.diagnostics import explained_variance
from asyncrl.algorithms.kl import interpolated_proximal, kl_for_rewards
from asyncrl.algorithms.loss_terms import count_denominators
from asyncrl.algorithms.losses import ValueInputs, load_loss, value_loss
from asyncrl.algorithms.returns import rewards_on_last_tokens
from asyncrl.algorithms.types import CorrectionOutputs, Denominators, LossInputs, LossOutputs
from asyncrl.errors import LearnerError
from asyncrl.learner.metrics import StepTokens
from asyncrl.learner.model.critic import ValueHead
from asyncrl.learner.model.policy import RowOutputs, row_hidden
from asyncrl.learner.ranks.group import Ranks
from asyncrl.learner.step.forward_passes import Passes, run_policy
from asyncrl.learner.step.microbatch import Row, TokenTable
from asyncrl.learner.step.plan import StepPlan
from asyncrl.learner.train_state import TrainState

load_advantage_once = functools.cache(load_advantage)
"""A user's file runs once, not at each step."""
load_loss_once = functools.cache(load_loss)
"""A user's file runs once, not at each row."""


class PolicyObjective:
    """One step's policy and value losses, row by row."""

    def __init__(self, state: TrainState, plan: StepPlan, passes: Passes) -> None:
        """Work out what every row is trained towards.

        Raises:
            LearnerError: The advantage does not go with the critic.
        """
        self._state = state
        self._plan = plan
        self._signals = build_signals(plan, passes, state.ranks)
        self._tokens = StepTokens(len(plan.rows), corrections=plan.algorithm.corrections, ranks=state.ranks)
        self._values_clipped: list[torch.Tensor] = []
        """[2] a row: value targets that the clip holds, and all."""

    @property
    def advantages(self) -> FloatArray:
        """[S], the mean advantage of each sample's trained tokens."""
        mask = self._plan.prepared.table.mask
        sums = np.where(mask, self._signals.advantages, 0.0).sum(axis=1)
        means: FloatArray = sums / np.maximum(mask.sum(axis=1), 1)
        return means

    def train_row(self, number: int, place: int, *, is_first_update: bool) -> torch.Tensor:
        """Add the gradients of one row.

        Args:
            number: Of the update within a pass over the batch.
            place: Of the row within the update.
            is_first_update: Whether the weights are still those from before the step.

        Returns:
            This rank's shares of policy and value loss, float64 [2].
        """
        state, plan, update = self._state, self._plan, self._signals.updates[number]
        micro, critic = update.micro_batches[place], state.critic
        row, loss, value, outputs = micro.row, None, None, None
        if plan.trains_policy:
            outputs = run_policy(state, plan, row, entropy_gradient=plan.algorithm.entropy_coefficient != 0.0)
            inputs, computed = policy_loss(plan, micro, update.denominators, outputs)
            recomputed = plan.algorithm.proximal == "recompute"
            self._tokens.add(inputs, computed, proximal_is_learner=recomputed, is_first_update=is_first_update)
            loss = computed.loss
        if isinstance(critic, ValueHead):
            # One backward pass for both: the head's gradient goes on into the policy.
            assert plan.algorithm.critic is not None
            assert state.critic_optimizer is not None
            with torch.set_grad_enabled(outputs is not None):
                hidden = row_hidden(state.model.base_model, row) if outputs is None else outputs.hidden
            value = self._value_loss(micro, update.value_denominators, critic(row, hidden))
            weighted = plan.algorithm.critic.coefficient * value
            if loss is None:
                state.critic_optimizer.backward(weighted)
            else:
                state.optimizer.backward(loss + weighted)
        else:
            if loss is not None:
                state.optimizer.backward(loss)
            if critic is not None:
                assert state.critic_optimizer is not None
                value = self._value_loss(micro, update.value_denominators, critic(row, None))
                state.critic_optimizer.backward(value)
        nothing = torch.zeros((), dtype=torch.float64, device=row.target_ids.device)
        return torch.stack([nothing if part is None else part.detach().double() for part in (loss, value)])

    def metrics(self) -> dict[str, float]:
        """Return the figures of tokens, critic and penalties; every rank calls."""
        figures = self._signals.metrics | self._tokens.metrics()
        if self._values_clipped:
            num_clipped, num_tokens = self._state.ranks.sum(torch.stack(self._values_clipped).sum(dim=0)).tolist()
            figures["value/clip_fraction"] = num_clipped / num_tokens
        return figures

    def _value_loss(self, micro: MicroBatch, denominators: Denominators, values: torch.Tensor) -> torch.Tensor:
        algorithm, row = self._plan.algorithm, micro.row
        assert algorithm.critic is not None
        assert micro.values is not None
        assert micro.returns is not None
        inputs = ValueInputs(
            values=values,
            old_values=micro.values.to(values),
            returns=micro.returns.to(values),
            mask=row.mask,
            sequence_ids=row.sequence_ids,
            num_sequences=row.num_sequences,
            denominators=denominators,
        )
        outputs = value_loss(inputs, clip=algorithm.critic.value_clip, aggregation=algorithm.aggregation)
        self._values_clipped.append(torch.stack([outputs.clipped.sum(), inputs.mask.sum()]))
        return outputs.loss


def policy_loss(
    plan: StepPlan, micro: MicroBatch, denominators: Denominators, outputs: RowOutputs
) -> tuple[LossInputs, LossOutputs]:
    """Return the loss of a row under the current policy, and what it was made from."""
    row, logprobs = micro.row, outputs.logprobs
    behaviour = row.behaviour_logprobs.to(logprobs)
    inputs = LossInputs(
        logprobs=logprobs,
        proximal_logprobs=_proximal(plan, logprobs.detach(), behaviour, row.versions, micro.proximal),
        behaviour_logprobs=behaviour,
        advantages=micro.advantages.to(logprobs),
        mask=row.mask,
        sequence_ids=row.sequence_ids,
        num_sequences=row.num_sequences,
        denominators=denominators,
        entropy=outputs.entropy,
        reference_logprobs=None if micro.reference is None else micro.reference.to(logprobs),
        versions=row.versions,
        learner_version=plan.batch.step,
    )
    if micro.corrections is not None:
        inputs = replace(inputs, corrections=combined(micro.corrections, correct(inputs, plan.corrections_of_rows)))
    return inputs, load_loss_once(plan.algorithm.loss)(inputs, plan.loss_config)


def _proximal(
    plan: StepPlan, current: torch.Tensor, behaviour: torch.Tensor, versions: torch.Tensor, before: torch.Tensor | None
) -> torch.Tensor:
    """Return the proximal policy's log-probabilities [M], as the config says; with a single update they are the current ones.

    `before` is the learner before the step, where a pass was made.
    """
    if plan.algorithm.proximal == "behaviour":
        return behaviour
    if plan.algorithm.proximal == "loglinear":
        everywhere = torch.ones_like(current, dtype=torch.bool)
        return interpolated_proximal(current, behaviour, versions, everywhere, current_version=plan.batch.step)
    return current if before is None or plan.num_updates == 1 else before.to(current)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A row and what is known of its targets, [M] each; None where nothing needs it."""

    row: Row
    advantages: torch.Tensor
    proximal: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    values: torch.Tensor | None = None
    """Of the critic before the step."""
    returns: torch.Tensor | None = None
    corrections: CorrectionOutputs | None = None
    """Those of its update, where they had to be computed for the whole of it."""


@dataclass(frozen=True, slots=True)
class Update:
    """What one call of the optimizer is about, on this rank."""

    micro_batches: tuple[MicroBatch, ...]
    denominators: Denominators
    """Of the policy loss, over all ranks; of kept tokens where `algorithm.denominator` is `kept`."""
    value_denominators: Denominators
    """Of the value loss, over all ranks: it is taken at every trained token, also where corrections drop the token."""


@dataclass(frozen=True, slots=True)
class Signals:
    """What the step is trained towards."""

    updates: tuple[Update, ...]
    """One pass over the batch."""
    advantages: FloatArray
    """[S, T]."""
    metrics: dict[str, float]
    """Of critic and token rewards, where there are such."""


def build_signals(plan: StepPlan, passes: Passes, ranks: Ranks) -> Signals:
    """Work out advantages over all ranks' samples, and give every row its part.

    Raises:
        LearnerError: The advantage gives no returns and there is a critic to train.
    """
    table = plan.prepared.table
    inputs, metrics = _advantage_inputs(plan, passes, ranks)
    outputs = load_advantage_once(plan.algorithm.advantage)(inputs, AdvantageConfig.of(plan.algorithm))
    if inputs.values is not None:
        metrics |= _critic_metrics(plan, inputs, inputs.values, outputs)
    planned = plan_corrections(plan, passes, outputs.advantages, ranks) if plan.plans_corrections else None
    places = itertools.count()
    updates = []
    for number, rows in enumerate(plan.prepared.updates):
        lines = plan.prepared.update_of_sample == number
        trained = Denominators(int(table.mask[lines].sum()), int(lines.sum()), plan.algorithm.aggregation_constant)
        corrections, denominators = (None, trained) if planned is None else planned[number]
        micro_batches = []
        for row in rows:
            place = next(places)
            micro_batches.append(
                MicroBatch(
                    row=row,
                    advantages=table.of_row(outputs.advantages, row),
                    proximal=passes.proximal[place] if passes.proximal else None,
                    reference=passes.reference[place] if passes.reference else None,
                    values=passes.values[place] if passes.values else None,
                    returns=None if outputs.returns is None else table.of_row(outputs.returns, row),
                    corrections=None if corrections is None else corrections.of_row(row),
                )
            )
        updates.append(Update(tuple(micro_batches), denominators, value_denominators=trained))
    return Signals(tuple(updates), outputs.advantages, metrics)


def _advantage_inputs(plan: StepPlan, passes: Passes, ranks: Ranks) -> tuple[AdvantageInputs, dict[str, float]]:
    samples, table, rows = plan.batch.samples, plan.prepared.table, plan.rows
    rewards = np.array([sample.reward for sample in samples], dtype=np.float64)
    group_ids = np.array([sample.group_id for sample in samples], dtype=np.int64)
    metrics: dict[str, float] = {}
    token_rewards = log_ratios = greedy_rewards = None
    if plan.has_token_kl:
        # Each sample's reward on its last trained token, less the KL penalty of every token.
        assert plan.algorithm.kl is not None
        assert passes.proximal is not None
        assert passes.reference is not None
        proximal, reference = (table.collect(rows, values, ranks) for values in (passes.proximal, passes.reference))
        mask = torch.from_numpy(table.mask)
        kl = kl_for_rewards(torch.from_numpy(proximal), torch.from_numpy(reference), mask, plan.algorithm.kl).numpy()
        token_rewards = rewards_on_last_tokens(rewards, table.mask) - plan.kl_coefficient * kl
        metrics["kl/penalty_mean"] = float(kl[table.mask].mean())
    values = None if passes.values is None else table.collect(rows, passes.values, ranks)
    if plan.wants_log_ratios:
        assert passes.proximal is not None
        pairs = zip(passes.proximal, rows, strict=True)
        log_ratios = table.collect(rows, [own - row.behaviour_logprobs.to(own) for own, row in pairs], ranks)
    if plan.algorithm.has_greedy_baseline:
        # The reward of each group's greedy sample; the mean of the group where that sample failed.
        is_greedy = np.array([sample.is_greedy for sample in samples])
        greedy_rewards = np.empty_like(rewards)
        for group_id in np.unique(group_ids):
            members = group_ids == group_id
            greedy = members & is_greedy
            greedy_rewards[members] = rewards[greedy if greedy.any() else members].mean()
    inputs = AdvantageInputs(rewards, group_ids, table.mask, token_rewards, values, log_ratios, greedy_rewards)
    return inputs, metrics


def _critic_metrics(plan: StepPlan, inputs: AdvantageInputs, values: FloatArray, outputs: AdvantageOutputs) -> dict[str, float]:
    if outputs.returns is None:
        raise LearnerError(f"algorithm.advantage = {plan.algorithm.advantage!r} gives no returns to train the critic towards")
    values, returns = values[inputs.mask], outputs.returns[inputs.mask]
    return {
        "value/explained_var": explained_variance(values, returns),
        "value/mean": float(values.mean()),
        "value/returns_mean": float(returns.mean()),
    }


@dataclass(frozen=True, slots=True)
class CorrectionTables:
    """`CorrectionOutputs` of an update's tokens, on whichever rank they are trained."""

    weights: FloatArray
    """[S, T]."""
    kept: NDArray[np.bool_]
    """[S, T]."""
    clip_low: float | None
    clip_high: float | None

    def of_row(self, row: Row) -> CorrectionOutputs:
        """Return the row's part, on its device."""
        device = row.target_ids.device
        weights = TokenTable.of_row(self.weights, row).to(device=device, dtype=row.behaviour_logprobs.dtype)
        kept = torch.from_numpy(self.kept[row.targets.samples, row.targets.offsets]).to(device)
        return CorrectionOutputs(weights, kept, self.clip_low, self.clip_high)


def plan_corrections(
    plan: StepPlan, passes: Passes, advantages: FloatArray, ranks: Ranks
) -> list[tuple[CorrectionTables, Denominators]]:
    """Return each update's corrections, and what its loss divides by.

    Args:
        plan: Of the step.
        passes: With the learner's log-probabilities before it.
        advantages: [S, T].
        ranks: All must call.
    """
    assert passes.proximal is not None
    table, rows, algorithm = plan.prepared.table, plan.rows, plan.algorithm
    current = table.collect(rows, passes.proximal, ranks)
    behaviour = table.collect(rows, [row.behaviour_logprobs for row in rows], ranks)
    versions = table.collect(rows, [row.versions for row in rows], ranks)
    planned = []
    for number in range(len(plan.prepared.updates)):
        mask = table.mask & (plan.prepared.update_of_sample == number)[:, None]
        samples, sequence_ids = np.unique(np.nonzero(mask)[0], return_inverse=True)
        current_N, behaviour_N, versions_N = (torch.from_numpy(values[mask]) for values in (current, behaviour, versions))
        inputs = LossInputs(
            logprobs=current_N,
            proximal_logprobs=_proximal(plan, current_N, behaviour_N, versions_N.long(), current_N),
            behaviour_logprobs=behaviour_N,
            advantages=torch.from_numpy(advantages[mask]),
            mask=torch.ones(len(sequence_ids), dtype=torch.bool),
            sequence_ids=torch.from_numpy(sequence_ids),
            num_sequences=len(samples),
            denominators=Denominators(len(sequence_ids), len(samples), algorithm.aggregation_constant),
            versions=versions_N.long(),
            learner_version=plan.batch.step,
        )
        outputs = correct(inputs, plan.planned_corrections)
        denominators = count_denominators(
            inputs.mask,
            outputs.kept,
            inputs.sequence_ids,
            inputs.num_sequences,
            constant=algorithm.aggregation_constant,
            denominator=algorithm.denominator,
        )
        weights, kept = np.zeros(mask.shape), np.zeros(mask.shape, dtype=np.bool_)
        weights[mask], kept[mask] = outputs.weights.numpy(), outputs.kept.numpy()
        planned.append((CorrectionTables(weights, kept, outputs.clip_low, outputs.clip_high), denominators))
    return planned
