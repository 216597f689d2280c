"""What a step of reinforcement learning minimises: the policy loss and the value loss.

Values over the whole step come first: advantages over the samples of all ranks, returns, and the
corrections that must see every token of an update, as tables (step/microbatch.py). `PolicyObjective.train_row` then processes one
row: forward, loss, backward. The maths is in asyncrl/algorithms; this file decides which numbers go into it and where results go.

Corrections that see a whole update are computed once, from the policy before the step's first update: ratios of proximal and
behaviour do not change with the updates, and m2po_clip is defined on the ratios at that time. A correction that reads the current
policy and needs only its row (opsm) is computed with the row, unless `denominator = "kept"` must count it beforehand.

While the critic is trained alone, the policy has no gradient, so its optimizer has nothing to do.

Legend: S samples of the step, T the most response tokens of one of them, N trained tokens of an update, M targets of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch

from asyncrl.algorithms.advantages import (
    AdvantageConfig,
    AdvantageInputs,
    AdvantageOutputs,
    load_advantage,
    rewards_on_last_tokens,
)
from asyncrl.algorithms.corrections import combined, correct
from asyncrl.algorithms.diagnostics import FloatArray, explained_variance
from asyncrl.algorithms.loss_terms import count_denominators, interpolated_proximal, kl_penalty
from asyncrl.algorithms.losses import Loss, ValueInputs, load_loss, value_loss
from asyncrl.algorithms.types import CorrectionOutputs, Denominators, LossInputs, LossOutputs
from asyncrl.errors import LearnerError
from asyncrl.learner.metrics import StepTokens
from asyncrl.learner.model.policy import RowOutputs, row_hidden
from asyncrl.learner.ranks.group import Ranks
from asyncrl.learner.step.microbatch import Row
from asyncrl.learner.step.plan import Passes, StepPlan, run_policy
from asyncrl.learner.train_state import TrainState


@dataclass(frozen=True, slots=True)
class Update:
    """The rows and denominators of one call of the optimizer."""

    first_row: int
    """Position of its first row among this rank's rows of the step."""
    trained: Denominators
    """Denominators of the value loss, over all ranks. They count every trained token, also those that corrections drop."""
    denominators: Denominators
    """Denominators of the policy loss; they count only kept tokens where `algorithm.denominator` is `kept`."""
    corrections: tuple[CorrectionOutputs, ...] = ()
    """[M] for each of its rows; empty unless they must be computed for the whole update."""


