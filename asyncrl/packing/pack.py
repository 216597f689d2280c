"""Packs scored groups into a StepBatch: rows of whole samples with everything that the loss needs per token.

Groups are packed: a group's size is its distinct tokens, with its prompt counted once, because the learner runs the prompt once
for all samples of the group in a row (learner/step/microbatch.py). A group longer than a row is cut; its prompt is then run once
per piece. Groups are assigned to rows by best-fit-decreasing into a token budget, and rows to ranks by equal cost. The role of
each sample (trained, baseline, half of a preference pair) is decided before that.

Invariants: the same groups and arguments give the same bytes, on every machine; a sample is never split; `samples` is in the
order of the given groups and by member index; within a row samples keep that order; with preferences only paired samples are in
the batch, pairs are numbered over the step in the order of the groups, and both samples of a pair are in the same row; groups of
different updates are never in the same row, so that a row is one micro-batch; prompt tokens, tool output, tokens older than
`mask_below` and untrained samples have mask 0, and such samples still count in their group; prompt tokens have version -1 and
logprob 0.
Pure numpy, no torch.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from asyncrl.algorithms.screening import Screen, members_of, pairs_among, trained_members, updates_of_groups
from asyncrl.errors import ConfigError
from asyncrl.schema.samples import (
    PackedRow,
    PackedSample,
    Sample,
    ScoredGroup,
    ScoredSample,
    StepBatch,
    ids_from_bytes,
    mask_from_bytes,
)


def pack_lengths(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put all lengths into few bins of at most `capacity`: best-fit-decreasing.

    Args:
        lengths: Tokens of each sample, each in [1, capacity].
        capacity: Tokens of a row.

    Returns:
        One list of indices into `lengths` per bin, ascending within a bin, bins by their first index.

    Raises:
        ConfigError: A length does not fit into any bin.

    Source: best-fit-decreasing as in D. S. Johnson, Near-optimal bin packing algorithms (1973).
    """
    if not lengths:
        return []
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    _check_fits(longest, lengths[longest], capacity)
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(room, (lengths[i], -1))
        if at == len(room):
            insort(room, (capacity - lengths[i], len(bins)))
            bins.append([i])
        else:
            free, chosen = room.pop(at)
            insort(room, (free - lengths[i], chosen))
            bins[chosen].append(i)
    return sorted(map(sorted, bins))


def _check_fits(number: int, length: int, capacity: int) -> None:
    if length > capacity:
        raise ConfigError(
            f"sample {number} has {length} tokens and packing.tokens_per_row is {capacity}: a sample is never split; "
            f"raise packing.tokens_per_row to at least {length}"
        )


LINEAR_FACTOR = 12
"""Weights of a decoder layer divided by hidden_size squared: 4 in attention's projections, 8 in an MLP four times as wide."""
IDLE_ENOUGH = 0.02
"""Groups are not cut further if ranks wait for each other for less than this share of a step."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Cost of n tokens of one sample: n + attention * n^2, in units of the linear layers' work for one token."""

    attention: float = 0.0

    @classmethod
    def of_model(cls, hidden_size: int) -> CostModel:
        """Return the cost model of a decoder of this width.

        A layer multiplies each token with 12 hidden_size^2 weights (24 hidden_size^2 operations); causal attention pairs it
        with n / 2 tokens on average, twice (2 n hidden_size operations). So attention = 2 / (24 hidden_size), and both
        terms are equal at n = 12 hidden_size.

        Source: J. Kaplan et al., Scaling laws for neural language models (2020), table 1, adapted to causal attention.
        """
        return cls(1.0 / (LINEAR_FACTOR * hidden_size))

    def of(self, num_tokens: int, prefix: int = 0) -> float:
        """Return the cost of `num_tokens` after a prefix to which they attend; the prefix itself is not counted."""
        end = prefix + num_tokens
        return num_tokens + self.attention * (end * end - prefix * prefix)


@dataclass(frozen=True, slots=True)
class Unit:
    """Parts that are packed together because they begin with the same tokens; a part is a sample or a preference pair."""

    prefix: int
    """Number of common first tokens of all parts, stored once per row."""
    tails: tuple[int, ...]
    """Tokens of each part after the prefix."""
    prefix_cost: float
    """Cost of training the prefix."""
    costs: tuple[float, ...]
    """Cost of training each tail; 0 if the tail is not trained."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Number of ranks of a step, the cost model by which rows are spread, and the number of updates."""

    num_ranks: int = 1
    cost: CostModel = CostModel()
    minibatches: int = 1
    """Maximum number of updates of a step."""


@dataclass(frozen=True, slots=True)
class RankedRow:
    """A row and the rank that runs it."""

    members: tuple[int, ...]
    """The parts in the row, ascending."""
    rank: int
    cost: float


