"""Medium `shared_memory`: two slots in one POSIX shared-memory segment; one copy out, one copy in; same machine.

Owns the segment `asyncrl-<run>-<incarnation>` (in /dev/shm; where there is none, in the run's `weights/`), whose name is noted in
`RUN/weights/shared_memory.json`. Layout: one header page of little-endian int64, then the slots, each a whole number of pages.
Header: magic, slot bytes, then for each slot a sequence number and a version.

Invariants:
- A slot's sequence number is odd from before the first byte of a new version is written until the last is (a seqlock): a reader
  that sees it odd, or changed since it began, has been overtaken and raises. Readers write nothing, so a dead one holds nothing.
  On processors that reorder stores the fingerprint is what refuses a mixture.
- All pages are reserved when the segment is made: a full /dev/shm is an error then, not a SIGBUS in the middle of a step.
- The segment is unlinked at close; one left by a killed learner, by the next start of the same run (segments.py). Whoever has it
  mapped can go on reading.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.broadcast.fingerprint import copy_and_fingerprint
from asyncrl.broadcast.medium import NUM_SLOTS, VersionUnavailableError
from asyncrl.broadcast.segments import note_path, remove_leftover_segments, segment_folder, segment_prefix
from asyncrl.errors import BroadcastError
from asyncrl.schema.weights import WeightsAvailable, WeightsManifest

HEADER_BYTES = mmap.PAGESIZE
MAGIC = 0x4C5243_4E595341  # "ASYNCRL" read as little-endian
_MAGIC, _SLOT_BYTES, _SLOTS = 0, 1, 2


class SegmentNote(msgspec.Struct, frozen=True):
    """What `RUN/weights/shared_memory.json` says."""

    path: str
    pid: int


class SharedMemoryWriter:
    """The learner's end; owns the segment."""

    keeps_slots = True

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder
        self._path: Path | None = None
        self._header: NDArray[np.int64] | None = None

    def open(self, manifest: WeightsManifest) -> tuple[torch.Tensor, ...]:
        """Make the segment; see MediumWriter."""
        remove_leftover_segments(self._run_folder)
        slot_bytes = -(-manifest.total_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._path = segment_folder(self._run_folder) / f"{segment_prefix(self._run_folder)}{secrets.token_hex(4)}"
        segment = _make_segment(self._path, HEADER_BYTES + NUM_SLOTS * slot_bytes)
        note = SegmentNote(str(self._path), os.getpid())
        note_path(self._run_folder).write_bytes(msgspec.json.encode(note))
        self._header = np.frombuffer(segment, np.int64, count=HEADER_BYTES // 8)
        self._header[_SLOT_BYTES] = slot_bytes
        for slot in range(NUM_SLOTS):
            self._header[_version_at(slot)] = -1
        self._header[_MAGIC] = MAGIC
        whole = torch.frombuffer(segment, dtype=torch.uint8)
        starts = [HEADER_BYTES + slot * slot_bytes for slot in range(NUM_SLOTS)]
        return tuple(whole[start : start + manifest.total_bytes] for start in starts)

    def busy_slots(self) -> frozenset[int]:
        """Return none: readers leave no trace, and are done within a copy."""
        return frozenset()

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

    def close(self) -> None:
        """Unlink the segment; the memory is freed once the last mapping is gone."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            note_path(self._run_folder).unlink(missing_ok=True)
        self._header = None


class SharedMemoryReader:
    """A generator's end; keeps the newest segment mapped."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder
        self._location = ""
        self._segment: mmap.mmap | None = None

    def fetch(self, available: WeightsAvailable, into: memoryview, cancelled: threading.Event) -> str:
        """Copy the version out of its slot; see MediumReader."""
        segment = self._mapped(available.location)
        header = np.frombuffer(segment, np.int64, count=HEADER_BYTES // 8)
        slot_bytes = int(header[_SLOT_BYTES])
        is_whole = len(segment) == HEADER_BYTES + NUM_SLOTS * slot_bytes and slot_bytes >= available.manifest.total_bytes
        if header[_MAGIC] != MAGIC or not is_whole:
            raise VersionUnavailableError(f"{available.location} is not a segment for {available.manifest.total_bytes} bytes")
        slot, sequence = _find_version(header, available.version)

        def check() -> None:
            if header[_sequence_at(slot)] != sequence:
                raise VersionUnavailableError(f"version {available.version} was overwritten while it was read; fetch the newest")
            if cancelled.is_set():
                raise VersionUnavailableError(f"the fetch of version {available.version} was cancelled")

        start = HEADER_BYTES + slot * slot_bytes
        return copy_and_fingerprint(memoryview(segment)[start : start + len(into)], into, check)

    def close(self) -> None:
        """Forget the mapping; it goes when nothing refers to it any more."""
        self._location, self._segment = "", None

    def _mapped(self, location: str) -> mmap.mmap:
        if self._segment is not None and location == self._location:
            return self._segment
        path = Path(location)
        if path.parent != segment_folder(self._run_folder) or not path.name.startswith(segment_prefix(self._run_folder)):
            raise VersionUnavailableError(f"{location} is not a shared-memory segment of this run")
        try:
            with path.open("rb") as file:
                self._segment = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise VersionUnavailableError(f"shared-memory segment {location} is gone ({error}); is its learner alive?") from error
        self._location = location
        return self._segment


def _make_segment(path: Path, num_bytes: int) -> mmap.mmap:
    """Create, reserve and map a file nobody else can open."""
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        _reserve(handle, num_bytes)
        return mmap.mmap(handle, num_bytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise BroadcastError(
            f"no room for {num_bytes >> 20} MiB of shared memory in {path.parent} ({error.strerror}); enlarge it "
            f"(docker run --shm-size) or set broadcast.medium.kind to files"
        ) from error
    finally:
        os.close(handle)


def _reserve(handle: int, num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, num_bytes)
    else:
        os.ftruncate(handle, num_bytes)


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