class PolicyObjective:
    """One step's policy and value losses, row by row."""

    def __init__(
        self,
        state: TrainState,
        plan: StepPlan,
        passes: Passes,
        loss: Loss | None = None,
        given: Mapping[tuple[int, int], float] | None = None,
    ) -> None:
        """Compute the advantages, returns and corrections that every row is trained with.

        Args:
            state: The policy to train, and what belongs to it.
            plan: The step's plan.
            passes: Results of the step's forward-only passes.
            loss: Replaces the algorithm's loss.
            given: Advantages by group id and member index, which replace the algorithm's.

        Raises:
            LearnerError: There is a critic to train, but the advantage gives no returns.
        """
        self._state, self._plan, self._passes = state, plan, passes
        inputs, self._figures = advantage_inputs(plan, passes, state.ranks)
        self._loss = load_loss(plan.algorithm.loss) if loss is None else loss
        if given is None:
            outputs = load_advantage(plan.algorithm.advantage)(inputs, AdvantageConfig.of(plan.algorithm))
        else:
            advantages = np.array([given[sample.group_id, sample.index] for sample in plan.batch.samples])
            outputs = AdvantageOutputs(np.where(inputs.mask, advantages[:, None], 0.0))
        self._advantages = outputs.advantages
        # A copy to the device waits for its work, so none is made between a row's forward and its backward.
        self._advantages_of_rows = [row.part_of(outputs.advantages) for row in plan.rows]
        self._returns_of_rows = [] if outputs.returns is None else [row.part_of(outputs.returns) for row in plan.rows]
        if inputs.values is not None:
            if outputs.returns is None:
                raise LearnerError(
                    f"algorithm.advantage = {plan.algorithm.advantage!r} gives no returns to train the critic towards; use 'gae'"
                )
            values, returns = inputs.values[inputs.mask], outputs.returns[inputs.mask]
            self._figures["value/explained_var"] = explained_variance(values, returns)
            self._figures |= {"value/mean": float(values.mean()), "value/returns_mean": float(returns.mean())}
        self._updates = plan_updates(plan, passes, outputs.advantages, state.ranks)
        corrections, keeps_tokens = plan.algorithm.corrections, plan.kept_samples > 0
        self.tokens = StepTokens(len(plan.rows), state.ranks, corrections=corrections, keeps_tokens=keeps_tokens)
        self._values_clipped: list[torch.Tensor] = []
        """[2] per row: number of value targets where the clip is active, and of all value targets."""

    @property
    def advantages(self) -> FloatArray:
        """[S], the mean advantage of each sample's trained tokens."""
        mask = self._plan.prepared.mask
        means: FloatArray = np.where(mask, self._advantages, 0.0).sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
        return means

    def train_row(self, number: int, place: int, *, is_first_update: bool) -> torch.Tensor:
        """Add the gradients of one row.

        Args:
            number: The update's number within a pass over the batch.
            place: The row's position within the update.
            is_first_update: Whether the weights are still those from before the step.

        Returns:
            This rank's shares of policy and value loss, float64 [2].

        Raises:
            LearnerError: The KL coefficient is adaptive (`algorithm.kl.target`), but the loss returns no estimate of the KL.
        """
        state, plan, update, critic = self._state, self._plan, self._updates[number], self._state.critic
        place += update.first_row
        row, loss, value, outputs = plan.rows[place], None, None, None
        if plan.trains_policy:
            outputs = run_policy(state, plan, row, entropy_gradient=plan.algorithm.entropy_coefficient != 0.0)
            inputs, computed = self._policy_loss(row, place, update, outputs)
            is_learner = plan.algorithm.proximal == "recompute"
            self.tokens.add(inputs, computed, proximal_is_learner=is_learner, is_first_update=is_first_update, places=row.places)
            loss = computed.loss
        if critic is not None and critic.body is None:
            # One backward pass for both: the head's gradient goes on into the policy.
            assert plan.algorithm.critic is not None
            assert state.critic_optimizer is not None
            with torch.set_grad_enabled(outputs is not None):
                hidden = row_hidden(state.model.base_model, row) if outputs is None else outputs.hidden
            value = self._value_loss(row, place, update, critic(hidden))
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
                value = self._value_loss(row, place, update, critic(row))
                state.critic_optimizer.backward(value)
        nothing = torch.zeros((), dtype=torch.float64, device=row.target_ids.device)
        return torch.stack([nothing if part is None else part.detach().double() for part in (loss, value)])

    def metrics(self) -> dict[str, float]:
        """Return the metrics of tokens, critic and penalties; every rank must call this."""
        figures = self._figures | self.tokens.metrics()
        if self._values_clipped:
            num_clipped, num_tokens = self._state.ranks.sum(torch.stack(self._values_clipped).sum(dim=0)).tolist()
            figures["value/clip_fraction"] = num_clipped / num_tokens
        return figures

    def _policy_loss(self, row: Row, place: int, update: Update, outputs: RowOutputs) -> tuple[LossInputs, LossOutputs]:
        """Return the loss of a row under the current policy, and the inputs that it was computed from."""
        plan, passes, logprobs = self._plan, self._passes, outputs.logprobs
        behaviour = row.behaviour_logprobs.to(logprobs)
        before = passes.proximal[place] if passes.proximal else None
        inputs = LossInputs(
            logprobs=logprobs,
            proximal_logprobs=proximal_of(plan, logprobs.detach(), behaviour, row.versions, before),
            behaviour_logprobs=behaviour,
            advantages=self._advantages_of_rows[place].to(logprobs),
            mask=row.mask,
            sequence_ids=row.sequence_ids,
            num_sequences=row.num_sequences,
            denominators=update.denominators,
            entropy=outputs.entropy,
            reference_logprobs=passes.reference[place].to(logprobs) if passes.reference else None,
            versions=row.versions,
            learner_version=plan.batch.step,
        )
        if update.corrections:
            planned = update.corrections[place - update.first_row]
            inputs = replace(inputs, corrections=combined(planned, correct(inputs, plan.corrections_of_rows)))
        computed, kl = self._loss(inputs, plan.loss_config), plan.loss_config.kl
        if kl is not None and kl.target is not None and computed.reference_kl is None:
            raise LearnerError(
                "algorithm.kl.target adapts the coefficient to the loss's own estimate of the KL, and this loss gives none: "
                "return LossOutputs.reference_kl, as `finish` of asyncrl/algorithms/loss_terms.py does, or leave the target out"
            )
        return inputs, computed

    def _value_loss(self, row: Row, place: int, update: Update, values: torch.Tensor) -> torch.Tensor:
        algorithm = self._plan.algorithm
        assert algorithm.critic is not None
        inputs = ValueInputs(
            values=values,
            old_values=self._passes.values[place].to(values),
            returns=self._returns_of_rows[place].to(values),
            mask=row.mask,
            sequence_ids=row.sequence_ids,
            num_sequences=row.num_sequences,
            denominators=update.trained,
        )
        loss, clipped = value_loss(inputs, clip=algorithm.critic.value_clip, aggregation=algorithm.aggregation)
        self._values_clipped.append(torch.stack([clipped.sum(), row.mask.sum()]))
        return loss


def proximal_of(
    plan: StepPlan, current: torch.Tensor, behaviour: torch.Tensor, versions: torch.Tensor, before: torch.Tensor | None
) -> torch.Tensor:
    """Return the proximal policy's log-probabilities [M], as configured; with a single update they are the current policy's.

    `before` holds the learner's log-probabilities before the step, if a pass computed them.
    """
    if plan.algorithm.proximal == "behaviour":
        return behaviour
    if plan.algorithm.proximal == "loglinear":
        return interpolated_proximal(current, behaviour, versions, current_version=plan.batch.step)
    return current if before is None or plan.num_updates == 1 else before.to(current)


