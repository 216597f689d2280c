"""The tensors of a version as an engine gets them: bytes on this machine that it can read, or a way to fetch them itself.

`MappedTensors` are in one flat buffer. An engine in this process reads them as a plain mapping. An engine whose model is in
another process (vLLM's workers) gets `path` and `offset`, maps the file and copies from it; no bytes are sent between the two.

`DeferredTensors` are for media whose bytes never pass through the generator's process: NCCL writes to the GPU of the process that
holds the model, and CUDA IPC gives that process a pointer. The generator passes on the announcement and the import path of the
receiver. The engine, or each of its worker processes, makes one receiver and keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import chain
from pkgutil import resolve_name
from typing import Protocol

import torch

from asyncrl.models.layout import view_tensors
from asyncrl.schema.weights import WeightsAvailable, WeightsManifest
from asyncrl.weights.media.base import LentTensors


class MappedTensors(LentTensors):
    """Tensors in one flat buffer, complete and verified; valid until released or until the next fetch."""

    def __init__(
        self,
        manifest: WeightsManifest,
        flat: torch.Tensor,
        path: str = "",
        offset: int = 0,
        *,
        check: Callable[[], None] = lambda: None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Wrap the bytes.

        Args:
            manifest: The layout of the bytes.
            flat: uint8 [manifest.total_bytes].
            path: File that contains the bytes, for other processes to map; empty: none.
            offset: Position of `flat` in that file, bytes.
            check: Raises BroadcastError if the bytes are no longer those of the version.
            release: Called when the bytes are no longer read.
        """
        super().__init__(view_tensors(flat, manifest))
        self.manifest, self.flat, self.path, self.offset = manifest, flat, path, offset
        self.check, self.release = check, release


class SharedTensors(MappedTensors):
    """The learner's own parameters, in place: an engine uses them directly, and sees the learner's later changes to them.

    `check` raises if they are no longer those of the version; nothing may be sampled while they are being changed.
    """

    learner_changes_them = True


class Receiver(Protocol):
    """The receiving end of a medium, in the process that holds the model."""

    def fetch(self, available: WeightsAvailable, device: torch.device) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield the version's tensors in the order of the layout, verified bucket by bucket before they are yielded.

        A tensor is valid until the next one is requested. At most two buckets are held. Close the generator to stop early.

        Raises:
            BroadcastError: The version is gone, damaged, or late; the tensors yielded so far may be only part of a version.
        """

    def close(self) -> None:
        """Leave the medium; other receivers continue. Safe to repeat."""


class DeferredTensors(dict[str, torch.Tensor]):
    """Placeholder for a version's tensors, which the engine fetches itself; contains no tensors."""

    def __init__(self, available: WeightsAvailable, receiver: str, arguments: bytes) -> None:
        """Store how to fetch the version.

        Args:
            available: The announcement.
            receiver: `module:name` of a callable that takes `arguments` and returns a Receiver.
            arguments: The callable's arguments, as JSON.
        """
        self.available, self.receiver, self.arguments = available, receiver, arguments


class ArrivingTensors:
    """A deferred version whose first tensor has arrived; the others should follow soon.

    The engine can continue to generate until then, while the members of a broadcast gather.
    """

    def __init__(self, receiver: Receiver, available: WeightsAvailable, device: torch.device) -> None:
        """Wait for the first tensor; this blocks, so call it on a thread.

        Raises:
            BroadcastError: The tensor does not arrive; the old weights are unchanged.
        """
        self.manifest = available.manifest
        self._arriving = receiver.fetch(available, device)
        self._first = next(self._arriving)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the first tensor, then receive and yield the others; usable once. Raises as `Receiver.fetch`."""
        return chain([self._first], self._arriving)

    def close(self) -> None:
        """Stop receiving. Safe to repeat."""
        self._arriving.close()


def make_receiver(receiver: str, arguments: bytes) -> Receiver:
    """Import and call `module:name` with `arguments`."""
    made: Receiver = resolve_name(receiver)(arguments)
    return made
