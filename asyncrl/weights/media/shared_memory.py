"""Medium `shared_memory`: two slots in one POSIX shared-memory segment; one copy out, one copy in; same machine.

Owns the segment `asyncrl-<run>-<incarnation>/segment` (in /dev/shm, or without it in the run's `weights/`).
Layout: one header page of little-endian int64, then the slots, each a whole number of pages.
Header: magic, slot bytes, then for each slot a sequence number and a version.

Invariants:
- A reader holds a shared lock on the slot's lock file (`slot0`, beside the segment). The learner uses the other slot if it can,
  and never waits for a reader: a slot that is held too long is overwritten, and so is one of two held slots.
- A slot's sequence number is odd from before the first byte of a new version is written until after the last (a seqlock). A
  reader that sees an odd or changed number was overtaken and raises. Readers write nothing; the kernel releases the lock of a
  dead reader. The sequence number is checked once more after the last byte was read (`check`).
- This proves a complete version where stores become visible in order, as on x86. Elsewhere, and with `broadcast.verify`,
  fingerprints are compared too (`PROVES_WHOLE_VERSIONS`).
- All pages are reserved when the segment is made: a full /dev/shm is an error then, not a SIGBUS in the middle of a step.
- The segment is unlinked at close; a segment left by a killed learner is unlinked at the next start of the same run
  (shm_segments.py). Processes that have mapped it can continue to read.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.models.layout import bucket_ends
from asyncrl.schema.weights import WeightsAvailable, WeightsManifest
from asyncrl.weights.buckets import fingerprints_of
from asyncrl.weights.media.base import NUM_SLOTS, MediumReader, MediumWriter, VersionUnavailableError, read_blob
from asyncrl.weights.shm_segments import folders_of_run, make_segment, remove_segment
from asyncrl.weights.tensors import MappedTensors

HEADER_BYTES = mmap.PAGESIZE
LEASE_LIMIT_S = 30.0
"""A slot is no longer protected after a reader (for example, a stopped process) has held it for this long."""
MAGIC = 0x4C5243_4E595341  # "ASYNCRL" read as little-endian
_MAGIC, _SLOT_BYTES, _SLOTS = 0, 1, 2
_END = _SLOTS + 2 * NUM_SLOTS
PROVES_WHOLE_VERSIONS = platform.machine().lower() in {"x86_64", "amd64", "i386", "i686"}
"""Whether stores become visible in order on this machine, so that the sequence number alone proves a version."""


class SharedMemoryWriter(MediumWriter):
    """The learner's end; owns the segment."""

    keeps_slots = True

    def __init__(self, run_folder: Path, now_s: Callable[[], float] = time.monotonic) -> None:
        self._run_folder, self._now_s = run_folder, now_s
        self._path: Path | None = None
        self._sequences, self._versions = _slots_of(np.zeros(_END, np.int64))
        self._locks: list[int] = []
        self._held_since_s: dict[int, float] = {}

    def open(self, manifest: WeightsManifest) -> tuple[torch.Tensor, ...]:
        """Make the segment; see MediumWriter."""
        slot_bytes = -(-manifest.total_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._path, segment = make_segment(self._run_folder, HEADER_BYTES + NUM_SLOTS * slot_bytes)
        for slot in range(NUM_SLOTS):
            self._locks.append(os.open(self._path.with_name(f"slot{slot}"), os.O_CREAT | os.O_RDWR, 0o600))
        header = np.frombuffer(segment, np.int64, count=_END)
        self._sequences, self._versions = _slots_of(header)
        self._versions[:] = -1
        header[[_SLOT_BYTES, _MAGIC]] = slot_bytes, MAGIC
        whole = torch.frombuffer(segment, dtype=torch.uint8)
        starts = [HEADER_BYTES + slot * slot_bytes for slot in range(NUM_SLOTS)]
        return tuple(whole[start : start + manifest.total_bytes] for start in starts)

    def busy_slots(self) -> frozenset[int]:
        """Return the slots that are being read: those whose lock is held, for LEASE_LIMIT_S at most."""
        now_s = self._now_s()
        held_since_s: dict[int, float] = {}
        for slot, handle in enumerate(self._locks):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(handle, fcntl.LOCK_UN)
            except OSError:
                held_since_s[slot] = self._held_since_s.get(slot, now_s)
        self._held_since_s = held_since_s
        return frozenset(slot for slot, since_s in held_since_s.items() if now_s - since_s < LEASE_LIMIT_S)

    def overwrite(self, slot: int) -> None:
        """Make the slot's sequence number odd before its bytes change."""
        self._sequences[slot] |= 1

    def commit(self, slot: int, version: int, fingerprint: str) -> str:  # noqa: ARG002 - the announcement carries it
        """Make the slot's sequence number even again; see MediumWriter."""
        self._versions[slot] = version
        self._sequences[slot] += 1
        return str(self._path)

    def blob_path(self, name: str) -> Path:
        """Return a path beside the segment; see MediumWriter."""
        assert self._path is not None
        return self._path.with_name(name)

    def close(self) -> None:
        """Remove the segment and the files beside it; the memory is freed when the last mapping is gone."""
        for handle in self._locks:
            os.close(handle)
        self._locks = []
        if self._path is not None:
            remove_segment(self._path)
        self._sequences, self._versions = _slots_of(np.zeros(_END, np.int64))


class Segment:
    """A learner's segment, mapped, with its header.

    Raises:
        VersionUnavailableError: The segment is gone, or not a segment of this run.
    """

    def __init__(self, run_folder: Path, location: str, magic: int = MAGIC) -> None:
        self.path = check_location(run_folder, location)
        try:
            with self.path.open("rb") as file:
                readable = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                # A private mapping, because torch warns about read-only memory; nothing writes to it.
                private = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise VersionUnavailableError(f"shared-memory segment {location} is gone ({error}); is its learner alive?") from error
        self.header = np.frombuffer(readable, np.int64, count=min(HEADER_BYTES, len(readable)) // 8)
        self.whole = torch.frombuffer(private, dtype=torch.uint8)
        if self.header[_MAGIC] != magic:
            raise VersionUnavailableError(f"{location} is not a segment of this kind")


def check_location(run_folder: Path, location: str) -> Path:
    """Return the path of a segment of this run; raises VersionUnavailableError if it is not one."""
    path, ours = Path(location), folders_of_run(run_folder)
    if path.parent.parent != ours.parent or not path.parent.name.startswith(ours.name):
        raise VersionUnavailableError(f"{path} is not a shared-memory segment of this run")
    return path


class SharedMemoryReader(MediumReader):
    """A generator's end; keeps the newest segment mapped."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder
        self._segment: Segment | None = None

    def lease(self, available: WeightsAvailable) -> MappedTensors:
        """Return the version in place, read-only; the learner avoids overwriting its slot if possible.

        The slot is held until released or until this process ends. `check` raises if its bytes were overwritten.

        Raises:
            VersionUnavailableError: The version is gone.
        """
        if self._segment is None or available.location != str(self._segment.path):
            self._segment = Segment(self._run_folder, available.location)
        segment, version, total_bytes = self._segment, available.version, available.manifest.total_bytes
        slot_bytes = int(segment.header[_SLOT_BYTES])
        if segment.whole.numel() != HEADER_BYTES + NUM_SLOTS * slot_bytes or slot_bytes < total_bytes:
            raise VersionUnavailableError(f"{segment.path} is not a segment for {total_bytes} bytes")
        sequences, versions = _slots_of(segment.header)
        begun, held = sequences.tolist(), versions.tolist()
        slot = next((slot for slot in range(NUM_SLOTS) if held[slot] == version and begun[slot] % 2 == 0), -1)
        if slot < 0:
            raise VersionUnavailableError(f"version {version} has left shared memory (it holds {held}); fetch the newest")
        offset = HEADER_BYTES + slot * slot_bytes

        def check() -> None:
            if sequences[slot] != begun[slot]:
                raise VersionUnavailableError(f"version {version} was overwritten while it was read; fetch the newest")

        with ExitStack() as opened:
            # Without a lock the learner is about to write, or is gone; the sequence number shows which.
            with suppress(OSError):
                lock = os.open(segment.path.with_name(f"slot{slot}"), os.O_RDONLY)
                opened.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            check()
            release = opened.pop_all().close
        flat = segment.whole[offset : offset + total_bytes]
        return MappedTensors(available.manifest, flat, str(segment.path), offset, check=check, release=release)

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
        return read_blob(check_location(self._run_folder, available.location).with_name(name), num_bytes)

    def close(self) -> None:
        """Drop the mapping; it is removed when nothing refers to it any more."""
        self._segment = None


def _slots_of(header: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the slots' sequence numbers and versions, as views of the header."""
    return header[_SLOTS:_END:2], header[_SLOTS + 1 : _END : 2]
