"""Bytes hashed while they are copied: xxh3-64, by one pass over memory where `_copyhash` is built, by two where it is not.

The numbers are the same either way, so that the ends of a run need not agree. `IS_NATIVE` says which it is; `asyncrl doctor` too.

Called by broadcast/fingerprint.py and broadcast/snapshot.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

try:
    from asyncrl.models import _copyhash
except ImportError:  # no C compiler when this was installed
    _copyhash = None  # type: ignore[assignment]

IS_NATIVE = _copyhash is not None
DIGEST_BYTES = 8
PIECE_BYTES = 4 << 20
"""Large tensors are copied and hashed in pieces of this size. On two quiet cores 1 to 4 MiB are level and 256 KiB take a third
longer: the threads then wait for each other more than the cache saves."""

Bytes = bytes | memoryview | NDArray[np.uint8]


class CopyHasher(Protocol):
    """For one thread at a time."""

    def update(self, source: Bytes, target: Bytes | None = None, /) -> None:
        """Take the next bytes in, and copy them to `target`, which is as long. Other threads run meanwhile."""
        ...

    def intdigest(self) -> int:
        """Return xxh3-64 of all bytes."""
        ...


def copy_hasher(num_bytes: int) -> CopyHasher:
    """Return what hashes, and copies, so many bytes.

    Example:
        >>> hasher, target = copy_hasher(4), bytearray(4)
        >>> hasher.update(memoryview(b"abcd"), memoryview(target))
        >>> target, hasher.intdigest() == xxhash.xxh3_64_intdigest(b"abcd")
        (bytearray(b'abcd'), True)
    """
    return _native(num_bytes) or InTurns()


def _native(num_bytes: int) -> CopyHasher | None:
    return _copyhash.Hasher() if _copyhash is not None and num_bytes >= _copyhash.SHORTEST else None


class InTurns:
    """Copies a piece, then hashes it: a `CopyHasher` without a C compiler."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self.intdigest: Callable[[], int] = self._hash.intdigest

    def update(self, source: Bytes, target: Bytes | None = None, /) -> None:
        """See `CopyHasher`."""
        if target is None:
            self._hash.update(np.frombuffer(source, np.uint8).data)
            return
        read, written = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
        if read.size != written.size:
            raise ValueError(f"the target has {written.size} bytes, the source {read.size}: they must be equal")
        for start in range(0, read.size, PIECE_BYTES):
            piece = read[start : start + PIECE_BYTES]
            np.copyto(written[start : start + PIECE_BYTES], piece)
            self._hash.update(piece.data)


def digest_of(hasher: CopyHasher) -> bytes:
    """Return the number as DIGEST_BYTES, little-endian: a bucket's fingerprint."""
    return int(hasher.intdigest()).to_bytes(DIGEST_BYTES, "little")
