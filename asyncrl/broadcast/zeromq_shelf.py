"""What can be fetched from this process over `zeromq`, part by part; filled by one thread, served by another.

Invariants:
- A part is copied out under the lock under which its bytes may be given up: what leaves is of the version asked for, whole.
- A part is served only once it is final; a version may be served while the rest of it is still arriving.

Called by zeromq_writer.py and zeromq_reader.py (fill), zeromq_server.py (serves).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

import numpy as np

from asyncrl.broadcast.chunks import ChunkRequest

Key = tuple[int, str]
"""Version and fingerprint; BLOB and name."""
Cut = Literal["here", "later", "gone", "outside"]


@dataclass(slots=True)
class _Holding:
    memory: memoryview
    part_bytes: int
    """0: all of it is here."""
    is_here: bytearray
    """For each part."""


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
