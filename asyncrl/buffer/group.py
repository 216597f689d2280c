"""One group as the state machine knows it: its members' progress and how old its tokens are."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    ready_s: float = 0.0
    last_failure: str = ""
    oldest: int = 0
    """Of the members that may be trained; `version` while some are still being generated."""
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
        """Return the members that can be trained."""
        return tuple(index for index, state in enumerate(self.members) if state == "scored")

    @property
    def trainable_counts(self) -> list[VersionCounts]:
        """Return the version counts of the scored members, by index."""
        return [counts for index in self.scored if (counts := self.version_counts[index]) is not None]

    def refresh_age(self) -> None:
        """Work `oldest` and `newest` out anew."""
        held = [
            counts
            for state, counts in zip(self.members, self.version_counts, strict=True)
            if counts is not None and state in {"generated", "scored"}
        ]
        self.newest = max((counts[-1][0] for counts in held), default=self.version)
        oldest = min((counts[0][0] for counts in held), default=self.version)
        self.oldest = min(oldest, self.version) if "pending" in self.members else oldest
