"""The weight-medium contract: how the bytes of a version get from the learner to a generator.

A version is one flat block of bytes (models/layout.py). The learner owns two slots, each as large as a version. publisher.py
copies the tensors into one of them, and the medium makes the version available from there. Media differ only in that.

Invariants, for every implementation (tests/contract/media/test_medium.py runs over all of them):
- Publishing blocks the learner for one copy of the bytes (the snapshot into a slot); everything else is done on other threads.
- A fetch returns one complete version, or raises: never a mixture.
- Blobs (deltas) are small, named, written once, and removed when their version can no longer be requested.
- The learner never waits for a subscriber; a slow subscriber gets `BroadcastError` and fetches the newest version instead.
- Memory is bounded: the model plus at most two slots for the learner (and one copy if it makes deltas), the model plus one
  staging buffer for a generator.
- Leftovers of a killed process are removed by the next writer of the same run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.config.broadcast import MediumConfig
from asyncrl.errors import BroadcastError
from asyncrl.folders import write_whole
from asyncrl.schema.weights import WeightsAvailable, WeightsManifest

if TYPE_CHECKING:
    import torch

NUM_SLOTS = 2


class LentTensors(dict[str, Any]):
    """Tensors by name in memory that belongs to the medium or the learner. Needs no torch."""

    check: Callable[[], None]
    """Call after the last byte was read and before sampling with it. Raises BroadcastError if it may be a mixture of versions."""
    release: Callable[[], None]
    """Call once the tensors are no longer read. Safe to repeat."""
    learner_changes_them = False
    """Whether they are the learner's own parameters, which change to later versions in place."""


class ReceiverArguments(msgspec.Struct, frozen=True):
    """Arguments of a medium's `Receiver`, as JSON, in the process that holds the model."""

    run_folder: str
    medium: MediumConfig


class VersionUnavailableError(BroadcastError):
    """The version of this announcement cannot be fetched any more: wait for another announcement, do not try again."""


class MediumWriter:
    """The learner's end. `overwrite` runs on the learner's thread and is quick; the rest runs on the publisher's thread."""

    keeps_slots: bool = False
    """Whether a committed version is read from its slot; the slot is then free only after a newer version is committed."""

    def open(self, manifest: WeightsManifest) -> tuple[torch.Tensor, ...]:
        """Return the slots: NUM_SLOTS flat uint8 tensors of `manifest.total_bytes`, zeroed.

        Raises:
            BroadcastError: There is no room for them.
        """
        raise NotImplementedError

    def busy_slots(self) -> frozenset[int]:
        """Return the slots from which subscribers are fetching now, as far as the medium knows; by default none."""
        return frozenset()

    def overwrite(self, slot: int) -> None:
        """Withdraw the version in the slot, because the caller will overwrite it."""

    def commit(self, slot: int, version: int, fingerprint: str) -> str:
        """Make `version`, complete in `slot`, available to fetch. Not called for a version that is published only as a delta.

        Returns:
            The location, for `WeightsAvailable.location`.

        Raises:
            BroadcastError: It could not be published (for example, the disk is full); older versions are unchanged.
        """
        raise NotImplementedError

    def blob_path(self, name: str) -> Path:
        """Return the path of a delta's file; for media that keep deltas in files."""
        raise NotImplementedError

    def put_blob(self, name: str, blob: bytes) -> None:
        """Make a delta available under `name` ([a-z0-9-], at most 64); only for media whose config `carries_deltas`.

        By default a file, which appears under its name only when complete, and which only this user may read.

        Raises:
            BroadcastError: It could not be published.
        """
        try:
            write_whole(self.blob_path(name), blob, private=True, onto_disk=False)
        except OSError as error:
            raise BroadcastError(f"delta {name} ({len(blob)} bytes) could not be written: {error}") from error

    def drop_blob(self, name: str) -> None:
        """Withdraw the delta; unknown names are ignored."""
        self.blob_path(name).unlink(missing_ok=True)

    def close(self) -> None:
        """Release threads, memory and everything that must not be fetched after the learner has ended. Safe to repeat."""


class MediumReader:
    """A generator's end."""

    def fetch(self, available: WeightsAvailable, into: memoryview, cancelled: threading.Event) -> bytes:
        """Fill `into` (`manifest.total_bytes`, uint8) with the version's bytes; blocking, runs on a thread.

        Args:
            available: The announcement.
            into: Staging buffer; its content is undefined if this raises.
            cancelled: Checked at least every second; when set, the fetch stops.

        Returns:
            The bucket fingerprints of the bytes in `into`; the caller compares them with the announced ones.

        Raises:
            VersionUnavailableError: The version is gone, was overwritten during the read, does not arrive, or the fetch was
                cancelled.
            BroadcastError: The bytes are damaged or could not be read; a second attempt may succeed.
        """
        raise NotImplementedError

    def fetch_blob(self, available: WeightsAvailable, name: str, num_bytes: int, cancelled: threading.Event) -> bytes:  # noqa: ARG002
        """Return the delta `name` of `available.deltas`; blocking, runs on a thread. Raises as `fetch`; by default always."""
        raise BroadcastError(f"version {available.version} is announced with delta {name}, which this medium does not carry")

    def close(self) -> None:
        """Release handles. Safe to repeat."""


def read_blob(path: Path, num_bytes: int) -> bytes:
    """Read a delta's file.

    Raises:
        VersionUnavailableError: It is gone.
        BroadcastError: It has another length.
    """
    try:
        blob = path.read_bytes()
    except OSError as error:
        raise VersionUnavailableError(f"delta {path.name} is gone: {error.strerror}") from error
    if len(blob) != num_bytes:
        raise BroadcastError(f"delta {path.name} has {len(blob)} bytes, announced were {num_bytes}")
    return blob
