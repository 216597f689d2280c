"""Named tensors of a version as bytes that other processes of this machine can map: what a subscriber hands an engine.

A plain mapping for an engine that loads in its own process; `path` and `offset` are for one whose model lives in another
(vLLM's workers), which maps the file and copies from there: no bytes travel between the two.

Called by broadcast/subscriber.py (makes) and generate (engines, worker).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from asyncrl.models.layout import view_tensors
from asyncrl.schema.weights import WeightsManifest


def _nothing() -> None:
    """Check nothing, release nothing."""


class MappedTensors(Mapping[str, torch.Tensor]):
    """Tensors that lie in one flat buffer; verified; valid until the next fetch or until released."""

    def __init__(
        self,
        manifest: WeightsManifest,
        flat: torch.Tensor,
        path: str = "",
        offset: int = 0,
        *,
        check: Callable[[], None] = _nothing,
        release: Callable[[], None] = _nothing,
    ) -> None:
        """Wrap the bytes.

        Args:
            manifest: Their layout.
            flat: uint8 [manifest.total_bytes].
            path: File in which they lie, for other processes to map; empty: none.
            offset: Of `flat` in it, bytes.
            check: Raises BroadcastError once the bytes are no longer those of the version.
            release: Says that nobody reads them any more.
        """
        self.manifest = manifest
        self.flat = flat
        self.path = path
        self.offset = offset
        self.check = check
        """Call after the last byte was read, before anything samples with it. Raises BroadcastError: it may be a mixture."""
        self.release = release
        """Call once nobody reads them any more. Safe to repeat."""
        self._tensors = view_tensors(flat, manifest)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a view of the buffer."""
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        """Go over the names, in the order of the layout."""
        return iter(self._tensors)

    def __len__(self) -> int:
        """Return the number of tensors, tied ones once."""
        return len(self._tensors)


class SharedTensors(MappedTensors):
    """The learner's own parameters, where they lie: an engine adopts them, and reads what the learner makes of them later.

    `check` says whether they are still those of the version; while they are being changed nothing may be sampled.
    """
