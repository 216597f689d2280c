"""The weight-medium contract: how the bytes of a version get from the learner to a generator.

Invariants, for every implementation (tests/contract/test_medium.py runs over all of them):
- `publish` blocks the caller for one copy of the bytes at most (the snapshot); everything else happens on the publisher's thread.
- A fetch returns the whole of one version with a matching fingerprint, or raises: never a mixture.
- The learner never waits for a subscriber; one that is too slow gets `BroadcastError` and fetches the newest instead.
- Memory is bounded: the model plus two buffers at most, on either side.

Called by broadcast/publisher.py (in the learner) and broadcast/subscriber.py (in a generator).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from asyncrl.schema.weights import WeightsAvailable, WeightsManifest

if TYPE_CHECKING:
    import torch


class MediumWriter(Protocol):
    """The learner's end."""

    def stage(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors out (cast to the manifest's dtypes); on return the caller may change them."""
        ...

    def commit(self, version: int) -> tuple[str, str]:
        """Make the staged version fetchable; runs off the learner's thread. Returns (location, fingerprint)."""
        ...

    def close(self) -> None:
        """Remove what nobody needs any more."""
        ...


class MediumReader(Protocol):
    """A generator's end."""

    def fetch(self, available: WeightsAvailable, into: memoryview) -> None:
        """Fill `into` (manifest.total_bytes) with the version's bytes; runs on a thread.

        Raises:
            BroadcastError: The version is gone, overwritten while reading, or its fingerprint does not match.
        """
        ...

    def close(self) -> None:
        """Release handles."""
        ...


__all__ = ["MediumReader", "MediumWriter", "WeightsManifest"]
