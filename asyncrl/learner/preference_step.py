"""What a step of preference learning minimises: a loss on pairs of samples of one row.

A pair of which nothing of one side is trained any more (its tokens are too old, say) is left out, and not counted. Called by
learner/step.py, and row by row by learner/update.py.

Legend: M targets of a row, S samples of a row.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.algorithms.preference import PreferenceInputs, preference_loss
from asyncrl.algorithms.types import Denominators, LossInputs
from asyncrl.errors import LearnerError
from asyncrl.learner.measure import StepPairs, StepTokens, TokenRecord
from asyncrl.learner.model import RowOutputs, run_row
from asyncrl.learner.passes import Passes
from asyncrl.learner.plan import StepPlan, rows_to_come
from asyncrl.learner.policy_loss import trained_mask
from asyncrl.learner.rows import PreparedBatch, Row
from asyncrl.learner.trainee import Trainee
from asyncrl.schema.samples import logprobs_from_bytes


class PreferenceObjective:
    """One step's preference loss, row by row."""

    def __init__(self, trainee: Trainee, plan: StepPlan, passes: Passes) -> None:
        """Find the pairs of every update.

        Raises:
            LearnerError: There is none, or its two samples lie in different rows.
        """
        self._trainee = trainee
        self._updates_begun = 0
        self._knows_sampler = any(logprobs_from_bytes(row.behaviour_logprobs).any() for row in plan.batch.rows)
        self._pairs = StepPairs(ranks=trainee.ranks)
        self._tokens = StepTokens(len(plan.rows), ranks=trainee.ranks)
        self._take(plan, passes)
        self._pair_of_sample = whole_pairs(plan.prepared)
        self._num_pairs = [
            len(np.unique(pairs[pairs >= 0]))
            for number in range(len(plan.prepared.updates))
            for pairs in [self._pair_of_sample[plan.prepared.update_of_sample == number]]
        ]
        if not any(self._num_pairs):
            raise LearnerError(
                f"step {plan.batch.step} has no preference pair to train: none of its {len(plan.batch.samples)} samples is of a "
                "pair whose other side is trained too"
            )

    def begin_update(self) -> None:
        """See `Objective`."""
        self._updates_begun += 1
        self._tokens.begin_update()
        self._pairs.begin_update()

    def restart_update(self, plan: StepPlan, passes: Passes) -> None:
        """See `Objective`."""
        self._take(plan, passes)
        self._tokens.restart_update(rows_to_come(plan, self._updates_begun))
        self._pairs.restart_update()

    def train_row(self, update: int, place: int) -> torch.Tensor:
        """Add the gradients of row `place` of an update; return this rank's shares of its loss and of no value loss, [2]."""
        row, reference = self._updates[update][place]
        outputs = run_row(
            self._trainee.model,
            row,
            temperature=self._plan.batch.temperature,
            chunk_tokens=self._plan.learner.logprob_chunk_tokens,
            fused=self._plan.learner.logprobs == "fused",
        )
        judged = preference_loss(self._inputs(row, outputs.logprobs, reference, update), self._plan.algorithm.preference)
        self._trainee.optimizer.backward(judged.loss)
        self._pairs.add(judged)
        self._note_tokens(row, outputs, reference)
        loss = judged.loss.detach().double()
        return torch.stack([loss, torch.zeros_like(loss)])

    def metrics(self) -> dict[str, float]:
        """Return what tokens and pairs say; every rank calls.

        Nothing is said of the policy that sampled where no token's log-probability under it is known (0 throughout: data from a
        file).
        """
        figures = self._tokens.metrics()
        if not self._knows_sampler:
            figures = {name: value for name, value in figures.items() if not name.startswith(("ratio/", "mismatch/"))}
        return figures | self._pairs.metrics()

    def _take(self, plan: StepPlan, passes: Passes) -> None:
        assert passes.reference is not None, "a plan of preferences needs the reference"
        self._plan = plan
        references = iter(passes.reference)
        self._updates = [[(row, next(references)) for row in rows] for rows in plan.prepared.updates]

    def _note_tokens(self, row: Row, outputs: RowOutputs, reference: torch.Tensor) -> None:
        logprobs = outputs.logprobs.detach()
        unknown = torch.full_like(logprobs, torch.nan)
        inputs = LossInputs(
            logprobs=logprobs,
            proximal_logprobs=logprobs,
            behaviour_logprobs=row.behaviour_logprobs.to(logprobs) if self._knows_sampler else unknown,
            advantages=torch.zeros_like(logprobs),
            mask=trained_mask(row),
            sequence_ids=row.sequence_ids,
            num_sequences=row.num_sequences,
            denominators=Denominators(1, 1),
            entropy=outputs.entropy,
            reference_logprobs=reference.to(logprobs),
            versions=row.versions,
            learner_version=self._plan.batch.step,
        )
        self._tokens.add(TokenRecord.without_loss(inputs, is_first_update=self._updates_begun == 1))

    def _inputs(self, row: Row, logprobs: torch.Tensor, reference: torch.Tensor, update: int) -> PreferenceInputs:
        samples = self._plan.batch.samples
        pair_ids = np.full(row.num_sequences, -1) if row.is_filler else self._pair_of_sample[row.sample_index]
        is_chosen = [samples[index].is_chosen for index in row.sample_index]
        return PreferenceInputs(
            logprobs=logprobs,
            reference_logprobs=reference.to(logprobs),
            mask=trained_mask(row),
            sequence_ids=row.sequence_ids,
            num_sequences=row.num_sequences,
            pair_ids=torch.as_tensor(pair_ids, device=logprobs.device),
            is_chosen=torch.tensor(is_chosen, device=logprobs.device),
            num_pairs=max(1, self._num_pairs[update]),
        )


def whole_pairs(prepared: PreparedBatch) -> NDArray[np.int64]:
    """Return [S of the step], the pair of each sample; -1 where it has none, or one side of it has no trained token.

    Raises:
        LearnerError: The two samples of a pair lie in different rows.
    """
    sides: dict[int, list[int]] = {}
    for index, sample in enumerate(prepared.batch.samples):
        if sample.pair >= 0 and prepared.update_of_sample[index] >= 0:
            sides.setdefault(sample.pair, []).append(index)
    pair_of_sample = np.full(len(prepared.batch.samples), -1, dtype=np.int64)
    for pair, members in sides.items():
        rows = {prepared.batch.samples[index].row for index in members}
        if len(rows) > 1:
            raise LearnerError(f"the samples of preference pair {pair} lie in rows {sorted(rows)}; a pair must share one")
        if len({prepared.batch.samples[index].is_chosen for index in members}) == 2:
            pair_of_sample[members] = pair
    return pair_of_sample
