"""What each row is trained towards: advantages, returns and corrections, made over the whole step and dealt out to its rows.

The maths is that of asyncrl/algorithms on the step's tables; here is only which numbers go in and where they come out. Called
by learner/policy_objective.py.

Legend: S samples of the step, T the most response tokens of one of them, M targets of a row.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.algorithms.advantage_types import AdvantageConfig, AdvantageInputs, AdvantageOutputs, FloatArray
from asyncrl.algorithms.advantages import load_advantage
from asyncrl.algorithms.kl import kl_for_rewards
from asyncrl.algorithms.returns import rewards_on_last_tokens
from asyncrl.algorithms.types import CorrectionOutputs, Denominators
from asyncrl.algorithms.values import explained_variance
from asyncrl.errors import LearnerError
from asyncrl.learner.passes import Passes, RowValues
from asyncrl.learner.plan import StepPlan
from asyncrl.learner.planned_corrections import CorrectionTables, plan_corrections
from asyncrl.learner.ranks import Ranks
from asyncrl.learner.rows import Row

load_advantage_once = functools.cache(load_advantage)
"""A user's file runs once, not at each step."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A row and what is known of its targets, [M] each; None where nothing asks."""

    row: Row
    advantages: torch.Tensor
    proximal: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    values: torch.Tensor | None = None
    """Of the critic before the step."""
    returns: torch.Tensor | None = None
    corrections: CorrectionOutputs | None = None
    """Those of its update, where they had to be worked out for the whole of it."""


@dataclass(frozen=True, slots=True)
class Update:
    """What one call of the optimizer is about, on this rank."""

    micro_batches: tuple[MicroBatch, ...]
    denominators: Denominators
    """Of the policy loss, over all ranks; of kept tokens where `algorithm.denominator` is `kept`."""
    value_denominators: Denominators
    """Of the value loss, over all ranks: it is taken at every trained token, whatever corrections drop."""


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
    """Work out advantages over all ranks' samples, and hand every row its part.

    Raises:
        LearnerError: The advantage gives no returns and there is a critic to train.
    """
    inputs, metrics = _advantage_inputs(plan, passes, ranks)
    outputs = load_advantage_once(plan.algorithm.advantage)(inputs, AdvantageConfig.of(plan.algorithm))
    if passes.values is not None:
        metrics |= _critic_metrics(plan, inputs, outputs)
    planned = plan_corrections(plan, passes, outputs.advantages, ranks) if plan.plans_corrections else None
    places = itertools.count()
    updates = []
    for number, rows in enumerate(plan.prepared.updates):
        trained = _count(plan, number)
        corrections, denominators = (None, trained) if planned is None else planned[number]
        dealt = tuple(_deal(plan, passes, outputs, corrections, row, next(places)) for row in rows)
        updates.append(Update(dealt, denominators, value_denominators=trained))
    return Signals(tuple(updates), outputs.advantages, metrics)


def _advantage_inputs(plan: StepPlan, passes: Passes, ranks: Ranks) -> tuple[AdvantageInputs, dict[str, float]]:
    samples, table = plan.batch.samples, plan.prepared.table
    rewards = np.array([sample.reward for sample in samples], dtype=np.float64)
    group_ids = np.array([sample.group_id for sample in samples], dtype=np.int64)
    token_rewards: FloatArray | None = None
    metrics: dict[str, float] = {}
    if plan.has_token_kl:
        token_rewards, metrics = _token_rewards(plan, passes, rewards, ranks)
    inputs = AdvantageInputs(
        rewards=rewards,
        group_ids=group_ids,
        mask=table.mask,
        token_rewards=token_rewards,
        values=None if passes.values is None else table.collect(plan.rows, passes.values, ranks),
        log_ratios=_log_ratios(plan, passes, ranks) if plan.wants_log_ratios else None,
        greedy_rewards=_greedy_rewards(plan, rewards, group_ids) if plan.algorithm.has_greedy_baseline else None,
    )
    return inputs, metrics


def _token_rewards(plan: StepPlan, passes: Passes, rewards: FloatArray, ranks: Ranks) -> tuple[FloatArray, dict[str, float]]:
    """Return [S, T], each sample's reward on its last trained token, less the KL penalty of every token."""
    kl_config = plan.algorithm.kl
    assert kl_config is not None
    assert passes.proximal is not None
    assert passes.reference is not None
    table = plan.prepared.table
    proximal, reference = (table.collect(plan.rows, values, ranks) for values in (passes.proximal, passes.reference))
    mask = torch.from_numpy(table.mask)
    kl = kl_for_rewards(torch.from_numpy(proximal), torch.from_numpy(reference), mask, kl_config).numpy()
    token_rewards = rewards_on_last_tokens(rewards, table.mask) - plan.kl_coefficient * kl
    return token_rewards, {"kl/penalty_mean": float(kl[table.mask].mean())}


def _log_ratios(plan: StepPlan, passes: Passes, ranks: Ranks) -> FloatArray:
    assert passes.proximal is not None
    pairs = zip(passes.proximal, plan.rows, strict=True)
    return plan.prepared.table.collect(plan.rows, [own - row.behaviour_logprobs.to(own) for own, row in pairs], ranks)


def _greedy_rewards(plan: StepPlan, rewards: FloatArray, group_ids: NDArray[np.int64]) -> FloatArray:
    """Return [S], the reward of each group's greedy sample; the mean of the group where that sample failed."""
    is_greedy = np.array([sample.is_greedy for sample in plan.batch.samples])
    baselines = np.empty_like(rewards)
    for group_id in np.unique(group_ids):
        members = group_ids == group_id
        greedy = members & is_greedy
        baselines[members] = rewards[greedy if greedy.any() else members].mean()
    return baselines


def _critic_metrics(plan: StepPlan, inputs: AdvantageInputs, outputs: AdvantageOutputs) -> dict[str, float]:
    if outputs.returns is None or inputs.values is None:
        raise LearnerError(f"algorithm.advantage = {plan.algorithm.advantage!r} gives no returns to train the critic towards")
    mask = torch.from_numpy(inputs.mask)
    explained = explained_variance(torch.from_numpy(inputs.values), torch.from_numpy(outputs.returns), mask)
    return {
        "value/explained_var": explained,
        "value/mean": float(inputs.values[inputs.mask].mean()),
        "value/returns_mean": float(outputs.returns[inputs.mask].mean()),
    }


def _count(plan: StepPlan, number: int) -> Denominators:
    """Return what an update trains, over all ranks."""
    lines = plan.prepared.update_of_sample == number
    num_tokens = int(plan.prepared.table.mask[lines].sum())
    return Denominators(num_tokens, int(lines.sum()), plan.algorithm.aggregation_constant)


def _deal(
    plan: StepPlan, passes: Passes, outputs: AdvantageOutputs, corrections: CorrectionTables | None, row: Row, place: int
) -> MicroBatch:
    """Return the micro-batch of a row; `place` is its number among the plan's."""
    of_row = plan.prepared.table.of_row

    def known(values: RowValues | None) -> torch.Tensor | None:
        return None if values is None else values[place]

    return MicroBatch(
        row=row,
        advantages=of_row(outputs.advantages, row),
        proximal=known(passes.proximal),
        reference=known(passes.reference),
        values=known(passes.values),
        returns=None if outputs.returns is None else of_row(outputs.returns, row),
        corrections=None if corrections is None else corrections.of_row(row),
    )
