"""The fingerprint of a version: xxh3-128 of its flat bytes, hex. Computed where the bytes are still warm in the cache.

On the learner a second thread hashes behind the copy (`CopyProgress`), so that the snapshot costs the learner a copy and no more;
on a generator the bytes are hashed chunk by chunk as they arrive in the staging buffer, so what is verified is what goes live.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import xxhash

from asyncrl.errors import BroadcastError

CHUNK_BYTES = 512 << 10
"""Half of a usual second-level cache: a copied chunk is hashed before it leaves."""


class CopyProgress:
    """How many bytes of a slot, from its start, are final. One thread copies and advances, another follows."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._copied_bytes = 0
        self._abandoned = False

    def advance(self, copied_bytes: int) -> None:
        """Say that everything before `copied_bytes` is final."""
        with self._changed:
            self._copied_bytes = copied_bytes
            self._changed.notify_all()

    def abandon(self) -> None:
        """Say that the rest will not come."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def wait_beyond(self, num_bytes: int) -> int:
        """Return how many bytes are final once that is more than `num_bytes`.

        Raises:
            BroadcastError: The copy was abandoned.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or self._copied_bytes > num_bytes)
            if self._abandoned:
                raise BroadcastError(f"the snapshot was abandoned after {self._copied_bytes} bytes")
            return self._copied_bytes


def fingerprint_behind(flat: memoryview, progress: CopyProgress) -> str:
    """Hash `flat` behind the thread that is filling it.

    Raises:
        BroadcastError: That thread gave up.
    """
    digest = xxhash.xxh3_128()
    done = 0
    while done < len(flat):
        end = progress.wait_beyond(done)
        while done < end:
            stop = min(done + CHUNK_BYTES, end)
            digest.update(flat[done:stop])
            done = stop
    return str(digest.hexdigest())


def copy_and_fingerprint(source: memoryview, target: memoryview, check: Callable[[], None]) -> str:
    """Copy `source` to `target` and hash what arrived; both run without the interpreter lock.

    Args:
        source: Bytes that another process may be changing.
        target: As many bytes.
        check: Called after every chunk; raises to stop.

    Returns:
        The fingerprint of `target`.
    """
    digest = xxhash.xxh3_128()
    from_bytes, to_bytes = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    for start in range(0, len(target), CHUNK_BYTES):
        stop = start + CHUNK_BYTES
        np.copyto(to_bytes[start:stop], from_bytes[start:stop])
        digest.update(target[start:stop])
        check()
    return str(digest.hexdigest())
