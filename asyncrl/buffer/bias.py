"""Selection bias: how trained samples differ from generated samples, by cohorts of the version at issue.

Long samples finish late, so at any moment the finished samples are short, with or without bias. Therefore groups issued under one
version form a cohort, which is analysed once a newer version is out and all of its groups have ended. If a member was given up
before it finished (its group was dropped), only a lower bound of its length is known: its length is censored, and the mean is the
Kaplan-Meier mean. The number of tokens of an unfinished member is estimated as its age times a slow pace, that of the slowest
tenth of finished members.

Groups that the algorithm's own screens dropped (no spread, no pair, truncated) or that a session released are an intended
selection and are left out of both sides; other losses (stale, failed) are not intended. Intervals are 95 %, by a jackknife over
blocks of groups.

Invariant: memory is bounded: closed cohorts are kept only within the window, and a cohort stays open only until a newer version
comes. Pure: `now` is passed in.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.buffer import events as ev
from asyncrl.schema.status import INTENDED

WINDOW_COHORTS, WINDOW_MEMBERS = 20, 4096
"""The figures cover the newest closed cohorts: at most this many cohorts, and at most this many members."""
BLOCKS, LEAST_BLOCKS = 20, 8
T_95 = 2.09
"""Student's t quantile for that number of blocks, in standard errors."""
LOOK_S = 1.0
"""Minimum time between two computations of the figures."""
PACES = 256
"""Number of newest members whose pace is remembered."""
LENGTH_BOUND, REWARD_BOUND = 0.05, 0.25
"""Bias is flagged if the length differs by more than this share, or the reward by more than this part of the spread in groups."""
STALE = "stale"

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(slots=True)
class IssuedGroup:
    """One group, from its issue to the end of its cohort."""

    group_id: int
    size: int
    started_s: float
    lengths: dict[int, int] = field(default_factory=dict)
    """Lengths of members that were generated."""
    censored: dict[int, float] = field(default_factory=dict)
    """Tokens that members had when they were given up."""
    rewards: dict[int, float] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    """Members that failed."""
    outcome: str | None = None
    """Empty: trained; else the reason why not. None: the group has not ended."""

    @property
    def pending(self) -> list[int]:
        """Return the members that are still being generated."""
        return [index for index in range(self.size) if index not in self.lengths and index not in self.gone]


