"""What the `zeromq` medium says on the wire, and the pure book of a download: which parts to ask for, and when to ask again.

Wire: a request is one frame. A `ChunkRequest` is answered, for each part of what it asks for, by a `ChunkReply` and the bytes
(none where the reply says `gone` or `waiting`), a `PlaceRequest`, which only the learner takes, by a `PlaceReply`. What is
fetched has a number and a name: a version and its fingerprint, or BLOB and the name of a delta.

Invariants of `Download`:
- At most `window` parts are asked for and not yet here: that bounds memory on both sides, whatever the network does. Half a
  window at once, in one request where they follow one another: each request wakes three threads.
- A part is asked for again once nothing at all has come for `resend_s`, or when what was asked for is known to be lost; a part
  that comes twice is taken once.
- Every byte is taken exactly once.

Called by zeromq_server.py, zeromq_connection.py, zeromq_fetch.py.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

NonNegative = Annotated[int, Meta(ge=0, le=2**62)]
Name = Annotated[str, Meta(max_length=64)]
MAX_REQUEST_BYTES = 1024
MAX_LOST = 16
UNDECODABLE = (msgspec.DecodeError, RecursionError)
"""What decoding bytes from outside raises; the second where they are nested too deeply."""
BLOB = 2**62
"""In place of a version: a delta, by its name."""


class ChunkRequest(msgspec.Struct, frozen=True, tag="chunk_request", forbid_unknown_fields=True):
    """Subscriber to whoever feeds it: send me these bytes of this version, part by part."""

    version: NonNegative
    fingerprint: Name
    """Tells two versions of one number apart, after a learner went back to a checkpoint; of a delta, its name."""
    offset: NonNegative
    num_bytes: Annotated[int, Meta(ge=1, le=2**40)]


class ChunkReply(msgspec.Struct, frozen=True, tag="chunk_reply", omit_defaults=True):
    """Back to the subscriber: here it is, or why not."""

    version: int
    offset: int
    num_bytes: int
    gone: str = ""
    """Not empty: it never will be here, and why."""
    waiting: bool = False
    """It is not here yet and will be sent once it is: a sign of life."""


class PlaceRequest(msgspec.Struct, frozen=True, tag="place_request", forbid_unknown_fields=True, omit_defaults=True):
    """Subscriber to learner, every second of a fetch: who is to feed me, and what I can feed others."""

    version: NonNegative
    fingerprint: Name
    subscriber: Annotated[str, Meta(min_length=1, max_length=16)]
    """Its own name, made up when it started."""
    address: Annotated[str, Meta(max_length=128)] = ""
    """Where it serves what it has; empty: nowhere."""
    host: Name = ""
    """Its machine: a loopback address is told to nobody elsewhere."""
    lost: Annotated[tuple[Annotated[str, Meta(max_length=16)], ...], Meta(max_length=MAX_LOST)] = ()
    """Those that fed it and fell silent, lost the version, or fed it damaged bytes."""
    have_bytes: NonNegative = 0
    is_whole: bool = False
    """The fetch is over; it can feed others, and needs nobody."""


class PlaceReply(msgspec.Struct, frozen=True, tag="place_reply", omit_defaults=True):
    """Learner to subscriber: ask this one for parts."""

    version: int
    parent: str = ""
    """Name of a subscriber; empty: the learner itself."""
    address: str = ""
    gone: str = ""
    """Not empty: the learner no longer holds the version, and what it does hold."""


def parts_of(request: ChunkRequest, part_bytes: int) -> list[ChunkRequest]:
    """Return one request for each part that `request` asks for."""
    end = request.offset + request.num_bytes
    return [
        ChunkRequest(request.version, request.fingerprint, offset, min(part_bytes, end - offset))
        for offset in range(request.offset, end, part_bytes)
    ]


class Download:
    """One version on its way.

    Example:
        >>> download = Download(total_bytes=10, chunk_bytes=4, window=2, resend_s=1.0)
        >>> download.to_ask(now=0.0)
        [(0, 8)]
        >>> download.take(0, 4), download.to_ask(now=0.1)
        (True, [(8, 2)])
    """

    def __init__(self, total_bytes: int, chunk_bytes: int, window: int, resend_s: float) -> None:
        self._total_bytes = total_bytes
        self._chunk_bytes = chunk_bytes
        self._window = window
        self._resend_s = resend_s
        self._asked: set[int] = set()
        self._lost: set[int] = set()
        self._next_offset = 0
        self._taken: set[int] = set()
        self._last_s = float("-inf")
        self._has_moved = True
        self.have_bytes = 0
        self.whole_until = 0
        """Everything before this offset is here."""

    @property
    def is_done(self) -> bool:
        """Whether every byte is here."""
        return self.whole_until == self._total_bytes

    def to_ask(self, now: float) -> list[tuple[int, int]]:
        """Return (offset, bytes) of what to ask for now, whole parts each, and note it as asked."""
        if self._has_moved:
            self._last_s, self._has_moved = now, False
        elif now - self._last_s >= self._resend_s:
            self.lose()
        if len(self._asked) > self._window // 2:
            return []
        asking = sorted(self._lost)[: self._window - len(self._asked)]
        while len(self._asked) + len(asking) < self._window and self._next_offset < self._total_bytes:
            asking.append(self._next_offset)
            self._next_offset += self._chunk_bytes
        if asking:
            self._last_s = now
        self._asked.update(asking)
        self._lost.difference_update(asking)
        return self._runs(asking)

    def lose(self) -> None:
        """Note that nothing of what was asked for will come: it is to be asked for again."""
        self._lost |= self._asked
        self._asked.clear()

    def wants(self, offset: int, num_bytes: int) -> bool:
        """Return whether this part was asked for and is not yet here."""
        return (offset in self._asked or offset in self._lost) and num_bytes == self._size(offset)

    def take(self, offset: int, num_bytes: int) -> bool:
        """Return whether this part is wanted; if so, note it as here."""
        if not self.wants(offset, num_bytes):
            return False
        self._asked.discard(offset)
        self._lost.discard(offset)
        self._taken.add(offset)
        self._has_moved = True
        self.have_bytes += num_bytes
        while self.whole_until in self._taken:
            self._taken.remove(self.whole_until)
            self.whole_until += self._size(self.whole_until)
        return True

    def check_invariants(self) -> None:
        """Assert what must hold between calls."""
        assert len(self._asked) <= self._window
        assert self.whole_until <= min(self._next_offset, self._total_bytes)
        assert self.whole_until <= self.have_bytes <= self._total_bytes
        assert not self._taken & (self._asked | self._lost)
        assert not self._asked & self._lost
        assert self.is_done or self._asked or self._lost or self._next_offset < self._total_bytes

    def _runs(self, offsets: list[int]) -> list[tuple[int, int]]:
        """Return (offset, bytes) of the parts at `offsets`, those that follow one another as one."""
        runs: list[tuple[int, int]] = []
        for offset in offsets:
            start, num_bytes = runs.pop() if runs and sum(runs[-1]) == offset else (offset, 0)
            runs.append((start, num_bytes + self._size(offset)))
        return runs

    def _size(self, offset: int) -> int:
        return min(self._chunk_bytes, self._total_bytes - offset)
