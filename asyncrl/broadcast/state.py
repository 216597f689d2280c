"""Version hand-off, decided purely: which slot takes the next version, and which version is fetched next.

Two machines, both `handle(event, now) -> list[instruction]`:
- `PublisherState`, the learner's slots. Every requested version ends in exactly one of: committed (and later retired),
  superseded (a newer one took its slot before its commit began) or failed. The learner never waits: with one slot being
  committed there is always another to write to. Announced versions only grow.
- `SubscriberState`, a generator. One version is live, one at most is on its way; the latest announcement wins (one learner's only
  grow; a learner that went back to a checkpoint starts lower); nothing at or below the live version is fetched; a failed fetch is
  repeated with back-off, or left for a later announcement if there is one.

Called by publisher.py and subscriber.py; board.py knows who fetches.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.errors import BroadcastError

# -- publisher -----------------------------------------------------------------------------------------------------------

SlotPhase = Literal["free", "staged", "committing", "committed"]


@dataclass(frozen=True, slots=True)
class PublishRequested:
    """The learner has a new version; `busy_slots` are being fetched from."""

    version: int
    busy_slots: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Committed:
    """The version can be fetched."""

    version: int


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """The version could not be made fetchable."""

    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Stage:
    """Copy `version` into `slot`, over whatever was there."""

    slot: int
    version: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Hash `version` (behind its copy, where that is still going on) and make it fetchable."""

    slot: int
    version: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell everyone that `version` can be fetched."""

    version: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget `version`: it was never announced and never will be."""

    version: int
    reason: str


PublisherEvent = PublishRequested | Committed | CommitFailed
PublisherInstruction = Stage | Commit | Announce | Drop


@dataclass(slots=True)
class _Slot:
    phase: SlotPhase = "free"
    version: int = -1


class PublisherState:
    """The learner's slots.

    Example:
        >>> state = PublisherState(num_slots=2, keeps_slots=True)
        >>> state.handle(PublishRequested(1), now=0.0)
        [Stage(slot=0, version=1), Commit(slot=0, version=1)]
        >>> state.handle(Committed(1), now=0.1)
        [Announce(version=1)]
    """

    def __init__(self, num_slots: int, keeps_slots: bool) -> None:
        assert num_slots >= 2, "with one slot the learner would wait for every commit"
        self._slots = [_Slot() for _ in range(num_slots)]
        self._keeps_slots = keeps_slots
        self._story: deque[str] = deque(maxlen=20)
        self.newest_requested = -1
        self.newest_announced = -1

    @property
    def num_unfinished(self) -> int:
        """Versions staged or being committed."""
        return sum(slot.phase in {"staged", "committing"} for slot in self._slots)

    def handle(self, event: PublisherEvent, now: float) -> list[PublisherInstruction]:
        """Take `event` in and return what to do now, in order.

        Raises:
            BroadcastError: A version was requested that is not newer than the last.
        """
        self._story.append(f"{now:.3f} {event}")
        match event:
            case PublishRequested():
                return self._request(event)
            case Committed(version):
                slot = self._committing(version)
                slot.phase = "committed" if self._keeps_slots else "free"
                slot.version = version if self._keeps_slots else -1
                self.newest_announced = version
                return [Announce(version), *self._next_commit()]
            case CommitFailed(version, reason):
                slot = self._committing(version)
                slot.phase, slot.version = "free", -1
                return [Drop(version, reason), *self._next_commit()]

    def check_invariants(self) -> None:
        """Assert what must hold between events."""
        held = [slot.version for slot in self._slots if slot.phase != "free"]
        assert len(held) == len(set(held)), self._told("a version is in two slots")
        assert sum(slot.phase == "committing" for slot in self._slots) <= 1, self._told("two commits at once")
        assert self.num_unfinished != 1 or self.is_committing, self._told("a staged version waits for nobody")
        assert self.newest_announced <= self.newest_requested, self._told("announced what was never requested")
        assert all(slot.version <= self.newest_announced for slot in self._slots if slot.phase == "committed"), self._told(
            "committed and not announced"
        )

    @property
    def is_committing(self) -> bool:
        """Whether a version is on its way from its slot to the medium."""
        return any(slot.phase == "committing" for slot in self._slots)

    def only_busy_left(self, busy_slots: frozenset[int]) -> bool:
        """Return whether a request now would take a slot that is being read, and none would after the commit under way."""
        open_slots = {index for index, slot in enumerate(self._slots) if slot.phase != "committing"}
        return self.is_committing and open_slots <= busy_slots

    def _request(self, event: PublishRequested) -> list[PublisherInstruction]:
        if event.version <= self.newest_requested:
            raise BroadcastError(
                f"version {event.version} was published after version {self.newest_requested}; versions only grow, a learner "
                f"that goes back to a checkpoint needs a new publisher"
            )
        index = self._choose_slot(event.busy_slots)
        slot = self._slots[index]
        dropped = [Drop(slot.version, f"superseded by {event.version}")] if slot.phase == "staged" else []
        slot.phase, slot.version = "staged", event.version
        self.newest_requested = event.version
        return [*dropped, Stage(index, event.version), *self._next_commit()]

    def _choose_slot(self, busy_slots: frozenset[int]) -> int:
        """Free before superseded before committed; of the committed, one nobody fetches from, and the oldest."""
        rank = {"free": 0, "staged": 1, "committed": 2}
        open_slots = [index for index, slot in enumerate(self._slots) if slot.phase != "committing"]
        return min(
            open_slots,
            key=lambda i: (rank[self._slots[i].phase], i in busy_slots, self._slots[i].version, i),
        )

    def _next_commit(self) -> list[PublisherInstruction]:
        staged = [(slot.version, index) for index, slot in enumerate(self._slots) if slot.phase == "staged"]
        if self.is_committing or not staged:
            return []
        version, index = min(staged)
        self._slots[index].phase = "committing"
        return [Commit(index, version)]

    def _committing(self, version: int) -> _Slot:
        for slot in self._slots:
            if slot.phase == "committing" and slot.version == version:
                return slot
        raise AssertionError(self._told(f"version {version} is not being committed"))

    def _told(self, what: str) -> str:
        return f"{what}: {self._slots}; " + " | ".join(self._story)


