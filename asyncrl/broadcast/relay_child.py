"""Whom a subscriber asks for parts while it fetches one version, decided purely; the learner's answers come from relay_tree.py.

Invariants:
- It asks the learner for its place first, again every ASK_AGAIN_S, and at once when its feeder is lost.
- It waits for a silent feeder SILENT_S at most, for one that lives and has nothing for it STARVED_S, and never goes back to one
  that it lost.
- A version that the learner no longer holds is still taken from another subscriber that feeds it; with none, it is given up.
- With no part from anyone for `stalled_after_s` it is given up.

Called by zeromq_reader.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.broadcast.chunks import MAX_LOST
from asyncrl.broadcast.relay_tree import LEARNER
from asyncrl.broadcast.state import Tick

ASK_AGAIN_S = 1.0
SILENT_S = 2.0
STARVED_S = 8.0


@dataclass(frozen=True, slots=True)
class Placed:
    """The learner says who is to feed us."""

    parent: str
    address: str = ""


@dataclass(frozen=True, slots=True)
class Gone:
    """Who was asked no longer has it: `source` is a name, or LEARNER."""

    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection to a feeder broke."""

    source: str


@dataclass(frozen=True, slots=True)
class Heard:
    """A feeder is alive: it sent a part, or says that we are waiting for one."""

    source: str
    is_part: bool


@dataclass(frozen=True, slots=True)
class AskPlace:
    """Ask the learner for a place; tell it who is lost."""

    lost: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AskFrom:
    """From now on ask `parent` for parts; what was asked of another will not come."""

    parent: str
    address: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The version cannot be had."""

    reason: str
    is_stalled: bool = False
    """Nobody said that it is gone; it does not come."""


ChildEvent = Placed | Gone | Lost | Heard | Tick
ChildInstruction = AskPlace | AskFrom | GiveUp


class RelayChild:
    """One fetch, as seen by who is fed.

    Example:
        >>> child = RelayChild(now=0.0, stalled_after_s=20.0)
        >>> child.handle(Tick(), now=0.0)
        [AskPlace(lost=())]
        >>> child.handle(Placed("a", "tcp://10.0.0.1:5000"), now=0.1)
        [AskFrom(parent='a', address='tcp://10.0.0.1:5000')]
        >>> child.handle(Lost("a"), now=0.2)
        [AskPlace(lost=('a',))]
    """

    def __init__(self, now: float, stalled_after_s: float, lost: tuple[str, ...] = ()) -> None:
        """Begin; `lost` are not to feed us: an earlier attempt was lost to them."""
        self._stalled_after_s = stalled_after_s
        self._asked_s = float("-inf")
        self._heard_s = self._part_s = self._placed_s = now
        self.parent: str | None = None
        """Who feeds us; None: nobody yet."""
        self.lost = lost[-MAX_LOST:]
        self.fed_by: tuple[str, ...] = ()
        """Every subscriber that sent us a part."""

    def handle(self, event: ChildEvent, now: float) -> list[ChildInstruction]:
        """Take `event` in and return what to do now."""
        match event:
            case Placed(parent, address):
                # An answer that was on its way while we lost that very feeder.
                if parent == self.parent or parent in self.lost:
                    return []
                self.parent, self._heard_s, self._placed_s = parent, now, now
                return [AskFrom(parent, address)]
            case Gone(source, reason) if source == LEARNER:
                return [] if self.parent else [GiveUp(reason)]
            case Gone(source) | Lost(source):
                return self._lose(source, now)
            case Heard(source, is_part):
                self._hear(source, is_part, now)
                return []
            case Tick():
                return self._tick(now)

    def check_invariants(self) -> None:
        """Assert what must hold between events."""
        assert self.parent not in self.lost
        assert len(self.lost) <= MAX_LOST

    def _tick(self, now: float) -> list[ChildInstruction]:
        if now - self._part_s > self._stalled_after_s:
            return [GiveUp(f"nothing came for {self._stalled_after_s:g} s", is_stalled=True)]
        is_starved = now - max(self._part_s, self._placed_s) > STARVED_S
        if self.parent and (is_starved or now - self._heard_s > SILENT_S):
            return self._lose(self.parent, now)
        if now - self._asked_s >= ASK_AGAIN_S:
            self._asked_s = now
            return [AskPlace(self.lost)]
        return []

    def _hear(self, source: str, is_part: bool, now: float) -> None:
        if source == self.parent:
            self._heard_s = now
        if is_part:
            self._part_s = now
            if source and source not in self.fed_by:
                self.fed_by = (*self.fed_by, source)[-MAX_LOST:]

    def _lose(self, source: str, now: float) -> list[ChildInstruction]:
        """Forget a feeder, if it is ours, and ask for another at once."""
        if not source or source != self.parent:
            return []
        self.parent = None
        self.lost = (*self.lost, source)[-MAX_LOST:]
        self._asked_s = now
        return [AskPlace(self.lost)]
