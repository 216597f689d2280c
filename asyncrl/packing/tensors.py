"""Scored groups into the one StepBatch that the learner trains: rows of whole samples with everything the loss needs per token.

What is packed is a group: its prompt counts once, since the learner runs it once for all its samples of a row
(learner/step/microbatch.py). A group longer than a row is cut and its prompt is run once for each piece. What each sample is
there for (trained, a baseline, half of a preference pair) is decided before anything is laid out.

Invariants: the same groups and arguments give the same bytes; `samples` is in the order of the groups given and by member index;
within a row samples keep that order; with preferences only paired samples are in the batch, pairs are numbered over the step in
the order of the groups, and the two samples of one share a row; groups that different updates train share none, so that a row is
one micro-batch; prompt tokens, tool output, tokens older than `mask_below` and samples that are not trained have mask 0, and
such samples still count in their group; prompt tokens have version -1 and logprob 0.
Pure numpy, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from asyncrl.algorithms.screening import Screen, members_of, pairs_among, trained_members, updates_of_groups
from asyncrl.errors import ConfigError
from asyncrl.packing.pack import CostModel, RankPlan, Unit, pack_units
from asyncrl.schema.batches import PackedRow, PackedSample, StepBatch
from asyncrl.schema.samples import Sample, ScoredGroup, ScoredSample, ids_from_bytes, mask_from_bytes


@dataclass(slots=True)
class _Member:
    """One sample of the step, T response tokens after its prompt tokens, and what it is there for."""

    scored: ScoredSample
    loss_mask: bytes
    """uint8 [T]."""
    packed: PackedSample
    """As it will be in the batch; row and start are 0 until it has a place, the oldest version is -1 where nothing is trained."""


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
    samples = _members_of(step, groups, screen, mask_below)
    ranked: list[tuple[list[int], int]] = []
    for chosen in _units_of_updates(samples, ranks.minibatches):
        parts = [part for unit in chosen for part in unit]
        sizes = [_measured(samples, unit, ranks.cost) for unit in chosen]
        packed = pack_units(sizes, tokens_per_row, ranks.num_ranks)
        ranked += [(sorted(i for part in row.members for i in parts[part]), row.rank) for row in packed]
    placed = [each.packed for each in samples]
    rows = []
    for row, (members, rank) in enumerate(ranked):
        rows.append(_row([samples[i] for i in members], rank))
        start = 0
        for i in members:
            placed[i] = msgspec.structs.replace(placed[i], row=row, start=start)
            start += placed[i].prompt_tokens + placed[i].response_tokens
    return StepBatch(
        step=step,
        samples=tuple(placed),
        rows=tuple(rows),
        num_trained_tokens=sum(sample.loss_mask.count(1) for sample in samples),
        temperature=temperature,
        replay=replay,
    )


def _members_of(step: int, groups: Sequence[ScoredGroup], screen: Screen, mask_below: int) -> list[_Member]:
    """Return the samples that belong into the batch, in the order of the groups and by member index."""
    samples: list[_Member] = []
    num_pairs = 0
    for group in groups:
        members = members_of(group)
        trained, pairs = set(trained_members(members, screen)), pairs_among(members, screen)
        sides = {index: (pair, side == 0) for pair, both in enumerate(pairs, num_pairs) for side, index in enumerate(both)}
        num_pairs += len(pairs)
        for scored in group.members:
            sample, index = scored.sample, scored.sample.index
            if screen.preference is None or index in sides:
                loss_mask, oldest_version = _mask_of(sample, mask_below if index in trained else None)
                packed = PackedSample(
                    group.group_id, index, 0, 0, len(sample.prompt_ids) // 4, sample.num_tokens, scored.reward, oldest_version,
                    index == screen.greedy_index, *sides.get(index, (-1, False)),
                )  # fmt: skip
                samples.append(_Member(scored, loss_mask, packed))
    if screen.preference is not None and not samples:
        raise ConfigError(
            f"step {step} has nothing to train: none of its {len(groups)} groups has a preference pair; the buffer gives a step "
            "only groups that have one, so these come from elsewhere: leave them out (algorithm.preference says what a pair is)"
        )
    return samples


def _mask_of(sample: Sample, mask_below: int | None) -> tuple[bytes, int]:
    """Return a sample's loss mask, and its oldest trained version (-1: none); `mask_below` None: nothing of it is trained."""
    num_tokens, versions = sample.num_tokens, ids_from_bytes(sample.versions)
    if mask_below is None:
        return bytes(num_tokens), -1
    if not sample.loss_mask and not mask_below:
        return b"\1" * num_tokens, int(np.minimum.reduce(versions))
    loss_mask = (mask_from_bytes(sample.loss_mask, num_tokens) * (versions >= mask_below)).tobytes()
    trained = versions[mask_from_bytes(loss_mask, num_tokens) > 0]
    return loss_mask, int(trained.min()) if len(trained) else -1


