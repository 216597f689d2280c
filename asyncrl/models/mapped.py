"""Named tensors of a version as bytes that other processes of this machine can map: what a subscriber hands an engine.

Bytes that the learner lends are verified by whoever reads them first: on the way into a model (`copy_into`), which goes through
memory once, or on the spot before anything else.

A plain mapping for an engine that loads in its own process; `path` and `offset` are for one whose model lives in another
(vLLM's workers), which maps the file and copies from there: no bytes travel between the two.

Called by broadcast/subscriber.py (makes) and generate (engines, worker).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from asyncrl.models.copying import copy_tensors
from asyncrl.models.layout import view_tensors
from asyncrl.schema.weights import WeightsManifest

Verify = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], None]
"""Compares the fingerprints of a version whose tensors are these, copying each to the one of its name on the way, where there are
such. Raises BroadcastError: they differ, and what was copied may be anything."""


def _nothing() -> None:
    """Check nothing, release nothing."""


class MappedTensors(Mapping[str, torch.Tensor]):
    """Tensors that lie in one flat buffer; valid until the next fetch or until released; never seen before they are verified."""

    def __init__(
        self,
        manifest: WeightsManifest,
        flat: torch.Tensor,
        path: str = "",
        offset: int = 0,
        *,
        check: Callable[[], None] = _nothing,
        release: Callable[[], None] = _nothing,
        verify: Verify | None = None,
    ) -> None:
        """Wrap the bytes.

        Args:
            manifest: Their layout.
            flat: uint8 [manifest.total_bytes].
            path: File in which they lie, for other processes to map; empty: none.
            offset: Of `flat` in it, bytes.
            check: Raises BroadcastError once the bytes are no longer those of the version.
            release: Says that nobody reads them any more.
            verify: What is left to do before they are read; None: it is done.
        """
        self.manifest = manifest
        self.flat = flat
        self.path = path
        self.offset = offset
        self.check = check
        """Call after the last byte was read, before anything samples with it. Raises BroadcastError: it may be a mixture."""
        self.release = release
        """Call once nobody reads them any more. Safe to repeat."""
        self._verify = verify
        self._tensors = view_tensors(flat, manifest)

    def verify(self) -> None:
        """Do what is left to do before the bytes are read: for who reads them by `flat` or `path`.

        Raises:
            BroadcastError: They are damaged, or were overwritten.
        """
        if self._verify is not None:
            self._verify(self._tensors, {})
            self._verify = None

    def copy_into(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy every tensor into the target of its name, casting; several at once, and verified on the way.

        Raises:
            BroadcastError: As `verify`; the targets may hold anything then.
        """
        if self._verify is None:
            copy_tensors((tensor, targets[name]) for name, tensor in self._tensors.items())
        else:
            self._verify(self._tensors, targets)
            self._verify = None

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a view of the buffer; raises as `verify`."""
        self.verify()
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        """Say whether there is such a tensor, without reading it."""
        return name in self._tensors

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
