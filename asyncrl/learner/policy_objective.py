"""What a step of reinforcement learning minimises: the policy loss, the value loss beside it, and what both say of themselves.

While the critic is trained alone, the policy has no gradient, so its optimizer has nothing to do. Called by learner/step.py,
and row by row by learner/update.py.

Legend: S samples of the step.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncrl.algorithms.advantage_types import FloatArray
from asyncrl.algorithms.types import Denominators
from asyncrl.algorithms.values import ValueInputs, value_loss
from asyncrl.learner.critic import ValueHead
from asyncrl.learner.measure import StepTokens, TokenRecord
from asyncrl.learner.micro_batches import MicroBatch, build_signals
from asyncrl.learner.model import RowOutputs, row_hidden, run_row
from asyncrl.learner.passes import Passes
from asyncrl.learner.plan import StepPlan, rows_to_come
from asyncrl.learner.policy_loss import policy_loss, trained_mask
from asyncrl.learner.trainee import Trainee


class PolicyObjective:
    """One step's policy and value losses, row by row."""

    def __init__(self, trainee: Trainee, plan: StepPlan, passes: Passes) -> None:
        """Work out what every row is trained towards.

        Raises:
            LearnerError: The advantage does not go with the critic.
        """
        self._trainee = trainee
        self._plan = plan
        self._signals = build_signals(plan, passes, trainee.ranks)
        self._tokens = StepTokens(len(plan.rows), corrections=plan.algorithm.corrections, ranks=trainee.ranks)
        self._updates_begun = 0
        self._values_clipped: list[torch.Tensor] = []
        """[2] a row: value targets that the clip holds, and all."""
        self._rows_valued_before = 0
        """Of them, those before the update in hand."""

    @property
    def advantages(self) -> FloatArray:
        """Return [S], the mean advantage of each sample's trained tokens."""
        mask = self._plan.prepared.table.mask
        sums = np.where(mask, self._signals.advantages, 0.0).sum(axis=1)
        means: FloatArray = sums / np.maximum(mask.sum(axis=1), 1)
        return means

    def begin_update(self) -> None:
        """See `Objective`."""
        self._updates_begun += 1
        self._rows_valued_before = len(self._values_clipped)
        self._tokens.begin_update()

    def restart_update(self, plan: StepPlan, passes: Passes) -> None:
        """See `Objective`."""
        self._plan = plan
        self._signals = build_signals(plan, passes, self._trainee.ranks)
        del self._values_clipped[self._rows_valued_before :]
        self._tokens.restart_update(rows_to_come(plan, self._updates_begun))

    def train_row(self, update: int, place: int) -> torch.Tensor:
        """Add the gradients of row `place` of an update; return this rank's shares of policy and value loss, [2]."""
        signals = self._signals.updates[update]
        micro, of_values = signals.micro_batches[place], signals.value_denominators
        loss, outputs = self._policy_loss(micro, signals.denominators)
        if isinstance(self._trainee.critic, ValueHead):
            value = self._head_loss(micro, of_values, outputs)
            self._backward_together(loss, value)
            return _shares(loss, value)
        if loss is not None:
            self._trainee.optimizer.backward(loss)
        return _shares(loss, self._train_critic(micro, of_values))

    def metrics(self) -> dict[str, float]:
        """Return what tokens, critic and penalties say; every rank calls."""
        figures = self._signals.metrics | self._tokens.metrics()
        if self._values_clipped:
            num_clipped, num_tokens = self._trainee.ranks.sum(torch.stack(self._values_clipped).sum(dim=0)).tolist()
            figures["value/clip_fraction"] = num_clipped / num_tokens
        return figures

    def _policy_loss(self, micro: MicroBatch, denominators: Denominators) -> tuple[torch.Tensor | None, RowOutputs | None]:
        plan = self._plan
        if not plan.trains_policy:
            return None, None
        outputs = run_row(
            self._trainee.model,
            micro.row,
            temperature=plan.batch.temperature,
            chunk_tokens=plan.learner.logprob_chunk_tokens,
            entropy_gradient=plan.algorithm.entropy_coefficient != 0.0,
            fused=plan.learner.logprobs == "fused",
        )
        inputs, judged = policy_loss(plan, micro, denominators, outputs)
        recomputed = plan.algorithm.proximal == "recompute"
        self._tokens.add(TokenRecord.of(inputs, judged, proximal_is_learner=recomputed, is_first_update=self._updates_begun == 1))
        return judged.loss, outputs

    def _head_loss(self, micro: MicroBatch, denominators: Denominators, outputs: RowOutputs | None) -> torch.Tensor:
        """Return the value loss of a head on the policy's forward, or on one without gradient where there was none."""
        if outputs is not None:
            return self._value_loss(micro, denominators, outputs.hidden)
        with torch.no_grad():
            hidden = row_hidden(self._trainee.model.base_model, micro.row)
        return self._value_loss(micro, denominators, hidden)

    def _backward_together(self, loss: torch.Tensor | None, value: torch.Tensor) -> None:
        critic, own = self._plan.algorithm.critic, self._trainee.critic_optimizer
        assert critic is not None
        assert own is not None
        if loss is None:
            own.backward(critic.coefficient * value)
        else:
            self._trainee.optimizer.backward(loss + critic.coefficient * value)

    def _train_critic(self, micro: MicroBatch, denominators: Denominators) -> torch.Tensor | None:
        """Add the gradients of a separate critic, where there is one; return its loss."""
        if self._trainee.critic is None:
            return None
        assert self._trainee.critic_optimizer is not None
        value = self._value_loss(micro, denominators, None)
        self._trainee.critic_optimizer.backward(value)
        return value

    def _value_loss(self, micro: MicroBatch, denominators: Denominators, hidden: torch.Tensor | None) -> torch.Tensor:
        algorithm, row = self._plan.algorithm, micro.row
        assert algorithm.critic is not None
        assert self._trainee.critic is not None
        assert micro.values is not None
        assert micro.returns is not None
        values: torch.Tensor = self._trainee.critic(row, hidden)
        inputs = ValueInputs(
            values=values,
            old_values=micro.values.to(values),
            returns=micro.returns.to(values),
            mask=trained_mask(row),
            sequence_ids=row.sequence_ids,
            num_sequences=row.num_sequences,
            denominators=denominators,
        )
        outputs = value_loss(inputs, clip=algorithm.critic.value_clip, aggregation=algorithm.aggregation)
        self._values_clipped.append(torch.stack([outputs.clipped.sum(), inputs.mask.sum()]))
        return outputs.loss


def _shares(loss: torch.Tensor | None, value: torch.Tensor | None) -> torch.Tensor:
    shares = [0.0 if part is None else part.detach().double() for part in (loss, value)]
    device = next((part.device for part in (loss, value) if part is not None), None)
    return torch.stack([torch.as_tensor(share, dtype=torch.float64, device=device) for share in shares])
