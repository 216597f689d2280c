"""Who fetches what from the learner, decided purely, for media that can see it.

Invariants:
- A version in use is worth sparing while its subscriber keeps asking, PIN_LIMIT_S at most: a slow generator is not starved
  by a fast learner, a dead one holds nothing.
- At most MAX_SUBSCRIBERS are remembered; the oldest is forgotten first.

Called by zeromq_desk.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.broadcast.state import Tick

SILENT_AFTER_S = 3.0
"""A subscriber that asked for nothing for this long no longer spares its slot."""
PIN_LIMIT_S = 120.0
"""No fetch spares its slot for longer than this."""
MAX_SUBSCRIBERS = 4096


@dataclass(frozen=True, slots=True)
class ChunkAsked:
    """A subscriber asked for a part of a version."""

    subscriber: bytes
    version: int


@dataclass(frozen=True, slots=True)
class FetchOver:
    """It asked for the last part, or nothing can be sent to it any more."""

    subscriber: bytes


@dataclass(slots=True)
class _Fetch:
    version: int
    since_s: float
    asked_s: float


class SubscriberBoard:
    """Who fetches which version, bounded in number and in time."""

    def __init__(self) -> None:
        self._fetches: dict[bytes, _Fetch] = {}

    def __len__(self) -> int:
        """Return the number of subscribers remembered."""
        return len(self._fetches)

    def handle(self, event: ChunkAsked | FetchOver | Tick, now: float) -> None:
        """Take `event` in; who is forgotten is welcome to ask again."""
        match event:
            case ChunkAsked(subscriber, version):
                fetch = self._fetches.get(subscriber)
                if fetch is None or fetch.version != version:
                    self._fetches[subscriber] = _Fetch(version, now, now)
                else:
                    fetch.asked_s = now
                if len(self._fetches) > MAX_SUBSCRIBERS:
                    del self._fetches[next(iter(self._fetches))]
            case FetchOver(subscriber):
                self._fetches.pop(subscriber, None)
            case Tick():
                is_silent = [name for name, fetch in self._fetches.items() if now - fetch.asked_s > SILENT_AFTER_S]
                for name in is_silent:
                    del self._fetches[name]

    def versions_in_use(self, now: float) -> frozenset[int]:
        """Return the versions worth sparing at `now`."""
        return frozenset(
            fetch.version
            for fetch in self._fetches.values()
            if now - fetch.asked_s <= SILENT_AFTER_S and now - fetch.since_s <= PIN_LIMIT_S
        )

    def check_invariants(self) -> None:
        """Assert what must hold between events."""
        assert len(self._fetches) <= MAX_SUBSCRIBERS
        assert all(fetch.since_s <= fetch.asked_s for fetch in self._fetches.values())
