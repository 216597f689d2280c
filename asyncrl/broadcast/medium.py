"""The weight-medium contract: how the bytes of a version get from the learner to a generator.

A version is one flat run of bytes (layout.py). The learner owns two slots, each as large as a version; publisher.py copies the
tensors into one of them and fingerprints it, and the medium makes it fetchable from there. Media differ in nothing else.

Invariants, for every implementation (tests/contract/test_medium.py runs over all of them):
- Publishing blocks the learner for one copy of the bytes (the snapshot into a slot); everything else is done on other threads.
- A fetch yields the whole of one version with a matching fingerprint, or raises: never a mixture.
- The learner never waits for a subscriber; one that is too slow gets `BroadcastError` and fetches the newest instead.
- Memory is bounded: the model plus two slots at most for the learner, the model plus one staging buffer for a generator.
- What a killed process left behind is removed by the next writer of the same run.

Called by broadcast/publisher.py (in the learner) and broadcast/subscriber.py (in a generator).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from asyncrl.errors import BroadcastError
from asyncrl.schema.weights import WeightsAvailable, WeightsManifest

if TYPE_CHECKING:
    import torch

NUM_SLOTS = 2


class VersionUnavailableError(BroadcastError):
    """The version cannot be had any more under this announcement: only another announcement helps, no second attempt."""


class MediumWriter(Protocol):
    """The learner's end. `overwrite` runs on the learner's thread and is quick; `commit` runs on the publisher's."""

    keeps_slots: bool
    """Whether a committed version is read out of its slot, which then is free only once a newer version is committed."""

    def open(self, manifest: WeightsManifest) -> tuple[torch.Tensor, ...]:
        """Return the slots: NUM_SLOTS flat uint8 tensors of `manifest.total_bytes`, zeroed.

        Raises:
            BroadcastError: There is no room for them.
        """
        ...

    def busy_slots(self) -> frozenset[int]:
        """Return the slots that a subscriber is fetching from right now, as far as the medium knows."""
        ...

    def overwrite(self, slot: int, version: int) -> None:
        """Make what the slot holds unfetchable; the caller is about to write `version` over it."""
        ...

    def commit(self, slot: int, version: int, fingerprint: str) -> str:
        """Make `version`, now whole in `slot`, fetchable.

        Returns:
            The location, as `WeightsAvailable.location` carries it.

        Raises:
            BroadcastError: It could not be made fetchable (disk full, say); older versions are untouched.
        """
        ...

    def close(self) -> None:
        """Release threads, memory and whatever nobody may fetch after the learner is gone. Safe to repeat."""
        ...


class MediumReader(Protocol):
    """A generator's end."""

    def fetch(self, available: WeightsAvailable, into: memoryview, cancelled: threading.Event) -> str:
        """Fill `into` (`manifest.total_bytes`, uint8) with the version's bytes; blocking, runs on a thread.

        Args:
            available: What was announced.
            into: Staging buffer; holds nothing of value when this raises.
            cancelled: Checked at least every second; set, the fetch gives up.

        Returns:
            The fingerprint of what is in `into` now; the caller compares it with the announced one.

        Raises:
            VersionUnavailableError: The version is gone, was overwritten while reading, does not come, or the fetch was
                cancelled.
            BroadcastError: What arrived is damaged or could not be read; a second attempt may go better.
        """
        ...

    def close(self) -> None:
        """Release handles. Safe to repeat."""
        ...


__all__ = ["NUM_SLOTS", "MediumReader", "MediumWriter", "VersionUnavailableError"]