def advantage_inputs(plan: StepPlan, passes: Passes, ranks: Ranks) -> tuple[AdvantageInputs, dict[str, float]]:
    """Return the advantage's inputs, and the mean KL penalty if token rewards have one; every rank must call this."""
    prepared, samples = plan.prepared, plan.batch.samples
    rewards = np.array([sample.reward for sample in samples], dtype=np.float64)
    group_ids = np.array([sample.group_id for sample in samples], dtype=np.int64)
    figures: dict[str, float] = {}
    token_rewards = log_ratios = greedy_rewards = None
    if plan.has_token_kl:
        # Each sample's reward on its last trained token, less the KL penalty of every token.
        assert plan.algorithm.kl is not None
        proximal, reference = (
            torch.from_numpy(prepared.collect(values, ranks)) for values in (passes.proximal, passes.reference)
        )
        # InstructGPT (arXiv 2203.02155), equation 2; verl `apply_kl_penalty`. Of the value alone, whatever `gradient` says.
        estimator = msgspec.structs.replace(plan.algorithm.kl, gradient="own")
        kl = kl_penalty(proximal, proximal, reference, torch.from_numpy(prepared.mask), estimator).numpy()
        token_rewards = rewards_on_last_tokens(rewards, prepared.mask) - plan.kl_coefficient * kl
        figures["kl/penalty_mean"] = float(kl[prepared.mask].mean())
    values = prepared.collect(passes.values, ranks) if passes.values else None
    if plan.wants_log_ratios:
        pairs = zip(passes.proximal, plan.rows, strict=True)
        log_ratios = prepared.collect([own - row.behaviour_logprobs.to(own) for own, row in pairs], ranks)
    if plan.algorithm.has_greedy_baseline:
        # The reward of each group's greedy sample; the mean of the group where that sample failed.
        is_greedy = np.array([sample.is_greedy for sample in samples])
        greedy_rewards = np.empty_like(rewards)
        for group_id in np.unique(group_ids):
            members = group_ids == group_id
            greedy = members & is_greedy
            greedy_rewards[members] = rewards[greedy if greedy.any() else members].mean()
    return AdvantageInputs(rewards, group_ids, prepared.mask, token_rewards, values, log_ratios, greedy_rewards), figures


def plan_updates(plan: StepPlan, passes: Passes, advantages: FloatArray, ranks: Ranks) -> list[Update]:
    """Return the updates of one pass over the batch, with corrections that need a whole update; every rank must call this.

    Args:
        plan: The step's plan.
        passes: The passes; with the learner's log-probabilities before the step, if there are such corrections.
        advantages: [S, T].
        ranks: The learner's ranks.
    """
    prepared, algorithm, updates = plan.prepared, plan.algorithm, []
    first_rows = itertools.accumulate(map(len, prepared.updates), initial=0)
    tables: list[FloatArray] = []
    if plan.plans_corrections:
        of_rows = ([row.behaviour_logprobs for row in plan.rows], [row.versions for row in plan.rows])
        tables = [prepared.collect(values, ranks) for values in (passes.proximal, *of_rows)]
    for number, first_row in zip(range(len(prepared.updates)), first_rows, strict=False):
        mask = prepared.mask & (prepared.update_of_sample == number)[:, None]
        samples, sequence_ids = np.unique(np.nonzero(mask)[0], return_inverse=True)
        trained = Denominators(len(sequence_ids), len(samples), algorithm.aggregation_constant)
        if not tables:
            updates.append(Update(first_row, trained, trained))
            continue
        current_N, behaviour_N, versions_N = (torch.from_numpy(values[mask]) for values in tables)
        inputs = LossInputs(
            logprobs=current_N,
            proximal_logprobs=proximal_of(plan, current_N, behaviour_N, versions_N.long(), current_N),
            behaviour_logprobs=behaviour_N,
            advantages=torch.from_numpy(advantages[mask]),
            mask=torch.ones(len(sequence_ids), dtype=torch.bool),
            sequence_ids=torch.from_numpy(sequence_ids),
            num_sequences=len(samples),
            denominators=trained,
            versions=versions_N.long(),
            learner_version=plan.batch.step,
        )
        found = correct(inputs, plan.planned_corrections)
        counted = found.kept if algorithm.denominator == "kept" else inputs.mask
        denominators = count_denominators(counted, inputs.sequence_ids, len(samples), algorithm.aggregation_constant)
        weights, kept = torch.zeros(mask.shape, dtype=torch.float64), torch.zeros(mask.shape, dtype=torch.bool)
        weights[torch.from_numpy(mask)], kept[torch.from_numpy(mask)] = found.weights, found.kept
        parts = [
            replace(found, weights=row.part_of(weights.numpy()).to(row.behaviour_logprobs), kept=row.part_of(kept.numpy()))
            for row in prepared.updates[number]
        ]
        updates.append(Update(first_row, trained, denominators, tuple(parts)))
    return updates
