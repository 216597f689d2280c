"""What can be fetched from this process over `zeromq`, part by part; filled by one thread, served by another.

Invariants:
- What is still arriving, and may be given up at any time for the next version (a generator's buffer), is copied out under the
  lock under which it is given up.
- What was whole when it was put here (the learner's slots, deltas) is lent: sent from where it lies. Its owner asks `is_lent`
  before it writes there; where it must all the same, whoever still waits for the part finds its fingerprint wrong.
- A part is served only once it is final; a version may be served while the rest of it is still arriving.

Called by zeromq_writer.py and zeromq_reader.py (fill), zeromq_server.py (serves).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from asyncrl.broadcast.chunks import ChunkRequest

Key = tuple[int, str]
"""Version and fingerprint; BLOB and name."""
LENT_FOR_S = 3.0
"""Parts that nobody has taken so long after the last one was lent are those of somebody dead, or stopped."""
Cut = Literal["here", "later", "gone", "outside"]


class Outgoing(Protocol):
    """A part on its way (`zmq.MessageTracker`)."""

    @property
    def done(self) -> bool:
        """Whether its memory is no longer read."""
        ...


@dataclass(slots=True)
class _Holding:
    memory: memoryview
    part_bytes: int
    """0: all of it is here."""
    is_here: bytearray
    """For each part."""
    lent: deque[Outgoing] = field(default_factory=deque)
    """Parts that may be on their way."""
    lent_s: float = 0.0
    """When the last one was lent."""

    def note(self, sent: Outgoing, now: float) -> None:
        """Add a part on its way; look at two others, so that what is done does not pile up."""
        for _ in range(min(2, len(self.lent))):
            if not (earlier := self.lent.popleft()).done:
                self.lent.append(earlier)
        self.lent.append(sent)
        self.lent_s = now

    def is_lent(self, now: float) -> bool:
        """Return whether parts are on their way to somebody alive."""
        return now - self.lent_s < LENT_FOR_S and not all(sent.done for sent in self.lent)


class Shelf:
    """Versions and deltas by key.

    Example:
        >>> shelf = Shelf()
        >>> shelf.put((1, "f"), memoryview(b"abcd"))
        >>> part = bytearray(2)
        >>> shelf.cut(ChunkRequest(1, "f", 1, 2), memoryview(part)), bytes(part)
        ('here', b'bc')
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holdings: dict[Key, _Holding] = {}

    def put(self, key: Key, memory: memoryview) -> None:
        """Serve what is whole."""
        with self._lock:
            self._holdings[key] = _Holding(memory, 0, bytearray())

    def begin(self, key: Key, memory: memoryview, part_bytes: int) -> None:
        """Serve what is arriving; nothing of it is here yet."""
        with self._lock:
            self._holdings[key] = _Holding(memory, part_bytes, bytearray(-(-len(memory) // part_bytes)))

    def arrived(self, key: Key, offset: int) -> None:
        """Note that the part at `offset` is final."""
        with self._lock:
            holding = self._holdings[key]
            holding.is_here[offset // holding.part_bytes] = 1

    def drop(self, key: Key) -> None:
        """Stop serving it; on return its bytes may change. Unknown keys are ignored."""
        with self._lock:
            self._holdings.pop(key, None)

    def keys(self) -> list[Key]:
        """Return what is served, the oldest first."""
        with self._lock:
            return list(self._holdings)

    def lend(self, request: ChunkRequest) -> memoryview | None:
        """Return the part where it lies; None: it is not all here, or has to be cut."""
        with self._lock:
            holding = self._holdings.get((request.version, request.fingerprint))
            end = request.offset + request.num_bytes
            if holding is None or holding.part_bytes or end > len(holding.memory):
                return None
            return holding.memory[request.offset : end]

    def lent(self, request: ChunkRequest, sent: Outgoing) -> None:
        """Note that a part is on its way until `sent` is done."""
        with self._lock:
            holding = self._holdings.get((request.version, request.fingerprint))
            if holding is not None:
                holding.note(sent, time.monotonic())

    def is_lent(self, key: Key) -> bool:
        """Return whether parts of it are on their way."""
        with self._lock:
            holding = self._holdings.get(key)
            return holding is not None and holding.is_lent(time.monotonic())

    def cut(self, request: ChunkRequest, into: memoryview) -> Cut:
        """Copy the part, if it is here, into the first bytes of `into`; return whether, or why not."""
        with self._lock:
            holding = self._holdings.get((request.version, request.fingerprint))
            if holding is None:
                return "gone"
            end = request.offset + request.num_bytes
            if end > len(holding.memory):
                return "outside"
            if holding.part_bytes:
                covering = slice(request.offset // holding.part_bytes, -(-end // holding.part_bytes))
                if not all(holding.is_here[covering]):
                    return "later"
            # numpy copies without the interpreter lock.
            source = np.frombuffer(holding.memory, np.uint8)[request.offset : end]
            np.copyto(np.frombuffer(into, np.uint8)[: request.num_bytes], source)
            return "here"