def pack_units(units: Sequence[Unit], capacity: int, num_ranks: int = 1) -> list[RankedRow]:
    """Assign units to rows, and rows to ranks; parts are numbered through all units in order.

    A unit that fits into a row is not cut, so its prefix is computed once. A longer unit is cut into as few pieces as possible,
    or into more pieces if ranks would otherwise wait for each other; each piece repeats the prefix.

    Args:
        units: At least one part each.
        capacity: Tokens of a row.
        num_ranks: R.

    Returns:
        The rows; the t-th row of every rank is run in turn t, and the rows of a turn are consecutive.

    Raises:
        ConfigError: A part does not fit into any row.
    """
    first_parts = [0, *itertools.accumulate(len(unit.tails) for unit in units)]
    for unit, first in zip(units, first_parts, strict=False):
        longest = max(range(len(unit.tails)), key=unit.tails.__getitem__)
        _check_fits(first + longest, unit.prefix + unit.tails[longest], capacity)
    best: list[RankedRow] = []
    most_pieces = max((len(unit.tails) for unit in units), default=0) if num_ranks > 1 else 1
    num_pieces = 1
    while True:
        pieces = [(u, piece) for u, unit in enumerate(units) for piece in _cut(unit, num_pieces, capacity)]
        sizes = [units[u].prefix + sum(units[u].tails[i] for i in piece) for u, piece in pieces]
        costs = [_piece_cost(units[u], piece) for u, piece in pieces]
        rows = []
        for members in _rows_of(sizes, costs, capacity, num_ranks):
            parts: dict[int, list[int]] = {}
            for member in members:
                parts.setdefault(pieces[member][0], []).extend(pieces[member][1])
            numbers = tuple(sorted(first_parts[u] + i for u, piece in parts.items() for i in piece))
            rows.append((numbers, sum(_piece_cost(units[u], piece) for u, piece in parts.items())))
        costs_K = [cost for _, cost in rows]
        if not best or step_cost(costs_K, num_ranks) < step_cost([row.cost for row in best], num_ranks):
            best = [RankedRow(rows[row][0], rank, rows[row][1]) for row, rank in ranks_of_rows(costs_K, num_ranks)]
        if num_pieces >= most_pieces or idle_share(costs_K, num_ranks) < IDLE_ENOUGH:
            return best
        num_pieces *= 2


def ranks_of_rows(costs_K: Sequence[float], num_ranks: int) -> list[tuple[int, int]]:
    """Assign a rank and a turn to every row.

    Args:
        costs_K: Cost of each row.
        num_ranks: R.

    Returns:
        (row, rank) in the order of turns, costliest turn first, ranks ascending within a turn; only the last turn can have
        fewer than R rows. With one rank: the rows in their order.
    """
    if num_ranks == 1:
        return [(row, 0) for row in range(len(costs_K))]
    order = sorted(range(len(costs_K)), key=lambda row: (-costs_K[row], row))
    loads_R = [0.0] * num_ranks
    placed: list[tuple[int, int]] = []
    for turn in (order[start : start + num_ranks] for start in range(0, len(order), num_ranks)):
        idlest = sorted(range(num_ranks), key=lambda rank: (loads_R[rank], rank))
        chosen = dict(zip(idlest, turn, strict=False))
        for rank in sorted(chosen):
            loads_R[rank] += costs_K[chosen[rank]]
            placed.append((chosen[rank], rank))
    return placed


def step_cost(costs_K: Sequence[float], num_ranks: int) -> float:
    """Return the duration of a step: the sum over the turns of `ranks_of_rows` of the costliest row."""
    return sum(sorted(costs_K, reverse=True)[::num_ranks])


def idle_share(costs_K: Sequence[float], num_ranks: int) -> float:
    """Return the share of the ranks' time in which they wait for a costlier row of the same turn, in [0, 1)."""
    return 1.0 - sum(costs_K) / (num_ranks * step_cost(costs_K, num_ranks)) if any(costs_K) else 0.0


def _piece_cost(unit: Unit, parts: Sequence[int]) -> float:
    tails = sum(unit.costs[i] for i in parts)
    return tails and unit.prefix_cost + tails


def _cut(unit: Unit, num_pieces: int, capacity: int) -> list[list[int]]:
    """Return the parts of each piece: at least `num_pieces` pieces (if there are so many parts), of equal cost if they fit."""
    room = capacity - unit.prefix
    if num_pieces == 1 and sum(unit.tails) <= room:
        return [list(range(len(unit.tails)))]
    even = _spread_evenly(min(num_pieces, len(unit.tails)), unit.tails, unit.costs, room)
    return even or pack_lengths(unit.tails, room)


