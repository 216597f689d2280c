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

from asyncrl.algorithms.screening import Screen, updates_of_groups
from asyncrl.packing.pack import CostModel, RankPlan, Unit, pack_units
from asyncrl.packing.roles import Role, roles_of, units_of
from asyncrl.schema.batches import PackedRow, PackedSample, StepBatch
from asyncrl.schema.samples import Sample, ScoredGroup, ids_from_bytes, mask_from_bytes


@dataclass(slots=True)
class _Unpacked:
    """One sample: T response tokens after P prompt tokens."""

    role: Role
    sample: Sample
    prompt_tokens: int
    response_tokens: int
    loss_mask: bytes
    """uint8 [T]."""
    is_trained: bool
    oldest_version: int
    """Of its trained tokens; -1 where there is none."""


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
            each = samples[i]
            placed[i] = PackedSample(
                group_id=each.sample.group_id,
                index=each.sample.index,
                row=row,
                start=start,
                prompt_tokens=each.prompt_tokens,
                response_tokens=each.response_tokens,
                reward=each.role.scored.reward,
                oldest_version=each.oldest_version,
                is_greedy=each.role.is_greedy,
                pair=each.role.pair,
                is_chosen=each.role.is_chosen,
            )
            start += each.prompt_tokens + each.response_tokens
    return StepBatch(
        step=step,
        samples=tuple(sample for sample in placed if sample is not None),
        rows=tuple(rows),
        num_trained_tokens=sum(sample.loss_mask.count(1) for sample in samples),
        temperature=temperature,
        replay=replay,
    )


def _units_of_updates(
    samples: Sequence[_Unpacked], units: Sequence[list[list[int]]], minibatches: int
) -> list[list[list[list[int]]]]:
    """Return the units of each update's groups, those of groups that train nothing last; all together for one update."""
    if minibatches == 1:
        return [list(units)]
    groups = [each.sample.group_id for each in samples]
    trained = [each.sample.group_id for each in samples if each.is_trained]
    update_of_group = updates_of_groups(trained, minibatches)
    of_update: dict[int, list[list[list[int]]]] = {}
    for unit in units:
        of_update.setdefault(update_of_group.get(groups[unit[0][0]], minibatches), []).append(unit)
    return [of_update[update] for update in sorted(of_update)]


def _measured(samples: Sequence[_Unpacked], unit: list[list[int]], cost: CostModel) -> Unit:
    prefix = samples[unit[0][0]].prompt_tokens
    return Unit(
        prefix=prefix,
        tails=tuple(sum(samples[i].response_tokens for i in part) for part in unit),
        prefix_cost=cost.of(prefix),
        costs=tuple(sum(cost.of(samples[i].response_tokens, prefix) for i in part if samples[i].is_trained) for part in unit),
    )


def _unpack(role: Role, mask_below: int) -> _Unpacked:
    sample = role.scored.sample
    num_tokens, versions = sample.num_tokens, ids_from_bytes(sample.versions)
    loss_mask = sample.loss_mask or b"\1" * num_tokens
    if not role.is_trained:
        loss_mask, oldest_version = bytes(num_tokens), -1
    elif not sample.loss_mask and not mask_below:
        oldest_version = int(np.minimum.reduce(versions))
    else:
        loss_mask = (mask_from_bytes(sample.loss_mask, num_tokens) * (versions >= mask_below)).tobytes()
        trained = versions[mask_from_bytes(loss_mask, num_tokens) > 0]
        oldest_version = int(trained.min()) if len(trained) else -1
    return _Unpacked(role, sample, len(sample.prompt_ids) // 4, num_tokens, loss_mask, 1 in loss_mask, oldest_version)


def _row(samples: list[_Unpacked], rank: int) -> PackedRow:
    """Lay samples end to end; all of it is joining bytes, since most samples of a step may be a few tokens long."""
    none = np.full(max(each.prompt_tokens for each in samples), -1, dtype="<i4").tobytes()
    # Nothing where a trained sample brings none, so that no 0 is taken for a logprob. Rows of both kinds come only where a resume
    # moved the reference to the learner, which then runs its own over all of them; the other way round the buffer asks for the
    # scores again (buffer/open.py).
    brought, reference_logprobs = [each.role.scored.reference_logprobs for each in samples], b""
    if any(brought) and all(own or not each.is_trained for own, each in zip(brought, samples, strict=True)):
        filled = [own or bytes(4 * each.response_tokens) for own, each in zip(brought, samples, strict=True)]
        reference_logprobs = _after_prompts(samples, filled)
    return PackedRow(
        token_ids=b"".join([part for each in samples for part in (each.sample.prompt_ids, each.sample.token_ids)]),
        loss_mask=b"".join([part for each in samples for part in (bytes(each.prompt_tokens), each.loss_mask)]),
        behaviour_logprobs=_after_prompts(samples, [each.sample.logprobs for each in samples]),
        versions=b"".join([part for each in samples for part in (none[: 4 * each.prompt_tokens], each.sample.versions)]),
        rank=rank,
        reference_logprobs=reference_logprobs,
    )


def _after_prompts(samples: list[_Unpacked], responses: list[bytes]) -> bytes:
    """Return float32 values of response tokens, 0 on the prompts before them."""
    return b"".join([part for each, own in zip(samples, responses, strict=True) for part in (bytes(4 * each.prompt_tokens), own)])
