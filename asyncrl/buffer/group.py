"""One group as the state machine knows it: its members' progress and how old its tokens are."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.algorithms.screening import Member, Screen, surely_trained, trained_members
from asyncrl.buffer.events import GroupState, MemberState
from asyncrl.buffer.staleness import VersionCounts


@dataclass(slots=True)
class Group:
    """A live group: running, scoring or ready."""

    group_id: int
    prompt_id: str
    size: int
    version: int
    """No token of the group is older; live on the generator when it was issued."""
    issued_s: float
    generator: str = ""
    """Who generates it now; empty while nobody does."""
    attempt: int = 0
    losses: int = 0
    """Generators that died over it."""
    retries: int = 0
    """Failed groups that had this prompt before."""
    external: bool = False
    state: GroupState = "running"
    members: list[MemberState] = field(default_factory=list)
    version_counts: list[VersionCounts | None] = field(default_factory=list)
    rewards: dict[int, float] = field(default_factory=dict)
    """Of scored members."""
    truncated: set[int] = field(default_factory=set)
    """Members cut off by the length limit."""
    trained: tuple[int, ...] | None = None
    """Members whose tokens will be trained; None before the group is ready."""
    ready_s: float = 0.0
    last_failure: str = ""
    oldest: int = 0
    """Of the members that may be trained (once ready: that are); `version` while some are still being generated."""
    newest: int = 0

    def __post_init__(self) -> None:
        if not self.members:
            self.members = ["pending"] * self.size
            self.version_counts = [None] * self.size
        self.refresh_age()

    @property
    def pending(self) -> tuple[int, ...]:
        """Return the members still to be generated."""
        return tuple(index for index, state in enumerate(self.members) if state == "pending")

    @property
    def unscored(self) -> tuple[int, ...]:
        """Return the members generated and not yet scored."""
        return tuple(index for index, state in enumerate(self.members) if state == "generated")

    @property
    def scored(self) -> tuple[int, ...]:
        """Return the members that have a reward."""
        return tuple(index for index, state in enumerate(self.members) if state == "scored")

    @property
    def trainable_counts(self) -> list[VersionCounts]:
        """Return the version counts of the members that are trained, by index."""
        trained = self.scored if self.trained is None else self.trained
        return [counts for index in trained if (counts := self.version_counts[index]) is not None]

    @property
    def judged(self) -> tuple[Member, ...]:
        """Return the scored members as screening sees them."""
        return tuple(Member(index, self.rewards.get(index, 0.0), index in self.truncated) for index in self.scored)

    def shortage(self, min_members: int, greedy: int) -> str:
        """Return why too few members can be trained, or nothing.

        Args:
            min_members: That must be scored; at most the size counts, the greedy baseline left out.
            greedy: Index of that baseline; under 0: there is none.
        """
        has_baseline = greedy >= 0
        if has_baseline and greedy not in self.scored:
            return f"no greedy baseline: {self.last_failure or 'it has no such member'}"
        needed = max(1, min(min_members, self.size - has_baseline))
        return (self.last_failure or "no reason given") if len(self.scored) - has_baseline < needed else ""

    def is_past_saving(self, oldest_allowed: int, screen: Screen) -> bool:
        """Return whether members are still to be generated, and one that will be trained holds a token older than allowed."""
        if "pending" not in self.members:
            return False
        surely = (self.version_counts[index] for index in surely_trained(self.judged, screen))
        return any(counts is not None and counts[0][0] < oldest_allowed for counts in surely)

    def settle(self, screen: Screen) -> None:
        """Note which members are trained, and how old those are."""
        self.trained = trained_members(self.judged, screen)
        self.refresh_age()

    def refresh_age(self) -> None:
        """Work `oldest` and `newest` out anew."""
        held = [
            counts
            for index, (state, counts) in enumerate(zip(self.members, self.version_counts, strict=True))
            if counts is not None and (state in {"generated", "scored"} if self.trained is None else index in self.trained)
        ]
        self.newest = max((counts[-1][0] for counts in held), default=self.version)
        oldest = min((counts[0][0] for counts in held), default=self.version)
        self.oldest = min(oldest, self.version) if "pending" in self.members else oldest
