"""What the `zeromq` medium says on the wire, and the pure book of a download: which parts to ask for, and when to ask again.

Wire: a request is one frame, a `ChunkRequest`; an answer is two, a `ChunkReply` and the bytes (none where the reply says `gone`).

Invariants of `Download`:
- At most `window` parts are asked for and not yet here: that bounds memory on both sides, whatever the network does.
- A part that does not come is asked for again after `resend_s`; a part that comes twice is taken once.
- Every byte is taken exactly once.

Called by zeromq.py.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

NonNegative = Annotated[int, Meta(ge=0, le=2**62)]
MAX_REQUEST_BYTES = 1024


class ChunkRequest(msgspec.Struct, frozen=True, tag="chunk_request", forbid_unknown_fields=True):
    """Subscriber to publisher: send me this part of this version."""

    version: NonNegative
    fingerprint: Annotated[str, Meta(max_length=64)]
    """Tells two versions of one number apart, after a learner went back to a checkpoint."""
    offset: NonNegative
    num_bytes: Annotated[int, Meta(ge=1, le=2**40)]


class ChunkReply(msgspec.Struct, frozen=True, tag="chunk_reply"):
    """Publisher to subscriber: here it is, or why it never will be."""

    version: int
    offset: int
    num_bytes: int
    gone: str = ""
    """Empty where the bytes follow."""


class Download:
    """One version on its way.

    Example:
        >>> download = Download(total_bytes=10, chunk_bytes=4, window=2, resend_s=1.0)
        >>> download.to_ask(now=0.0)
        [(0, 4), (4, 4)]
        >>> download.take(0, 4), download.to_ask(now=0.1)
        (True, [(8, 2)])
    """

    def __init__(self, total_bytes: int, chunk_bytes: int, window: int, resend_s: float) -> None:
        self._total_bytes = total_bytes
        self._chunk_bytes = chunk_bytes
        self._window = window
        self._resend_s = resend_s
        self._asked_s: dict[int, float] = {}
        self._next_offset = 0
        self._taken: set[int] = set()
        self.whole_until = 0
        """Everything before this offset is here."""

    @property
    def is_done(self) -> bool:
        """Whether every byte is here."""
        return self.whole_until == self._total_bytes

    def to_ask(self, now: float) -> list[tuple[int, int]]:
        """Return (offset, bytes) of what to ask for now, and note it as asked."""
        overdue = [offset for offset, asked_s in self._asked_s.items() if now - asked_s >= self._resend_s]
        fresh: list[int] = []
        while len(self._asked_s) + len(fresh) < self._window and self._next_offset < self._total_bytes:
            fresh.append(self._next_offset)
            self._next_offset += self._chunk_bytes
        for offset in overdue + fresh:
            self._asked_s[offset] = now
        return [(offset, self._size(offset)) for offset in overdue + fresh]

    def take(self, offset: int, num_bytes: int) -> bool:
        """Return whether this part is wanted; if so, note it as here."""
        if offset not in self._asked_s or num_bytes != self._size(offset):
            return False
        del self._asked_s[offset]
        self._taken.add(offset)
        while self.whole_until in self._taken:
            self._taken.remove(self.whole_until)
            self.whole_until += self._size(self.whole_until)
        return True

    def check_invariants(self) -> None:
        """Assert what must hold between calls."""
        assert len(self._asked_s) <= self._window
        assert self.whole_until <= min(self._next_offset, self._total_bytes)
        assert not self._taken & self._asked_s.keys()
        assert self.is_done or self._asked_s or self._next_offset < self._total_bytes

    def _size(self, offset: int) -> int:
        return min(self._chunk_bytes, self._total_bytes - offset)
