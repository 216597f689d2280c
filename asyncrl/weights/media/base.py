"""The weight-medium contract: how the bytes of a version get from the learner to a generator.

A version is one flat run of bytes (models/layout.py). The learner owns two slots, each as large as a version. publisher.py copies
the tensors into one of them, and the medium makes it fetchable from there. Media differ in nothing else.

Invariants, for every implementation (tests/contract/media/test_medium.py runs over all of them):
- Publishing blocks the learner for one copy of the bytes (the snapshot into a slot); everything else is done on other threads.
- A fetch yields the whole of one version, or raises: never a mixture.
- Blobs (deltas) are small, named, written once, and go when the version they lead to can no longer be asked for.
- The learner never waits for a subscriber; one that is too slow gets `BroadcastError` and fetches the newest instead.
- Memory is bounded: the model plus two slots at most for the learner (and one copy where it makes deltas), the model plus one
  staging buffer for a generator.
- What a killed process left behind is removed by the next writer of the same run.
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
    """Tensors by name that lie in somebody else's memory: what whoever passes them on has to know. Needs no torch."""

    check: Callable[[], None]
    """Call after the last byte was read, before anything samples with it. Raises BroadcastError: it may be a mixture."""
    release: Callable[[], None]
    """Call once nobody reads them any more. Safe to repeat."""
    learner_changes_them = False
    """They are the learner's own parameters, and become its later versions by themselves."""


class ReceiverArguments(msgspec.Struct, frozen=True):
    """What the `Receiver` of a medium is told, as JSON, in the process that holds the model."""

    run_folder: str
    medium: MediumConfig


class VersionUnavailableError(BroadcastError):
    """The version cannot be had any more under this announcement: only another announcement helps, no second attempt."""


class MediumWriter:
    """The learner's end. `overwrite` runs on the learner's thread and is quick; the rest runs on the publisher's."""

    keeps_slots: bool = False
    """Whether a committed version is read out of its slot, which then is free only once a newer version is committed."""

    def open(self, manifest: WeightsManifest) -> tuple[torch.Tensor, ...]:
        """Return the slots: NUM_SLOTS flat uint8 tensors of `manifest.total_bytes`, zeroed.

        Raises:
            BroadcastError: There is no room for them.
        """
        raise NotImplementedError

    def busy_slots(self) -> frozenset[int]:
        """Return the slots that a subscriber is fetching from right now, as far as the medium knows; here: none ever is."""
        return frozenset()

    def overwrite(self, slot: int) -> None:
        """Make what the slot holds unfetchable; the caller is about to write over it."""

    def commit(self, slot: int, version: int, fingerprint: str) -> str:
        """Make `version`, now whole in `slot`, fetchable. Where only a delta leads to a version, this is not called for it.

        Returns:
            The location, as `WeightsAvailable.location` carries it.

        Raises:
            BroadcastError: It could not be made fetchable (disk full, say); older versions are untouched.
        """
        raise NotImplementedError

    def blob_path(self, name: str) -> Path:
        """Return where the file of a delta lies; of media that keep deltas in files."""
        raise NotImplementedError

    def put_blob(self, name: str, blob: bytes) -> None:
        """Make a delta fetchable under `name` ([a-z0-9-], at most 64); only of media whose config `carries_deltas`.

        Here: a file, whole under its name or not at all, which only this user may read.

        Raises:
            BroadcastError: It could not be made fetchable.
        """
        try:
            write_whole(self.blob_path(name), blob, private=True, onto_disk=False)
        except OSError as error:
            raise BroadcastError(f"delta {name} ({len(blob)} bytes) could not be written: {error}") from error

    def drop_blob(self, name: str) -> None:
        """Make the delta unfetchable; unknown names are ignored."""
        self.blob_path(name).unlink(missing_ok=True)

    def close(self) -> None:
        """Release threads, memory and whatever nobody may fetch after the learner is gone. Safe to repeat."""


class MediumReader:
    """A generator's end."""

    def fetch(self, available: WeightsAvailable, into: memoryview, cancelled: threading.Event) -> bytes:
        """Fill `into` (`manifest.total_bytes`, uint8) with the version's bytes; blocking, runs on a thread.

        Args:
            available: What was announced.
            into: Staging buffer; holds nothing of value when this raises.
            cancelled: Checked at least every second; set, the fetch gives up.

        Returns:
            The bucket fingerprints of what is in `into` now; the caller compares them with the announced ones.

        Raises:
            VersionUnavailableError: The version is gone, was overwritten while reading, does not come, or the fetch was
                cancelled.
            BroadcastError: What arrived is damaged or could not be read; a second attempt may go better.
        """
        raise NotImplementedError

    def fetch_blob(self, available: WeightsAvailable, name: str, num_bytes: int, cancelled: threading.Event) -> bytes:  # noqa: ARG002
        """Return the delta `name` of `available.deltas`; blocking, runs on a thread. Raises as `fetch`; here: always."""
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
