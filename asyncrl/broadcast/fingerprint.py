"""Fingerprints of a version: xxh3-64 of each bucket, and xxh3-128 of those as the version's name. Computed while bytes are warm.

Where bytes are copied they are hashed on the way (models/copy_hash.py); on the learner, where the copy is not such a one, by a
second thread behind it (`CopyProgress`); on a generator as they arrive in the staging buffer, or where they lie
(`fingerprints_of`, several threads), so what is verified is what goes live.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from asyncrl.errors import BroadcastError
from asyncrl.models.copy_hash import DIGEST_BYTES, copy_hasher, digest_of
from asyncrl.models.copying import COPY_THREADS

CHUNK_BYTES = 512 << 10
"""Half of a usual second-level cache: a copied chunk is hashed before it leaves."""


class BucketHasher:
    """Hashes a version's bytes in order, bucket by bucket.

    Example:
        >>> hasher = BucketHasher((4, 8))
        >>> hasher.update(b"abcdefgh")
        >>> len(hasher.digests())
        16
    """

    def __init__(self, ends: Sequence[int]) -> None:
        """Note where the buckets end; the last end is the version's."""
        self._ends = list(ends)
        self._position = 0
        self._bucket = copy_hasher(self._ends[0])
        self._digests: list[bytes] = []

    def update(self, chunk: bytes | memoryview, target: memoryview | None = None) -> None:
        """Take the next bytes in; with `target`, as many bytes, copy them there."""
        chunk = memoryview(chunk)
        while len(chunk):
            end = self._ends[len(self._digests)]
            count = min(len(chunk), end - self._position)
            self._bucket.update(chunk[:count], None if target is None else target[:count])
            self._position += count
            chunk, target = chunk[count:], None if target is None else target[count:]
            if self._position == end:
                self._digests.append(digest_of(self._bucket))
                self._begin_next(end)

    def digests(self) -> bytes:
        """Return the fingerprints of the buckets that are complete, `DIGEST_BYTES` each."""
        return b"".join(self._digests)

    def _begin_next(self, start: int) -> None:
        if len(self._digests) < len(self._ends):
            self._bucket = copy_hasher(self._ends[len(self._digests)] - start)


def version_fingerprint(bucket_fingerprints: bytes) -> str:
    """Return the name of a version: xxh3-128 of its buckets' fingerprints, hex."""
    return str(xxhash.xxh3_128(bucket_fingerprints).hexdigest())


def damaged_buckets(found: bytes, announced: bytes) -> list[int]:
    """Return the numbers of the buckets whose fingerprints differ.

    Raises:
        BroadcastError: There are not as many as announced.
    """
    if len(found) != len(announced) or len(found) % DIGEST_BYTES:
        raise BroadcastError(f"{len(found) // DIGEST_BYTES} buckets arrived, {len(announced) // DIGEST_BYTES} were announced")
    starts = range(0, len(found), DIGEST_BYTES)
    return [i // DIGEST_BYTES for i in starts if found[i : i + DIGEST_BYTES] != announced[i : i + DIGEST_BYTES]]


class CopyProgress:
    """How many bytes of a slot, from its start, are final. One thread copies and advances, another follows."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._copied_bytes = 0
        self._abandoned = False
        self._fingerprints = b""

    @property
    def fingerprints(self) -> bytes:
        """Of the buckets, where the copying threads made them on the way; empty: they did not."""
        return self._fingerprints

    def finish(self, copied_bytes: int, fingerprints: bytes) -> None:
        """Say that everything is final, and what its buckets' fingerprints are; empty: nobody has hashed them."""
        self._fingerprints = fingerprints
        self.advance(copied_bytes)

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


def fingerprints_behind(flat: memoryview, ends: Sequence[int], progress: CopyProgress) -> bytes:
    """Hash `flat` behind the thread that is filling it, unless those that fill it hash it themselves.

    Raises:
        BroadcastError: That thread gave up.
    """
    hasher = BucketHasher(ends)
    done = 0
    while done < len(flat):
        end = progress.wait_beyond(done)
        if progress.fingerprints:
            return progress.fingerprints
        while done < end:
            stop = min(done + CHUNK_BYTES, end)
            hasher.update(flat[done:stop])
            done = stop
    return hasher.digests()


def fingerprints_of(flat: memoryview, ends: Sequence[int], check: Callable[[], None], num_threads: int = COPY_THREADS) -> bytes:
    """Hash bytes where they lie, buckets side by side.

    Args:
        flat: The version's bytes.
        ends: Of the buckets.
        check: Called before every bucket; raises to stop.
        num_threads: That hash at once.
    """
    starts = [0, *ends[:-1]]

    def digest(start: int, end: int) -> bytes:
        check()
        return int(xxhash.xxh3_64_intdigest(flat[start:end])).to_bytes(DIGEST_BYTES, "little")

    with ThreadPoolExecutor(num_threads, thread_name_prefix="asyncrl-hash") as pool:
        return b"".join(pool.map(digest, starts, ends))
