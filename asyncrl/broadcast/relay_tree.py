"""Who feeds whom with one version, decided purely by the learner, so that its uplink is paid about `fanout` times.

The learner feeds the first `fanout` subscribers, each of them as many others with what it has already, and so on; late ones are
fed by those that are whole. Everyone asks for its place again every second (`PlaceAsked`), which is also its sign of life.

Invariants:
- Who feeds has the version or is getting it; nobody feeds itself, directly or by others: every chain ends at the learner, at one
  that is whole, or at one that lost its feeder and will ask again.
- Nobody feeds more than `fanout` others. The learner does only where no other can feed one, or one lost MAX_TRIES feeders
  (better paid twice than starved), and for one more at a time where a feeder is slow.
- Who reported a feeder lost is not sent to it again; others are not either, until it asks for its own place.
- One that is not whole and silent for SILENT_AFTER_S is forgotten, and those it fed find another.
- At most MAX_MEMBERS are remembered; the oldest is forgotten first.

Called by zeromq_desk.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from asyncrl.broadcast.state import Tick

LEARNER = ""
SILENT_AFTER_S = 3.0
HOLD_S = 3.0
"""A place is kept at least this long, unless its feeder is lost."""
SLOW_BYTES_PER_S = 4 << 20
"""A feeder that gets less than this is a reason to look for another: a network this slow is none for weights."""
MAX_TRIES = 2
"""Who lost this many feeders is fed by the learner."""
MAX_MEMBERS = 4096
_LOOPBACK = ("tcp://127.", "tcp://localhost", "tcp://[::1]", "ipc:", "inproc:")


@dataclass(frozen=True, slots=True)
class PlaceAsked:
    """A subscriber is alive, has so much of the version, and asks who is to feed it."""

    subscriber: str
    address: str = ""
    """Where it serves; empty: it feeds nobody."""
    host: str = ""
    lost: tuple[str, ...] = ()
    have_bytes: int = 0
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """A subscriber no longer has or wants the version."""

    subscriber: str


@dataclass(frozen=True, slots=True)
class Place:
    """`subscriber` is to ask `parent` (LEARNER: the learner) at `address`."""

    subscriber: str
    parent: str
    address: str = ""


@dataclass(slots=True)
class _Member:
    heard_s: float
    address: str = ""
    host: str = ""
    have_bytes: int = 0
    is_whole: bool = False
    is_lost: bool = False
    """Somebody found it silent and it has not asked since: nobody is sent to it."""
    lost: frozenset[str] = frozenset()
    parent: str | None = None
    placed_s: float = 0.0
    placed_bytes: int = 0
    """What it had when it got its place."""
    children: set[str] = field(default_factory=set)


class RelayTree:
    """The feeders of one version.

    Example:
        >>> tree = RelayTree(fanout=1)
        >>> tree.handle(PlaceAsked("a", address="tcp://10.0.0.1:5000"), now=0.0)
        [Place(subscriber='a', parent='', address='')]
        >>> tree.handle(PlaceAsked("b", address="tcp://10.0.0.2:5000"), now=0.1)
        [Place(subscriber='b', parent='a', address='tcp://10.0.0.1:5000')]
    """

    def __init__(self, fanout: int) -> None:
        self._fanout = fanout
        self._members: dict[str, _Member] = {}
        self._fed: set[str] = set()
        """By the learner."""
        self._beyond: set[str] = set()
        """Those of them that it feeds beyond `fanout`."""
        self._num_paid = 0
        """Whole versions that the learner sent."""

    def __len__(self) -> int:
        """Return the number of subscribers remembered."""
        return len(self._members)

    @property
    def num_fed_by_learner(self) -> int:
        """Subscribers the learner feeds itself."""
        return len(self._fed)

    def handle(self, event: PlaceAsked | Left | Tick, now: float) -> list[Place]:
        """Take `event` in and return the place of who asked for one."""
        match event:
            case PlaceAsked(subscriber, is_whole=True):
                self._num_paid += self._hear(event, now).parent == LEARNER and subscriber not in self._beyond
                self._unplace(subscriber)
                return []
            case PlaceAsked(subscriber):
                member = self._hear(event, now)
                if member.parent is None:
                    self._place(subscriber, member, now)
                else:
                    self._leave_slow(subscriber, member, now)
                assert member.parent is not None
                return [Place(subscriber, member.parent, self._address(member.parent))]
            case Left(subscriber):
                self._forget(subscriber)
            case Tick():
                for name in [name for name, member in self._members.items() if self._is_silent(member, now)]:
                    self._forget(name)
        return []

    def check_invariants(self) -> None:
        """Assert what must hold between events."""
        assert len(self._members) <= MAX_MEMBERS
        assert len(self._fed - self._beyond) <= self._fanout or not self._fanout, "the learner feeds more than it should"
        assert self._beyond <= self._fed
        assert {name for name, member in self._members.items() if member.parent == LEARNER} == self._fed
        for name, member in self._members.items():
            assert len(member.children) <= self._fanout, f"{name} feeds too many"
            assert not member.children or member.address, f"{name} feeds and does not serve"
            assert name not in islice(self._ancestors(name), 1, len(self._members) + 1), f"{name} feeds itself"
            assert all(self._members[child].parent == name for child in member.children)
            assert not member.is_whole or member.parent is None, f"{name} is whole and is fed"
            assert member.parent is None or member.parent not in member.lost, f"{name} was sent to one that it lost"
            assert not member.parent or name in self._members[member.parent].children

    def _hear(self, event: PlaceAsked, now: float) -> _Member:
        """Note what a member said of itself and of those it lost."""
        member = self._members.get(event.subscriber)
        if member is None:
            if len(self._members) >= MAX_MEMBERS:
                self._forget(next(iter(self._members)))
            member = self._members[event.subscriber] = _Member(now)
        newly_lost = set(event.lost) - member.lost
        member.heard_s, member.is_lost, member.lost = now, False, frozenset(event.lost)
        member.have_bytes, member.is_whole = event.have_bytes, event.is_whole
        if event.address != member.address:
            self._orphan(member)
        member.address, member.host = event.address, event.host
        for name in newly_lost & self._members.keys() - {event.subscriber}:
            self._members[name].is_lost = True
        if member.parent in member.lost:
            self._unplace(event.subscriber)
        return member

    def _place(self, name: str, member: _Member, now: float) -> None:
        """Give `name` a feeder: the learner for the first `fanout`, then the best member, else the learner all the same."""
        is_first = not self._fanout or len(self._fed) + self._num_paid < self._fanout
        tried_enough = len(member.lost) >= MAX_TRIES
        best = None if is_first or tried_enough else self._best(name, member, now)
        self._feed(name, best or LEARNER, now)

    def _leave_slow(self, name: str, member: _Member, now: float) -> None:
        """Where the feeder of `name` is slow, give it one far ahead of that, or else the learner's one spare place."""
        if not member.parent or now - member.placed_s < HOLD_S:
            return
        feeder = self._members[member.parent]
        if feeder.is_whole or not _is_slow(feeder, now):
            return
        if ahead := self._best(name, member, now, above_bytes=2 * feeder.have_bytes):
            self._feed(name, ahead, now)
        elif len(self._fed) <= self._fanout:
            self._feed(name, LEARNER, now)

    def _feed(self, name: str, parent: str, now: float) -> None:
        """Let `parent` feed `name` from now on."""
        self._unplace(name)
        if parent == LEARNER:
            if self._fanout and len(self._fed) + self._num_paid >= self._fanout:
                self._beyond.add(name)
            self._fed.add(name)
        else:
            self._members[parent].children.add(name)
        member = self._members[name]
        member.parent, member.placed_s, member.placed_bytes = parent, now, member.have_bytes

    def _best(self, name: str, member: _Member, now: float, above_bytes: int = -1) -> str | None:
        """Return who is best to feed `name`: heard of lately, not slow, near to the learner, far on; None where nobody can."""
        ranked = [
            ((now - other.heard_s > SILENT_AFTER_S, _is_slow(other, now), self._depth(other_name), -other.have_bytes), other_name)
            for other_name, other in self._members.items()
            if other.have_bytes > above_bytes and self._can_feed(other_name, other, name, member)
        ]
        return min(ranked)[1] if ranked else None

    def _can_feed(self, feeder_name: str, feeder: _Member, name: str, member: _Member) -> bool:
        return (
            bool(feeder.address)
            and len(feeder.children) < self._fanout
            and not feeder.is_lost
            and (feeder.is_whole or feeder.parent is not None)
            and feeder_name not in member.lost
            and (feeder.host == member.host or not feeder.address.startswith(_LOOPBACK))
            and name not in self._ancestors(feeder_name)
        )

    def _depth(self, name: str) -> int:
        return sum(1 for _ in self._ancestors(name))

    def _address(self, name: str) -> str:
        return self._members[name].address if name else ""

    def _ancestors(self, name: str) -> Iterator[str]:
        """Yield `name`, its feeder, its feeder's feeder, until the learner (not itself) or one that has no feeder."""
        current: str | None = name
        while current:
            yield current
            current = self._members[current].parent

    def _is_silent(self, member: _Member, now: float) -> bool:
        return not member.is_whole and now - member.heard_s > SILENT_AFTER_S

    def _unplace(self, name: str) -> None:
        parent = self._members[name].parent
        if parent == LEARNER:
            self._fed.discard(name)
            self._beyond.discard(name)
        elif parent is not None:
            self._members[parent].children.discard(name)
        self._members[name].parent = None

    def _orphan(self, member: _Member) -> None:
        for child in member.children:
            self._members[child].parent = None
        member.children.clear()

    def _forget(self, name: str) -> None:
        if name in self._members:
            self._unplace(name)
            self._orphan(self._members.pop(name))


def _is_slow(member: _Member, now: float) -> bool:
    """Whether it is being fed and has got too little of late."""
    waited_s = now - member.placed_s
    is_fed = member.parent is not None and not member.is_whole
    return is_fed and waited_s >= HOLD_S and member.have_bytes - member.placed_bytes < SLOW_BYTES_PER_S * waited_s
