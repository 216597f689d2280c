"""Scored groups into the one StepBatch that the learner trains: rows of whole samples with everything the loss needs per token.

What is packed is a group: its prompt counts once, since the learner runs it once for all its samples of a row
(learner/step/microbatch.py). A group longer than a row is cut and its prompt is run once for each piece.

Invariants: the same groups and arguments give the same bytes; `samples` is in the order of the groups given and by member index;
within a row samples keep that order; the two samples of a preference pair share a row; groups that different updates train
share none, so that a row is one micro-batch; prompt tokens, tool output, tokens older than `mask_below` and samples that are
not trained (packing/roles.py) have mask 0; prompt tokens have version -1 and logprob 0.
Pure numpy, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.algorithms.screening import Screen, updates_of_groups
from asyncrl.packing.pack import CostModel, RankPlan, Unit, pack_units
from asyncrl.packing.roles import Role, roles_of, units_of
from asyncrl.schema.batches import PackedRow, PackedSample, StepBatch
from asyncrl.schema.samples import (
    ScoredGroup,
    ScoredSample,
    ids_from_bytes,
    logprobs_from_bytes,
    mask_from_bytes,
)


@dataclass(frozen=True, slots=True)
class _Unpacked:
    """One sample as arrays; T response tokens after P prompt tokens."""

    role: Role
    prompt_ids: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    versions: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]

    @property
    def scored(self) -> ScoredSample:
        return self.role.scored

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)


def pack_step(
    step: int,
    groups: Sequence[ScoredGroup],
    *,
    tokens_per_row: int,
    temperature: float,
    mask_below: int = 0,
    replay: bool = False,
    ranks: RankPlan = RankPlan(),  # noqa: B008 - frozen
    screen: Screen = Screen(),  # noqa: B008 - frozen
) -> StepBatch:
    """Lay the samples of one step into rows.

    Args:
        step: The optimizer step.
        groups: Its groups, in the order in which they are to be trained.
        tokens_per_row: Token budget of a row; a prompt that several of its samples share counts once.
        temperature: That the samples were drawn at.
        mask_below: Tokens of a version under this one get mask 0 (policy `mask`); their sample stays, for its group's advantage.
        replay: Passed on.
        ranks: Learner ranks that the rows are spread over, in turns of rows of like cost (packing/pack.py), and their updates.
        screen: Says which samples are trained, and which make pairs.

    Returns:
        The batch.

    Raises:
        ConfigError: A sample or pair is longer than `tokens_per_row`, or a step of preferences has no pair.
    """
    roles = roles_of(step, groups, screen)
    samples = [_unpack(role, mask_below) for role in roles]
    units = units_of(roles)
    ranked: list[tuple[list[int], int]] = []
    for chosen in _units_of_updates(samples, units, ranks.minibatches):
        parts = [part for unit in chosen for part in unit]
        sizes = [_measured(samples, unit, ranks.cost) for unit in chosen]
        packed = pack_units(sizes, tokens_per_row, ranks.num_ranks)
        ranked += [(sorted(i for part in row.members for i in parts[part]), row.rank) for row in packed]
    placed: list[PackedSample | None] = [None] * len(samples)
    rows = []
    for row, (members, rank) in enumerate(ranked):
        rows.append(_row([samples[i] for i in members], rank))
        start = 0
        for i in members:
            placed[i] = _place(samples[i], row, start)
            start += samples[i].num_tokens
    return StepBatch(
        step=step,
        samples=tuple(sample for sample in placed if sample is not None),
        rows=tuple(rows),
        num_trained_tokens=sum(int(sample.loss_mask.sum()) for sample in samples),
        temperature=temperature,
        replay=replay,
    )


def _units_of_updates(
    samples: Sequence[_Unpacked], units: Sequence[list[list[int]]], minibatches: int
) -> list[list[list[list[int]]]]:
    """Return the units of each update's groups, those of groups that train nothing last; all together for one update."""
    if minibatches == 1:
        return [list(units)]
    groups = [sample.scored.sample.group_id for sample in samples]
    trained = [group for group, sample in zip(groups, samples, strict=True) if sample.loss_mask.any()]
    update_of_group = updates_of_groups(trained, minibatches)
    of_update: dict[int, list[list[list[int]]]] = {}
    for unit in units:
        of_update.setdefault(update_of_group.get(groups[unit[0][0]], minibatches), []).append(unit)
    return [of_update[update] for update in sorted(of_update)]


