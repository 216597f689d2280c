"""Corrections that must see every token of an update, of all ranks, before its first row is trained.

They are worked out once, from the policy before the step's first update: ratios of proximal and behaviour do not move with the
updates, and m2po_clip is of the ratios as they are then. What reads the current policy and needs no more than its row (opsm) is
left to the row, unless `kept` must count it beforehand (the rules allow opsm one update a step there). Called by
learner/micro_batches.py.

Legend: S samples of the step, T the most response tokens of one of them, N trained tokens of an update, M targets of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.algorithms.advantage_types import FloatArray
from asyncrl.algorithms.aggregation import count_denominators
from asyncrl.algorithms.corrections import correct
from asyncrl.algorithms.types import CorrectionOutputs, Denominators, LossInputs
from asyncrl.learner.passes import Passes
from asyncrl.learner.plan import StepPlan
from asyncrl.learner.policy_loss import proximal_of
from asyncrl.learner.ranks import Ranks
from asyncrl.learner.rows import Row
from asyncrl.learner.token_table import TokenTable


@dataclass(frozen=True, slots=True)
class CorrectionTables:
    """`CorrectionOutputs` of an update's tokens, wherever they are trained."""

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
    table, rows = plan.prepared.table, plan.rows
    current = table.collect(rows, passes.proximal, ranks)
    behaviour = table.collect(rows, [row.behaviour_logprobs for row in rows], ranks)
    versions = table.collect(rows, [row.versions for row in rows], ranks)
    planned = []
    for number in range(len(plan.prepared.updates)):
        mask = table.mask & (plan.prepared.update_of_sample == number)[:, None]
        samples, sequence_ids = np.unique(np.nonzero(mask)[0], return_inverse=True)
        denominators = Denominators(len(sequence_ids), len(samples), plan.algorithm.aggregation_constant)
        logprobs, known_behaviour, known_versions = (torch.from_numpy(values[mask]) for values in (current, behaviour, versions))
        inputs = LossInputs(
            logprobs=logprobs,
            proximal_logprobs=proximal_of(plan, logprobs, known_behaviour, known_versions.long(), logprobs),
            behaviour_logprobs=known_behaviour,
            advantages=torch.from_numpy(advantages[mask]),
            mask=torch.ones(len(sequence_ids), dtype=torch.bool),
            sequence_ids=torch.from_numpy(sequence_ids),
            num_sequences=len(samples),
            denominators=denominators,
            versions=known_versions.long(),
            learner_version=plan.batch.step,
        )
        planned.append(_corrected(plan, inputs, mask))
    return planned


def _corrected(plan: StepPlan, inputs: LossInputs, mask: NDArray[np.bool_]) -> tuple[CorrectionTables, Denominators]:
    outputs = correct(inputs, plan.planned_corrections)
    denominators = count_denominators(
        inputs.mask,
        outputs.kept,
        inputs.sequence_ids,
        inputs.num_sequences,
        constant=plan.algorithm.aggregation_constant,
        denominator=plan.algorithm.denominator,
    )
    weights, kept = np.zeros(mask.shape), np.zeros(mask.shape, dtype=np.bool_)
    weights[mask], kept[mask] = outputs.weights.numpy(), outputs.kept.numpy()
    return CorrectionTables(weights, kept, outputs.clip_low, outputs.clip_high), denominators