# -- subscriber ------------------------------------------------------------------------------------------------------------

MAX_ATTEMPTS = 8
FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Announced:
    """A version can be fetched."""

    version: int


@dataclass(frozen=True, slots=True)
class FetchDone:
    """All bytes of the version arrived and its fingerprint matches: the engine's turn; no fetch starts before it went live."""

    version: int


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The version did not arrive, or turned out damaged or overwritten when the engine read it from where it lies."""

    version: int
    reason: str
    is_final: bool = False
    """Whether another attempt under the same announcement is of no use."""


@dataclass(frozen=True, slots=True)
class WentLive:
    """The engine samples with the version now; the staging buffer is free again."""

    version: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch `version` now."""

    version: int


@dataclass(frozen=True, slots=True)
class RetryAt:
    """Send a Tick at this time."""

    at_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """`version` is gone or failed MAX_ATTEMPTS times, and nothing else was announced; the live version goes on serving."""

    version: int
    reason: str


SubscriberEvent = Announced | FetchDone | FetchFailed | WentLive | Tick
SubscriberInstruction = Fetch | RetryAt | GiveUp


@dataclass(slots=True)
class SubscriberState:
    """A generator's side of the hand-off.

    Example:
        >>> state = SubscriberState()
        >>> state.handle(Announced(3), now=0.0), state.handle(Tick(), now=0.0)
        ([], [Fetch(version=3)])
        >>> state.handle(Announced(4), now=0.1), state.handle(FetchFailed(3, "overwritten"), now=0.1)
        ([], [])
        >>> state.handle(Tick(), now=0.1)
        [Fetch(version=4)]
    """

    live: int = -1
    wanted: int = -1
    """Version of the latest announcement that was above the live one."""
    fetching: int | None = None
    staged: int | None = None
    """Whole in the staging buffer, not yet live."""
    attempts: int = 0
    """Failed fetches of `wanted` since its latest announcement."""
    announced_while_fetching: bool = False
    """The version on its way was overtaken by an announcement, perhaps of the same version from another place."""
    retry_at_s: float | None = None
    given_up: bool = False
    _reasons: dict[str, None] = field(default_factory=dict)
    """Of the failed fetches of `wanted`, each once: a transfer that was damaged and then timed out was damaged."""
    _story: deque[str] = field(default_factory=lambda: deque(maxlen=20))

    def handle(self, event: SubscriberEvent, now: float) -> list[SubscriberInstruction]:
        """Take `event` in and return what to do now. Only a Tick starts a fetch: send one when free to carry it out."""
        self._story.append(f"{now:.3f} {event}")
        match event:
            case Announced(version):
                self._want(version)
            case FetchDone(version):
                self._expect(self.fetching == version, f"version {version} is not being fetched")
                self.fetching, self.staged = None, version
            case FetchFailed(version, reason, is_final):
                self._expect(version in {self.fetching, self.staged}, f"version {version} is neither being fetched nor staged")
                self.fetching = self.staged = None
                if not self.announced_while_fetching:
                    return self._after_failure(reason, is_final, now)
            case WentLive(version):
                self._expect(self.staged == version, f"version {version} is not staged")
                self.staged, self.live = None, version
            case Tick():
                return self._next_fetch(now)
        return []

    def check_invariants(self) -> None:
        """Assert what must hold between events."""
        self._expect(self.fetching is None or self.staged is None, "the staging buffer is written to while the engine reads it")
        for version in (self.fetching, self.staged):
            self._expect(version is None or self.live < version, "on its way and not newer than live")
        self._expect(self.attempts <= MAX_ATTEMPTS, "tried too often")

    @property
    def _is_occupied(self) -> bool:
        return self.fetching is not None or self.staged is not None

    def _want(self, version: int) -> None:
        if version <= self.live:
            return
        self.wanted, self.attempts, self.retry_at_s, self.given_up = version, 0, None, False
        self._reasons.clear()
        self.announced_while_fetching = self._is_occupied

    def _after_failure(self, reason: str, is_final: bool, now: float) -> list[SubscriberInstruction]:
        self.attempts += 1
        self._reasons[reason] = None
        if is_final or self.attempts >= MAX_ATTEMPTS:
            self.given_up = True
            return [GiveUp(self.wanted, "; then ".join(self._reasons))]
        self.retry_at_s = now + min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** (self.attempts - 1))
        return [RetryAt(self.retry_at_s)]

    def _next_fetch(self, now: float) -> list[SubscriberInstruction]:
        if self._is_occupied or self.given_up or self.wanted <= self.live:
            return []
        if self.retry_at_s is not None and now < self.retry_at_s:
            return [RetryAt(self.retry_at_s)]
        self.fetching, self.announced_while_fetching, self.retry_at_s = self.wanted, False, None
        return [Fetch(self.wanted)]

    def _expect(self, holds: bool, what: str) -> None:
        assert holds, f"{what}: {self}"