@dataclass(eq=False)
class SelectionBias:
    """The monitor of one run; groups issued before it started are left out.

    Example:
        >>> bias = SelectionBias()
        >>> bias.note("buffer", ev.GroupIssued(0, "p", 1, "generator-0", version=0), 0.0, [])
        >>> bias.note("buffer", ev.SamplesFinished(0, (0,), (((0, 12),),)), 1.0, [])
    """

    _cohorts: dict[int, list[IssuedGroup]] = field(default_factory=dict)
    """Open cohorts, by version of issue."""
    _groups: dict[int, IssuedGroup] = field(default_factory=dict)
    """Groups of open cohorts that have not ended."""
    _closed: deque[list[IssuedGroup]] = field(default_factory=lambda: deque(maxlen=WINDOW_COHORTS))
    _paces: deque[float] = field(default_factory=lambda: deque(maxlen=PACES))
    """Tokens per second of members that finished."""
    _looked_s: float = -math.inf
    _figures: dict[str, float] = field(default_factory=dict)

    def note(self, _: str, event: object, now: float, instructions: Sequence[object] | str) -> None:
        """Record an event of the buffer and its decisions; this is a `Watch`."""
        group = self._groups.get(getattr(event, "group_id", -1))
        match event:
            case ev.GroupIssued():
                group = self._groups[event.group_id] = IssuedGroup(event.group_id, event.size, now)
                cohort = self._cohorts.setdefault(event.version, [])
                cohort.append(group)
                if len(cohort) % WINDOW_MEMBERS == 0:
                    ended = [each.group_id for each in cohort if each.outcome is not None]
                    oldest = set(ended[:-WINDOW_MEMBERS])
                    self._cohorts[event.version] = [each for each in cohort if each.group_id not in oldest]
            case _ if group is None:
                pass
            case ev.GroupPlaced():  # its missing members begin again
                group.started_s = now
            case ev.SamplesFinished(version_counts=counts):
                lengths = [sum(number for _, number in of_sample) for of_sample in counts]
                group.lengths.update(zip(event.indices, lengths, strict=True))
                if now > group.started_s:
                    self._paces.append(max(lengths) / (now - group.started_s))
            case ev.SamplesScored():
                group.rewards.update(zip(event.indices, event.rewards, strict=True))
            case ev.SampleFailed():  # its group may be trained all the same
                group.gone.add(event.index)
        for item in instructions:
            if isinstance(item, ev.GroupMoved) and item.after in {"dropped", "failed"}:
                self._end(item.group_id, item.reason if item.after == "dropped" else "failed", now)
            elif isinstance(item, ev.TakeGroups):
                for group_id in item.group_ids:
                    self._end(group_id, "", now)

    def _end(self, group_id: int, outcome: str, now: float) -> None:
        """Note that a group is trained (empty reason), or why not; members that are still being generated are given up."""
        if (group := self._groups.pop(group_id, None)) is not None:
            group.outcome = outcome
            if pending := group.pending:
                group.censored = dict.fromkeys(pending, self._slow_pace() * (now - group.started_s))

    def figures(self, now: float) -> dict[str, float]:
        """Return the figures of the window, by metric name; empty before the first cohort is closed."""
        if now - self._looked_s >= LOOK_S:
            self._looked_s = now
            newest = max(self._cohorts, default=0)
            for version in sorted(self._cohorts):
                if version < newest and all(group.outcome is not None for group in self._cohorts[version]):
                    self._closed.append(self._cohorts.pop(version))
            while len(self._closed) > 1 and sum(each.size for cohort in self._closed for each in cohort) > WINDOW_MEMBERS:
                self._closed.popleft()
            if self._closed:
                self._figures = self._look(now)
        return self._figures

    def _slow_pace(self) -> float:
        return sorted(self._paces)[len(self._paces) // 10] if self._paces else 0.0

    def _look(self, now: float) -> dict[str, float]:
        closed = [group for cohort in self._closed for group in cohort]
        outcomes = Counter("" if group.outcome is None else group.outcome for group in closed)
        lost = {reason: count / len(closed) for reason, count in outcomes.items() if reason}
        known = {reason: share for reason, share in lost.items() if reason in INTENDED or reason == STALE}
        other = sum(lost.values()) - sum(known.values())
        figures = {f"bias/lost/{reason.replace(' ', '_')}": share for reason, share in known.items()}
        figures |= {"bias/lost/failed": other} if other else {}
        open_ones, pace = [group for cohort in self._cohorts.values() for group in cohort], self._slow_pace()
        for group in open_ones:
            if group.outcome is None:
                group.censored = dict.fromkeys(group.pending, pace * (now - group.started_s))
        figures |= _named("length", mean_length(*_members([*closed, *open_ones])[:3]))
        unscreened = [group for group in closed if group.outcome not in INTENDED]
        figures |= compared(unscreened)
        if len(unscreened) < len(closed):
            kept = [length for group in unscreened for length in group.lengths.values()]
            every = [length for group in closed for length in group.lengths.values()]
            if any(kept):
                figures["bias/screened_length_ratio"] = float(np.mean(kept) / np.mean(every))
        return figures


def mean_length(lengths: Floats, is_seen: Flags, blocks: NDArray[Any]) -> tuple[float, float, float] | None:
    """Return the mean length and its interval, where some lengths are only lower bounds (censored).

    The mean is the area under the Kaplan-Meier curve up to the largest length, seen or censored.

    Args:
        lengths: Lengths of members, in tokens.
        is_seen: Whether each is the full length; False: censored.
        blocks: Number of each member's block, because members of a group are not independent.

    Returns:
        Mean, low, high; None if there are too few blocks.

    Source: Kaplan and Meier 1958; for the jackknife Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 11.
    """
    weights = _left_out(blocks)
    return None if weights is None or not is_seen.any() else _interval(_areas(lengths, is_seen, weights))


def compared(groups: Sequence[IssuedGroup]) -> dict[str, float]:
    """Return how trained groups differ from all ended groups in length and reward, with intervals.

    Returns:
        `bias/length_ratio` and `bias/reward_gap`, each with `_low` and `_high`, and `bias/flagged`; empty if there are too few
        groups, or none was trained.
    """
    num_trained = sum(group.outcome == "" for group in groups)
    lengths, is_seen, blocks, of_trained = _members(groups)
    weights = _left_out(blocks)
    if not num_trained or weights is None or not is_seen.any():
        return {}
    length_ratio, reward_gap = (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)
    if num_trained < len(groups):
        of_all = _areas(lengths, is_seen, weights)
        length_ratio = _interval(_means(lengths, weights * (is_seen & of_trained)) / np.maximum(of_all, 1e-9))
        pairs = [(reward, group.group_id % BLOCKS, group.outcome == "") for group in groups for reward in group.rewards.values()]
        rewards, of_block, is_trained = (np.array(column) for column in zip(*pairs, strict=True))
        of_rewards = _left_out(of_block, np.unique(blocks))
        assert of_rewards is not None, "the blocks are those of the lengths"
        reward_gap = _interval(_means(rewards, of_rewards * is_trained) - _means(rewards, of_rewards))
    within = list[float]()
    for of_group in [group.rewards.values() for group in groups if len(group.rewards) > 1]:
        mean = sum(of_group) / len(of_group)  # numpy takes ten times as long for a few numbers
        within.append(sum((reward - mean) ** 2 for reward in of_group) / len(of_group))
    spread = math.sqrt(sum(within) / len(within)) if within else 0.0
    is_off = _outside(length_ratio, 1.0, LENGTH_BOUND) or (spread > 0 and _outside(reward_gap, 0.0, REWARD_BOUND * spread))
    return _named("length_ratio", length_ratio) | _named("reward_gap", reward_gap) | {"bias/flagged": float(is_off)}


def _outside(interval: tuple[float, float, float], middle: float, bound: float) -> bool:
    return interval[1] > middle + bound or interval[2] < middle - bound


def _named(name: str, interval: tuple[float, float, float] | None) -> dict[str, float]:
    return dict(zip((f"bias/{name}", f"bias/{name}_low", f"bias/{name}_high"), interval, strict=True)) if interval else {}


def _members(groups: Sequence[IssuedGroup]) -> tuple[Floats, Flags, Floats, Flags]:
    """Return for each member its length, whether that is the full length, its block, and whether its group is trained."""
    rows = [
        (length, is_seen, group.group_id % BLOCKS, group.outcome == "")
        for group in groups
        for lengths, is_seen in ((group.lengths, True), (group.censored, False))
        for length in lengths.values()
    ]
    lengths, is_seen, blocks, is_trained = np.array(rows, float).reshape(-1, 4).T
    return lengths, is_seen > 0, blocks, is_trained > 0


def _left_out(blocks: NDArray[Any], names: NDArray[Any] | None = None) -> Floats | None:
    """Return weights [1 + blocks, members]: first with all blocks, then with each block left out; None if there are too few."""
    names = np.unique(blocks) if names is None else names
    if len(names) < LEAST_BLOCKS:
        return None
    weights: Floats = np.concatenate([np.ones((1, len(blocks))), blocks[None, :] != names[:, None]])
    return weights


def _areas(lengths: Floats, is_seen: Flags, weights: Floats) -> Floats:
    """Return the area under the Kaplan-Meier curve for each row of weights."""
    order = np.lexsort((~is_seen, lengths))  # at a tie what ended comes before what is censored
    lengths, is_seen, weights = lengths[order], is_seen[order], weights[:, order]
    at_risk = np.cumsum(weights[:, ::-1], axis=1)[:, ::-1]
    survival = np.cumprod(1 - weights * is_seen / np.maximum(at_risk, 1), axis=1)
    before = np.concatenate([np.ones((len(weights), 1)), survival[:, :-1]], axis=1)
    areas: Floats = (before * np.diff(lengths, prepend=0.0)).sum(axis=1)
    return areas


def _means(values: Floats, weights: Floats) -> Floats:
    means: Floats = (weights * values).sum(axis=1) / np.maximum(weights.sum(axis=1), 1)
    return means


def _interval(estimates: Floats) -> tuple[float, float, float]:
    """Return the first estimate and its interval; the other estimates, each without one block, give the interval."""
    whole, others = float(estimates[0]), estimates[1:]
    error = math.sqrt((len(others) - 1) / len(others) * float(((others - others.mean()) ** 2).sum()))
    return whole, whole - T_95 * error, whole + T_95 * error