def _rows_of(sizes: Sequence[int], costs: Sequence[float], capacity: int, num_ranks: int) -> list[list[int]]:
    packed = pack_lengths(sizes, capacity)
    if num_ranks == 1:
        return packed
    wanted = min(-(-len(packed) // num_ranks) * num_ranks, len(sizes))
    options = [_halved_until(wanted, packed, sizes, costs), _spread_evenly(wanted, sizes, costs, capacity)]
    return min(
        (rows for rows in options if rows),
        key=lambda rows: step_cost([sum(costs[i] for i in members) for members in rows], num_ranks),
        default=[],
    )


def _halved_until(
    wanted: int, packed: Sequence[Sequence[int]], sizes_U: Sequence[int], costs_U: Sequence[float]
) -> list[list[int]]:
    """Return the packed rows, after halving the costliest row with several units until there are `wanted` rows."""
    done = [list(members) for members in packed if len(members) == 1]
    heap = [(-sum(costs_U[i] for i in members), list(members)) for members in packed if len(members) > 1]
    heapq.heapify(heap)
    while heap and len(heap) + len(done) < wanted:
        _, members = heapq.heappop(heap)
        total = sum(sizes_U[i] for i in members)
        for half in _spread_evenly(2, [sizes_U[i] for i in members], [costs_U[i] for i in members], total):
            part = [members[position] for position in half]
            if len(part) > 1:
                heapq.heappush(heap, (-sum(costs_U[i] for i in part), part))
            else:
                done.append(part)
    return sorted([*done, *(members for _, members in heap)])


def _spread_evenly(num_rows: int, sizes_U: Sequence[int], costs_U: Sequence[float], capacity: int) -> list[list[int]]:
    """Repeatedly put the costliest remaining unit into the cheapest row with room; return an empty list if there is no such row.

    Args:
        num_rows: At most as many as there are units: every row then gets one.
        sizes_U: See `_rows_of`.
        costs_U: See `_rows_of`.
        capacity: Tokens of a row.
    """
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    heap = [(0.0, 0, row) for row in range(num_rows)]
    used = [0] * num_rows
    for i in sorted(range(len(sizes_U)), key=lambda i: (-costs_U[i], -sizes_U[i], i)):
        full = []
        while heap and used[heap[0][2]] + sizes_U[i] > capacity:
            full.append(heapq.heappop(heap))
        if not heap:
            return []
        load, count, row = heap[0]
        heapq.heapreplace(heap, (load + costs_U[i], count + 1, row))
        rows[row].append(i)
        used[row] += sizes_U[i]
        for entry in full:
            heapq.heappush(heap, entry)
    return sorted(sorted(members) for members in rows)


@dataclass(slots=True)
class _Member:
    """One sample of the step, T response tokens after its prompt tokens, with its role."""

    scored: ScoredSample
    loss_mask: bytes
    """uint8 [T]."""
    packed: PackedSample
    """As it will be in the batch; row and start are 0 until it is placed, the oldest version is -1 if nothing is trained."""


def pack_step(
    step: int,
    groups: Sequence[ScoredGroup],
    *,
    tokens_per_row: int,
    temperature: float,
    mask_below: int = 0,
    ranks: RankPlan = RankPlan(),
    screen: Screen = Screen(),  # noqa: B008 - frozen
) -> StepBatch:
    """Pack the samples of one step into rows.

    Args:
        step: The optimizer step.
        groups: The step's groups, in the order in which they are trained.
        tokens_per_row: Token budget of a row; a prompt common to several of its samples counts once.
        temperature: Sampling temperature of the samples.
        mask_below: Tokens of a version under this get mask 0 (policy `mask`); their sample stays, for its group's advantage.
        ranks: Learner ranks over which rows are spread, in turns of rows of similar cost, and the number of updates.
        screen: Rules for which samples are trained, and which form pairs.

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
    )


def _members_of(step: int, groups: Sequence[ScoredGroup], screen: Screen, mask_below: int) -> list[_Member]:
    """Return the samples of the batch, in the order of the groups and by member index."""
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
    """Return a sample's loss mask, and its oldest trained version (-1: none); `mask_below` None: the sample is not trained."""
    num_tokens, versions = sample.num_tokens, ids_from_bytes(sample.versions)
    if mask_below is None:
        return bytes(num_tokens), -1
    if not sample.loss_mask and not mask_below:
        return b"\1" * num_tokens, int(np.minimum.reduce(versions))
    loss_mask = (mask_from_bytes(sample.loss_mask, num_tokens) * (versions >= mask_below)).tobytes()
    trained = versions[mask_from_bytes(loss_mask, num_tokens) > 0]
    return loss_mask, int(trained.min()) if len(trained) else -1


def _units_of_updates(samples: Sequence[_Member], minibatches: int) -> list[list[list[list[int]]]]:
    """Return the groups of each update, then the untrained groups; with one update, all groups together.

    A group is a list of parts; a part must be in one row, and is a sample or both samples of a pair, as positions.
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
    """Concatenate samples as bytes, which is fast even if most samples of a step have only a few tokens."""
    made, prompts = [each.scored.sample for each in samples], [each.packed.prompt_tokens for each in samples]
    zeros, none = bytes(4 * max(prompts)), np.full(max(prompts), -1, dtype="<i4").tobytes()

    def laid(before: bytes, size: int, responses: Iterable[bytes]) -> bytes:
        """Return values of `size` bytes per token: `before` for the prompts, `responses` for the response tokens."""
        return b"".join([part for num, own in zip(prompts, responses, strict=True) for part in (before[: size * num], own)])

    # Empty if a trained sample has none, so that no 0 is read as a logprob. Mixed rows occur only after a resume moved the
    # reference to the learner, which runs its own over all rows; in the opposite case the buffer requests the scores again
    # (buffer/open.py).
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