def _units_of_updates(samples: Sequence[_Member], minibatches: int) -> list[list[list[list[int]]]]:
    """Return the groups of each update, those that train nothing last; all together for one update.

    A group is the parts that must share a row, a sample or both of a pair, as positions.
    """
    trained = [each.packed.group_id for each in samples if each.packed.oldest_version >= 0] if minibatches > 1 else []
    update_of_group = updates_of_groups(trained, minibatches)
    of_update: dict[int, dict[tuple[int, bytes], dict[int, list[int]]]] = {}
    for position, each in enumerate(samples):
        group_id, pair = each.packed.group_id, each.packed.pair
        units = of_update.setdefault(update_of_group.get(group_id, minibatches), {})
        parts = units.setdefault((group_id, each.scored.sample.prompt_ids), {})
        parts.setdefault(pair if pair >= 0 else -1 - position, []).append(position)
    return [[list(parts.values()) for parts in of_update[update].values()] for update in sorted(of_update)]


def _measured(samples: Sequence[_Member], unit: list[list[int]], cost: CostModel) -> Unit:
    prefix, tails = samples[unit[0][0]].packed.prompt_tokens, [[samples[i].packed for i in part] for part in unit]
    return Unit(
        prefix=prefix,
        tails=tuple(sum(each.response_tokens for each in tail) for tail in tails),
        prefix_cost=cost.of(prefix),
        costs=tuple(sum(cost.of(each.response_tokens, prefix) for each in tail if each.oldest_version >= 0) for tail in tails),
    )


def _row(samples: list[_Member], rank: int) -> PackedRow:
    """Lay samples end to end; all of it is joining bytes, since most samples of a step may be a few tokens long."""
    made, prompts = [each.scored.sample for each in samples], [each.packed.prompt_tokens for each in samples]
    zeros, none = bytes(4 * max(prompts)), np.full(max(prompts), -1, dtype="<i4").tobytes()

    def laid(before: bytes, size: int, responses: Iterable[bytes]) -> bytes:
        """Return values of `size` bytes of the response tokens, those of `before` on the prompts before them."""
        return b"".join([part for num, own in zip(prompts, responses, strict=True) for part in (before[: size * num], own)])

    # Nothing where a trained sample brings none, so that no 0 is taken for a logprob. Rows of both kinds come only where a resume
    # moved the reference to the learner, which then runs its own over all of them; the other way round the buffer asks for the
    # scores again (buffer/open.py).
    brought, reference_logprobs = [each.scored.reference_logprobs for each in samples], b""
    if any(brought) and all(own or each.packed.oldest_version < 0 for own, each in zip(brought, samples, strict=True)):
        filled = [own or bytes(4 * sample.num_tokens) for own, sample in zip(brought, made, strict=True)]
        reference_logprobs = laid(zeros, 4, filled)
    return PackedRow(
        token_ids=b"".join([part for sample in made for part in (sample.prompt_ids, sample.token_ids)]),
        loss_mask=laid(zeros, 1, [each.loss_mask for each in samples]),
        behaviour_logprobs=laid(zeros, 4, [sample.logprobs for sample in made]),
        versions=laid(none, 4, [sample.versions for sample in made]),
        rank=rank,
        reference_logprobs=reference_logprobs,
    )
