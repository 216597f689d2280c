"""Medium `shared_memory`: two slots in one POSIX shared-memory segment; one copy out, one copy in; same machine.

Owns the segment `asyncrl-<run>-<incarnation>` (in /dev/shm; where there is none, in the run's `weights/`).
Layout: one header page of little-endian int64, then the slots, each a whole number of pages.
Header: magic, slot bytes, then for each slot a sequence number and a version.

Invariants:
- A reader holds a shared lock on the slot's lock file (`SEGMENT.slot0`); the learner takes the other slot while it can, and never
  waits for a reader: a slot held too long, or one of two held, is overwritten all the same.
- A slot's sequence number is odd from before the first byte of a new version is written until the last is (a seqlock): a reader
  that sees it odd, or changed since it began, has been overtaken and raises. Readers write nothing; the kernel lets go of a dead
  one's lock. The last look at the sequence number comes after the last byte was read (`check`).
- That proves a whole version where stores become visible in their order, as on x86. Elsewhere, and with `broadcast.verify`,
  fingerprints are compared too (`proves_whole_versions`).
- All pages are reserved when the segment is made: a full /dev/shm is an error then, not a SIGBUS in the middle of a step.
- The segment is unlinked at close; one left by a killed learner, by the next start of the same run (shm_segments.py). Whoever
  has it mapped can go on reading.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.errors import BroadcastError
from asyncrl.models.layout import bucket_ends
from asyncrl.schema.weights import WeightsAvailable, WeightsManifest
from asyncrl.weights.fingerprint import fingerprints_of
from asyncrl.weights.media.base import NUM_SLOTS, VersionUnavailableError
from asyncrl.weights.shm_segments import (
    create_private,
    disown,
    make_segment,
    remove_leftover_segments,
    segment_folder,
    segment_prefix,
)

HEADER_BYTES = mmap.PAGESIZE
LEASE_LIMIT_S = 30.0
"""A reader that holds a slot for longer (a stopped process, say) no longer spares it."""
MAGIC = 0x4C5243_4E595341  # "ASYNCRL" read as little-endian
_MAGIC, _SLOT_BYTES, _SLOTS = 0, 1, 2


def proves_whole_versions() -> bool:
    """Return whether stores become visible in their order on this machine: then the sequence number alone proves a version."""
    return platform.machine().lower() in {"x86_64", "amd64", "i386", "i686"}


class SharedMemoryWriter:
    """The learner's end; owns the segment."""

    keeps_slots = True

    def __init__(self, run_folder: Path, now_s: Callable[[], float] = time.monotonic) -> None:
        self._run_folder = run_folder
        self._now_s = now_s
        self._path: Path | None = None
        self._header: NDArray[np.int64] | None = None
        self._locks: list[int] = []
        self._held_since_s: dict[int, float] = {}
        self._blobs: set[str] = set()

    def open(self, manifest: WeightsManifest) -> tuple[torch.Tensor, ...]:
        """Make the segment; see MediumWriter."""
        remove_leftover_segments(self._run_folder)
        slot_bytes = -(-manifest.total_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._path, segment = make_segment(self._run_folder, HEADER_BYTES + NUM_SLOTS * slot_bytes)
        for slot in range(NUM_SLOTS):
            self._locks.append(create_private(slot_lock_path(self._path, slot)))
        self._header = np.frombuffer(segment, np.int64, count=HEADER_BYTES // 8)
        self._header[_SLOT_BYTES] = slot_bytes
        for slot in range(NUM_SLOTS):
            self._header[_version_at(slot)] = -1
        self._header[_MAGIC] = MAGIC
        whole = torch.frombuffer(segment, dtype=torch.uint8)
        starts = [HEADER_BYTES + slot * slot_bytes for slot in range(NUM_SLOTS)]
        return tuple(whole[start : start + manifest.total_bytes] for start in starts)

    def busy_slots(self) -> frozenset[int]:
        """Return the slots that somebody reads: those whose lock is held, though for LEASE_LIMIT_S at most."""
        now_s = self._now_s()
        held = [slot for slot, handle in enumerate(self._locks) if _is_held(handle)]
        self._held_since_s = {slot: self._held_since_s.get(slot, now_s) for slot in held}
        return frozenset(slot for slot in held if now_s - self._held_since_s[slot] < LEASE_LIMIT_S)

    def overwrite(self, slot: int, version: int) -> None:
        """Make the slot's sequence odd before anything in it changes."""
        assert self._header is not None
        self._header[_sequence_at(slot)] |= 1
        self._header[_version_at(slot)] = version

    def commit(self, slot: int, version: int, fingerprint: str) -> str:  # noqa: ARG002 - the announcement carries it
        """Make the slot's sequence even again; see MediumWriter."""
        assert self._header is not None
        assert self._header[_version_at(slot)] == version, f"slot {slot} was given to another version than {version}"
        self._header[_sequence_at(slot)] += 1
        return str(self._path)

    def put_blob(self, name: str, blob: bytes) -> None:
        """Write the delta to a file beside the segment; see MediumWriter."""
        assert self._path is not None
        target, writing = blob_path(self._path, name), blob_path(self._path, f"writing-{name}")
        try:
            writing.touch(0o600, exist_ok=True)
            writing.write_bytes(blob)
            writing.replace(target)
        except OSError as error:
            writing.unlink(missing_ok=True)
            raise BroadcastError(
                f"no room for delta {name} ({len(blob)} bytes) in {self._path.parent}: {error.strerror}"
            ) from error
        self._blobs.add(name)

    def drop_blob(self, name: str) -> None:
        """Remove the delta's file."""
        if self._path is not None and name in self._blobs:
            blob_path(self._path, name).unlink(missing_ok=True)
            self._blobs.discard(name)

    def close(self) -> None:
        """Unlink the segment; the memory is freed once the last mapping is gone."""
        for handle in self._locks:
            os.close(handle)
        self._locks = []
        if self._path is not None:
            for name in list(self._blobs):
                self.drop_blob(name)
            for slot in range(NUM_SLOTS):
                slot_lock_path(self._path, slot).unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)
            disown(self._path)
        self._header = None


class SharedMemoryReader:
    """A generator's end; keeps the newest segment mapped."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder
        self._segment: _Segment | None = None

    def lease(self, available: WeightsAvailable) -> SharedMemoryLease:
        """Hold the slot that the version lies in; see MediumReader."""
        return SharedMemoryLease(self._mapped(available), available)

    def fetch(self, available: WeightsAvailable, into: memoryview, cancelled: threading.Event) -> bytes:
        """Copy the version out of its slot; see MediumReader."""
        if cancelled.is_set():
            raise VersionUnavailableError(f"the fetch of version {available.version} was cancelled")
        lease = self.lease(available)
        try:
            np.copyto(np.frombuffer(into, np.uint8), lease.flat.numpy())
            lease.check()
        finally:
            lease.release()
        return fingerprints_of(into, bucket_ends(available.manifest))

    def fetch_blob(self, available: WeightsAvailable, name: str, num_bytes: int, cancelled: threading.Event) -> bytes:  # noqa: ARG002 - small
        """Read the delta's file; see MediumReader."""
        path = Path(available.location)
        self._check_path(path)
        try:
            blob = blob_path(path, name).read_bytes()
        except OSError as error:
            raise VersionUnavailableError(f"delta {name} has left shared memory: {error.strerror}") from error
        if len(blob) != num_bytes:
            raise BroadcastError(f"delta {name} has {len(blob)} bytes, announced were {num_bytes}")
        return blob

    def close(self) -> None:
        """Forget the mapping; it goes when nothing refers to it any more."""
        self._segment = None

    def _mapped(self, available: WeightsAvailable) -> _Segment:
        path = Path(available.location)
        if self._segment is None or path != self._segment.path:
            self._check_path(path)
            self._segment = _Segment(path)
        self._segment.refuse_unless_for(available.manifest.total_bytes)
        return self._segment

    def _check_path(self, path: Path) -> None:
        if path.parent != segment_folder(self._run_folder) or not path.name.startswith(segment_prefix(self._run_folder)):
            raise VersionUnavailableError(f"{path} is not a shared-memory segment of this run")


class SharedMemoryLease:
    """A slot that is being read; the learner writes to the other one for as long as it can. See `Lease`."""

    def __init__(self, segment: _Segment, available: WeightsAvailable) -> None:
        """Hold the slot of the version.

        Raises:
            VersionUnavailableError: It is in none.
        """
        self._segment = segment
        self._version = available.version
        self._slot, self._sequence = _find_version(segment.header, available.version)
        self._lock = _hold(slot_lock_path(segment.path, self._slot))
        try:
            self.check()
        except VersionUnavailableError:
            self.release()
            raise
        self.path = str(segment.path)
        self.offset = HEADER_BYTES + self._slot * segment.slot_bytes
        self.flat = segment.whole[self.offset : self.offset + available.manifest.total_bytes]

    def check(self) -> None:
        """See `Lease`."""
        if self._segment.header[_sequence_at(self._slot)] != self._sequence:
            raise VersionUnavailableError(f"version {self._version} was overwritten while it was read; fetch the newest")

    def release(self) -> None:
        """See `Lease`."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None


class _Segment:
    """A learner's segment, mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                readable = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                # A private mapping, because torch warns of memory that it may not write to; nothing does.
                private = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise VersionUnavailableError(f"shared-memory segment {path} is gone ({error}); is its learner alive?") from error
        self.header = np.frombuffer(readable, np.int64, count=min(HEADER_BYTES, len(readable)) // 8)
        self.whole = torch.frombuffer(private, dtype=torch.uint8)
        self.slot_bytes = int(self.header[_SLOT_BYTES])

    def refuse_unless_for(self, total_bytes: int) -> None:
        is_whole = self.whole.numel() == HEADER_BYTES + NUM_SLOTS * self.slot_bytes and self.slot_bytes >= total_bytes
        if self.header[_MAGIC] != MAGIC or not is_whole:
            raise VersionUnavailableError(f"{self.path} is not a segment for {total_bytes} bytes")


def slot_lock_path(segment: Path, slot: int) -> Path:
    """Return the file that readers of a slot hold a shared lock on; the kernel lets go of a dead reader's."""
    return segment.with_name(f"{segment.name}.slot{slot}")


def blob_path(segment: Path, name: str) -> Path:
    """Return the file of a delta."""
    return segment.with_name(f"{segment.name}.{name}")


def _hold(path: Path) -> int | None:
    """Return a handle that holds a shared lock, None where the learner is about to write or is gone: `check` tells."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _is_held(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(handle, fcntl.LOCK_UN)
    return False


def _find_version(header: NDArray[np.int64], version: int) -> tuple[int, int]:
    """Return the slot that holds the whole of `version`, and its sequence number."""
    for slot in range(NUM_SLOTS):
        sequence = int(header[_sequence_at(slot)])
        if sequence % 2 == 0 and header[_version_at(slot)] == version and header[_sequence_at(slot)] == sequence:
            return slot, sequence
    held = [int(header[_version_at(slot)]) for slot in range(NUM_SLOTS)]
    raise VersionUnavailableError(f"version {version} has left shared memory (the slots are for {held}); fetch the newest")


def _sequence_at(slot: int) -> int:
    return _SLOTS + 2 * slot


def _version_at(slot: int) -> int:
    return _SLOTS + 2 * slot + 1
