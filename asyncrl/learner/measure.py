"""What a step's tokens, samples and pairs say about it: kept while rows go by, summed up once at the end.

Computing once over the tokens of all rows and ranks keeps every figure independent of how samples share them. Names are those
of observe/metrics.py. Called by learner/step.py, learner/policy_objective.py and learner/preference_step.py.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from asyncrl.algorithms.advantage_types import FloatArray
from asyncrl.algorithms.preference import PreferenceOutputs
from asyncrl.config.corrections import CorrectionConfig
from asyncrl.learner.ranks import OneRank, Ranks
from asyncrl.learner.token_figures import step_figures
from asyncrl.learner.token_records import TokenRecord, gathered
from asyncrl.schema.batches import StepBatch

__all__ = ["StepPairs", "StepTokens", "TokenRecord", "batch_metrics", "batch_staleness"]


class StepTokens:
    """Collects the records of a step.

    Example:
        tokens = StepTokens(len(rows), corrections=algorithm.corrections, ranks=trainee.ranks)
        tokens.add(TokenRecord.of(inputs, outputs, proximal_is_learner=True))
        metrics = tokens.metrics()
    """

    def __init__(self, rows: int, *, corrections: tuple[CorrectionConfig, ...] = (), ranks: Ranks | None = None) -> None:
        """Begin a step.

        Args:
            rows: Records of one pass over this rank's part of the batch; what is said about the policy before the step is said by
                the first pass.
            corrections: Of the step; their cap is where a ratio counts as high.
            ranks: All ranks' tokens are measured together; None: this process has all of them.
        """
        self._rows = rows
        self._corrections = corrections
        self._ranks: Ranks = OneRank() if ranks is None else ranks
        self._records: list[TokenRecord] = []
        self._before_update = 0

    def begin_update(self) -> None:
        """Note where the records of an update begin."""
        self._before_update = len(self._records)

    def restart_update(self, rows_to_come: int) -> None:
        """Forget the records of the update in hand.

        Args:
            rows_to_come: How many of the first pass follow in their place, of this update and those after it; 0 after that pass.
        """
        del self._records[self._before_update :]
        if rows_to_come:
            self._rows = self._before_update + rows_to_come

    def add(self, record: TokenRecord) -> None:
        """Add one row of one update; in a step that trains the policy every rank adds at least one, if of no token."""
        self._records.append(record)

    def metrics(self) -> dict[str, float]:
        """Return the step's figures, the same on every rank; a collective call. Empty where no token was trained."""
        if not self._records:
            return {}
        every, first = gathered(self._records, self._rows, self._ranks)
        if not len(first):
            return {}
        return {name: value for name, value in step_figures(every, first, self._corrections).items() if not math.isnan(value)}


class StepPairs:
    """Collects what preference losses say over the rows and updates of a step.

    Example:
        pairs = StepPairs(ranks=trainee.ranks)
        pairs.add(preference_loss(inputs, algorithm.preference))
        metrics = pairs.metrics()
    """

    def __init__(self, *, ranks: Ranks | None = None) -> None:
        """Begin a step, over these ranks; None: this process has all pairs."""
        self._ranks: Ranks = OneRank() if ranks is None else ranks
        self._sums: torch.Tensor | None = None
        self._before_update: torch.Tensor | None = None

    def begin_update(self) -> None:
        """Note what there was before an update."""
        self._before_update = self._sums

    def restart_update(self) -> None:
        """Forget the update in hand."""
        self._sums = self._before_update

    def add(self, outputs: PreferenceOutputs) -> None:
        """Add one row of one update; every rank adds at least one, if of no pair."""
        figures = (outputs.losses, outputs.correct, outputs.margins, outputs.chosen_rewards, outputs.rejected_rewards)
        sums = torch.stack([values.double().sum() for values in (torch.ones_like(outputs.margins), *figures)])
        self._sums = sums if self._sums is None else self._sums + sums

    def metrics(self) -> dict[str, float]:
        """Return the step's figures, the same on every rank; a collective call. Empty where there was no pair."""
        assert self._sums is not None, "a rank adds at least one record a step"
        pairs, *sums = self._ranks.sum(self._sums).tolist()
        if not pairs:
            return {}
        loss, accuracy, margin, chosen, rejected = (value / pairs for value in sums)
        return {
            "dpo/pairs": pairs,
            "dpo/loss": loss,
            "dpo/accuracy": accuracy,
            "dpo/margin": margin,
            "dpo/chosen_reward": chosen,
            "dpo/rejected_reward": rejected,
        }


def batch_metrics(batch: StepBatch, advantages: FloatArray | None) -> dict[str, float]:
    """Return what rewards, advantages and lengths say; greedy baselines are left out.

    Args:
        batch: The step's batch.
        advantages: [S], in the order of `batch.samples`; None: the step has none (preferences).
    """
    drawn = [index for index, sample in enumerate(batch.samples) if not sample.is_greedy]
    samples = [batch.samples[index] for index in drawn]
    rewards = np.array([sample.reward for sample in samples])
    lengths = np.array([sample.response_tokens for sample in samples])
    _, groups, counts = np.unique([sample.group_id for sample in samples], return_inverse=True, return_counts=True)
    means = np.bincount(groups, rewards) / counts
    spreads = np.sqrt(np.bincount(groups, (rewards - means[groups]) ** 2) / counts)
    return {
        **batch_staleness(batch),
        **_spread("reward", rewards),
        **({} if advantages is None else _spread("advantage", advantages[drawn])),
        "reward/group_std_mean": float(spreads.mean()),
        "reward/zero_spread_fraction": float((spreads == 0).mean()),
        "data/samples": float(len(samples)),
        "data/rows": float(len(batch.rows)),
        "data/trained_tokens": float(batch.num_trained_tokens),
        "data/prompt_tokens_mean": float(np.mean([sample.prompt_tokens for sample in samples])),
        "data/response_tokens_mean": float(lengths.mean()),
        "data/response_tokens_max": float(lengths.max()),
    }


def batch_staleness(batch: StepBatch) -> dict[str, float]:
    """Return mean and largest staleness of the trained samples, each that of its oldest trained token; empty if there is none."""
    ages = [batch.step - sample.oldest_version for sample in batch.samples if sample.oldest_version >= 0]
    return {"staleness/mean": float(np.mean(ages)), "staleness/max": float(max(ages))} if ages else {}


def _spread(name: str, values: FloatArray) -> dict[str, float]:
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/std": float(values.std()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
