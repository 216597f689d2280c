"""A step's preference loss, on pairs of samples in one row (DPO).

A pair is left out and not counted if one of its sides has no trained token (for example, because its tokens are too old).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.algorithms.preference import Pairs, preference_loss
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
            LearnerError: There is no pair to train.
        """
        assert passes.reference, "a plan of preferences needs the reference"
        self._state, self._plan = state, plan
        self._knows_sampler = any(logprobs_from_bytes(row.behaviour_logprobs).any() for row in plan.batch.rows)
        self._sums: list[dict[str, torch.Tensor]] = []
        """Sums over the pairs of each trained row, by metric."""
        self.tokens = StepTokens(len(plan.rows), state.ranks, keeps_tokens=plan.kept_samples > 0)
        references = iter(passes.reference)
        self._updates = [[(row, next(references)) for row in rows] for rows in plan.prepared.updates]
        self._pair_of_sample = whole_pairs(plan.prepared)
        numbers = range(len(plan.prepared.updates))
        pairs_U = [self._pair_of_sample[plan.prepared.update_of_sample == number] for number in numbers]
        self._num_pairs = [len(np.unique(pairs[pairs >= 0])) for pairs in pairs_U]
        if not any(self._num_pairs):
            raise LearnerError(
                f"step {plan.batch.step} has no preference pair to train: none of its {len(plan.batch.samples)} samples is in a "
                "pair of which both sides are trained"
            )

    def train_row(self, number: int, place: int, *, is_first_update: bool) -> torch.Tensor:
        """Add the gradients of one row; see `PolicyObjective.train_row`. The second share is 0: there is no value loss."""
        row, reference = self._updates[number][place]
        samples = self._plan.batch.samples
        outputs = run_policy(self._state, self._plan, row)
        logprobs, known = outputs.logprobs, reference.to(outputs.logprobs)
        pair_ids = np.full(row.num_sequences, -1) if row.is_filler else self._pair_of_sample[row.sample_index]
        current, num_pairs = logprobs.detach(), max(1, self._num_pairs[number])
        is_chosen = torch.tensor([samples[index].is_chosen for index in row.sample_index], device=logprobs.device)
        pairs = Pairs(torch.as_tensor(pair_ids, device=logprobs.device), is_chosen, num_pairs)
        inputs = LossInputs(
            logprobs=logprobs,
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
        loss, figures = preference_loss(inputs, pairs, self._plan.algorithm.preference)
        self._state.optimizer.backward(loss)
        counted = {"dpo/pairs": torch.ones_like(figures["dpo/margin"]), **figures}
        self._sums.append({name: values.double().sum() for name, values in counted.items()})
        # There is no policy loss: weights 1, nothing clipped or dropped.
        nothing = torch.zeros_like(row.mask)
        without_loss = LossOutputs(torch.zeros(()), row.mask.to(current.dtype), nothing, nothing)
        self.tokens.add(inputs, without_loss, proximal_is_learner=False, is_first_update=is_first_update, places=row.places)
        return torch.stack([loss.detach().double(), torch.zeros_like(loss, dtype=torch.float64)])

    def metrics(self) -> dict[str, float]:
        """Return the metrics of tokens and pairs; every rank must call this.

        Metrics of the behaviour policy are left out where its log-probabilities are unknown (all of them 0, as for data from a
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
    """Return [S of the step], the pair of each sample; -1 if there is no pair, or one side of the pair has no trained token."""
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