def _measured(samples: Sequence[_Unpacked], unit: list[list[int]], cost: CostModel) -> Unit:
    prefix = len(samples[unit[0][0]].prompt_ids)
    return Unit(
        prefix=prefix,
        tails=tuple(sum(len(samples[i].token_ids) for i in part) for part in unit),
        prefix_cost=cost.of(prefix),
        costs=tuple(sum(cost.of(len(samples[i].token_ids), prefix) for i in part if samples[i].loss_mask.any()) for part in unit),
    )


def _unpack(role: Role, mask_below: int) -> _Unpacked:
    sample = role.scored.sample
    versions = ids_from_bytes(sample.versions)
    loss_mask = mask_from_bytes(sample.loss_mask, sample.num_tokens)
    if mask_below > 0:
        loss_mask = loss_mask * (versions >= mask_below)
    if not role.is_trained:
        loss_mask = np.zeros_like(loss_mask)
    return _Unpacked(role, ids_from_bytes(sample.prompt_ids), ids_from_bytes(sample.token_ids), versions, loss_mask)


def _place(sample: _Unpacked, row: int, start: int) -> PackedSample:
    trained = sample.versions[sample.loss_mask > 0]
    return PackedSample(
        group_id=sample.scored.sample.group_id,
        index=sample.scored.sample.index,
        row=row,
        start=start,
        prompt_tokens=len(sample.prompt_ids),
        response_tokens=len(sample.token_ids),
        reward=sample.scored.reward,
        oldest_version=int(trained.min()) if len(trained) else -1,
        is_greedy=sample.role.is_greedy,
        pair=sample.role.pair,
        is_chosen=sample.role.is_chosen,
    )


def _row(samples: list[_Unpacked], rank: int) -> PackedRow:
    length = sum(sample.num_tokens for sample in samples)
    token_ids = np.empty(length, dtype="<i4")
    position_ids = np.empty(length, dtype="<i4")
    segment_ids = np.empty(length, dtype="<i4")
    versions = np.full(length, -1, dtype="<i4")
    loss_mask = np.zeros(length, dtype=np.uint8)
    logprobs = np.zeros(length, dtype="<f4")
    start = 0
    for segment, sample in enumerate(samples):
        response, end = start + len(sample.prompt_ids), start + sample.num_tokens
        token_ids[start:response] = sample.prompt_ids
        token_ids[response:end] = sample.token_ids
        position_ids[start:end] = np.arange(end - start)
        segment_ids[start:end] = segment
        versions[response:end] = sample.versions
        loss_mask[response:end] = sample.loss_mask
        logprobs[response:end] = logprobs_from_bytes(sample.scored.sample.logprobs)
        start = end
    return PackedRow(
        token_ids=token_ids.tobytes(),
        position_ids=position_ids.tobytes(),
        segment_ids=segment_ids.tobytes(),
        loss_mask=loss_mask.tobytes(),
        behaviour_logprobs=logprobs.tobytes(),
        versions=versions.tobytes(),
        rank=rank,
        reference_logprobs=_reference_logprobs(samples),
    )


def _reference_logprobs(samples: list[_Unpacked]) -> bytes:
    """Return those of a row; nothing where a trained sample brings none, so that no 0 is taken for a logprob.

    Rows of both kinds come only where a resume moved the reference to the learner, which then runs its own over all of them; the
    other way round the buffer asks for the scores again (buffer/opening.py).
    """
    brought = [len(sample.scored.reference_logprobs) > 0 for sample in samples]
    if not any(brought) or not all(has or not sample.loss_mask.any() for has, sample in zip(brought, samples, strict=True)):
        return b""
    parts = []
    for sample in samples:
        response = logprobs_from_bytes(sample.scored.reference_logprobs)
        parts += [np.zeros(len(sample.prompt_ids), "<f4"), response if len(response) else np.zeros(len(sample.token_ids), "<f4")]
    reference_logprobs: bytes = np.concatenate(parts).tobytes()
    return reference_logprobs
