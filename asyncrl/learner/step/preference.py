"""What a step of preference learning minimises: a loss on pairs of samples of one row.

A pair with a side that has no trained token (its tokens are too old, for example) is left out and not counted.

Legend: M targets of a row, S samples of a row.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.algorithms.preference import PreferenceInputs, preference_loss
from asyncrl.algorithms.types import Denominators, LossInputs, LossOutputs
from asyncrl.errors import LearnerError
from asyncrl.learner.metrics import StepTokens
from asyncrl.learner.step.microbatch import PreparedBatch
from asyncrl.learner.step.plan import Passes, StepPlan, run_policy
from asyncrl.learner.train_state import TrainState
from asyncrl.schema.samples import logprobs_from_bytes


class PreferenceObjective:
    """One step's preference loss, row by row."""

    def __init__(self, state: TrainState, plan: StepPlan, passes: Passes) -> None:
        """Find the pairs of every update.

        Raises:
            LearnerError: There is none.
        """
        assert passes.reference, "a plan of preferences needs the reference"
        self._state, self._plan = state, plan
        self._knows_sampler = any(logprobs_from_bytes(row.behaviour_logprobs).any() for row in plan.batch.rows)
        self._sums: list[dict[str, torch.Tensor]] = []
        """Of figures over the pairs of each row that was trained."""
        self.tokens = StepTokens(len(plan.rows), ranks=state.ranks, keeps_tokens=plan.kept_samples > 0)
        references = iter(passes.reference)
        self._updates = [[(row, next(references)) for row in rows] for rows in plan.prepared.updates]
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

    def train_row(self, number: int, place: int, *, is_first_update: bool) -> torch.Tensor:
        """Add the gradients of one row; see `PolicyObjective.train_row`. The second share is 0: there is no value loss."""
        row, reference = self._updates[number][place]
        samples = self._plan.batch.samples
        outputs = run_policy(self._state, self._plan, row)
        logprobs, known = outputs.logprobs, reference.to(outputs.logprobs)
        pair_ids = np.full(row.num_sequences, -1) if row.is_filler else self._pair_of_sample[row.sample_index]
        inputs = PreferenceInputs(
            logprobs=logprobs,
            reference_logprobs=known,
            mask=row.mask,
            sequence_ids=row.sequence_ids,
            num_sequences=row.num_sequences,
            pair_ids=torch.as_tensor(pair_ids, device=logprobs.device),
            is_chosen=torch.tensor([samples[index].is_chosen for index in row.sample_index], device=logprobs.device),
            num_pairs=max(1, self._num_pairs[number]),
        )
        loss, figures = preference_loss(inputs, self._plan.algorithm.preference)
        self._state.optimizer.backward(loss)
        counted = {"dpo/pairs": torch.ones_like(figures["dpo/margin"]), **figures}
        self._sums.append({name: values.double().sum() for name, values in counted.items()})
        current = logprobs.detach()
        measured = LossInputs(
            logprobs=current,
            proximal_logprobs=current,
            behaviour_logprobs=row.behaviour_logprobs.to(current) if self._knows_sampler else torch.full_like(current, torch.nan),
            advantages=torch.zeros_like(current),
            mask=row.mask,
            sequence_ids=row.sequence_ids,
            num_sequences=row.num_sequences,
            denominators=Denominators(1, 1),
            entropy=outputs.entropy,
            reference_logprobs=known,
            versions=row.versions,
            learner_version=self._plan.batch.step,
        )
        # There is no policy loss: weights 1, nothing clipped or dropped.
        nothing = torch.zeros_like(row.mask)
        without_loss = LossOutputs(torch.zeros(()), row.mask.to(current.dtype), nothing, nothing)
        self.tokens.add(measured, without_loss, proximal_is_learner=False, is_first_update=is_first_update, places=row.places)
        return torch.stack([loss.detach().double(), torch.zeros_like(loss, dtype=torch.float64)])

    def metrics(self) -> dict[str, float]:
        """Return the figures of tokens and pairs; every rank calls.

        Figures of the policy that sampled are left out where none of its log-probabilities is known (0 throughout: data from a
        file).
        """
        figures = self.tokens.metrics()
        if not self._knows_sampler:
            figures = {name: value for name, value in figures.items() if not name.startswith(("ratio/", "mismatch/"))}
        own = torch.stack([torch.stack(list(sums.values())) for sums in self._sums]).sum(dim=0)
        pairs, *sums = self._state.ranks.sum(own).tolist()
        means = zip(list(self._sums[0])[1:], sums, strict=True)
        return figures | {"dpo/pairs": pairs} | {name: total / pairs for name, total in means}


def whole_pairs(prepared: PreparedBatch) -> NDArray[np.int64]:
    """Return [S of the step], the pair of each sample; -1 where it has none, or one side of it has no trained token."""
    sides: dict[int, list[int]] = {}
    for index, sample in enumerate(prepared.batch.samples):
        if sample.pair >= 0 and prepared.update_of_sample[index] >= 0:
            sides.setdefault(sample.pair, []).append(index)
    pair_of_sample = np.full(len(prepared.batch.samples), -1, dtype=np.int64)
    for pair, members in sides.items():
        assert len({prepared.batch.samples[index].row for index in members}) == 1, f"the samples of pair {pair} must share a row"
        if len({prepared.batch.samples[index].is_chosen for index in members}) == 2:
            pair_of_sample[members] = pair
    return pair_of_sample
