"""What the buffer is configured with, what it keeps of a step, and what it counts: plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.algorithms.screening import Screen

MOST_REASONS = 32
OTHER_REASONS = "other reasons"
"""What is counted once there are that many: the words of an error may be new each time, and counts are kept for the whole run."""
Policy = Literal["wait", "drop", "mask"]
STALE = "stale"
"""The reason of a group that would have been older than eta."""


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """What the buffer is configured with."""

    groups_per_step: int
    """B."""
    max_staleness: int
    """Eta."""
    policy: Policy = "wait"
    min_group_members: int = 1
    """Scored members that a group needs; at most its size counts."""
    max_group_retries: int = 3
    """How often a group is handed out again after its generator died, and a failed group's prompt issued again."""
    reissue_dropped: bool = True
    screen: Screen = field(default_factory=Screen)
    """Which groups are worth a step."""
    max_resamples: int = 20
    """Groups the screen may drop one after the other, in multiples of B; then it lets pass what comes."""


@dataclass(slots=True)
class StepRecord:
    """The groups of one step, for ever the same."""

    step: int
    group_ids: tuple[int, ...]
    mask_below: int
    max_staleness: int = 0
    """Of any token it trains."""
    trained: bool = False
    trained_before: bool = False
    """It was trained at least once; repeating it is a replay."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Groups per state; `issued` is the sum of all others."""

    issued: int = 0
    running: int = 0
    scoring: int = 0
    ready: int = 0
    taken: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """By reason."""
    failed: dict[str, int] = field(default_factory=dict)
    """By reason."""

    @property
    def held(self) -> int:
        """Return the places held: everything but dropped and failed."""
        return self.running + self.scoring + self.ready + self.taken + self.trained

    @property
    def total(self) -> int:
        """Return the sum over all states, which must equal `issued`."""
        return self.held + sum(self.dropped.values()) + sum(self.failed.values())

    @property
    def by_state(self) -> dict[str, int]:
        """Return the groups of each state that has any, whatever the reason."""
        plain = {state: getattr(self, state) for state in ("running", "scoring", "ready", "taken", "trained")}
        ended = {"dropped": sum(self.dropped.values()), "failed": sum(self.failed.values())}
        return {state: count for state, count in (plain | ended).items() if count}


class ReasonCounts:
    """Groups by reason, those of the rarest together where there are too many.

    Args:
        counts: What was counted before.
    """

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        everything = Counter(counts or {})
        self.counts = Counter(dict(everything.most_common(MOST_REASONS)))
        if rest := everything.total() - self.counts.total():
            self.counts[OTHER_REASONS] += rest

    def add(self, reason: str) -> None:
        """Count one group."""
        known = reason in self.counts or len(self.counts) < MOST_REASONS
        self.counts[reason if known else OTHER_REASONS] += 1
