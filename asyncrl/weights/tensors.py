"""What an engine is given as a version's tensors: bytes of this machine that it can read, or a way to fetch them itself.

`MappedTensors` lie in one flat buffer. An engine in this process reads them as a plain mapping; one whose model lives in another
process (vLLM's workers) is told `path` and `offset`, maps the file and copies from there: no bytes travel between the two.

`DeferredTensors` are for media whose bytes never pass through the generator's process: NCCL ends in the GPU of the process that
holds the model, CUDA IPC hands it a pointer. The generator passes on what was announced and where the receiving end is imported
from. The engine, or each of its worker processes, makes one receiver and keeps it.
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
    """Tensors in one flat buffer, whole and verified; valid until released or until the next fetch."""

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
            manifest: Their layout.
            flat: uint8 [manifest.total_bytes].
            path: File in which they lie, for other processes to map; empty: none.
            offset: Of `flat` in it, bytes.
            check: Raises BroadcastError once the bytes are no longer those of the version.
            release: Says that nobody reads them any more.
        """
        super().__init__(view_tensors(flat, manifest))
        self.manifest, self.flat, self.path, self.offset = manifest, flat, path, offset
        self.check, self.release = check, release


class SharedTensors(MappedTensors):
    """The learner's own parameters, where they lie: an engine adopts them, and reads what the learner makes of them later.

    `check` says whether they are still those of the version; while they are being changed nothing may be sampled.
    """

    learner_changes_them = True


class Receiver(Protocol):
    """The receiving end of a medium, in the process that holds the model."""

    def fetch(self, available: WeightsAvailable, device: torch.device) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield the version's tensors in the order of the layout, verified bucket by bucket before they are yielded.

        A tensor is valid until the next one is asked for. Two buckets are held at most. Who wants no more of it closes it.

        Raises:
            BroadcastError: The version is gone, damaged, or does not come in time; what was yielded may be half a version.
        """

    def close(self) -> None:
        """Leave; the others go on. Safe to repeat."""


class DeferredTensors(dict[str, torch.Tensor]):
    """Stands for a version's tensors where an engine takes them; has none of its own."""

    def __init__(self, available: WeightsAvailable, receiver: str, arguments: bytes) -> None:
        """Note how to fetch.

        Args:
            available: The announcement.
            receiver: `module:name` of what takes `arguments` and returns a Receiver.
            arguments: What it needs, as JSON.
        """
        self.available, self.receiver, self.arguments = available, receiver, arguments


class ArrivingTensors:
    """A deferred version of which the first tensor is here, and so most likely all soon will be.

    Whoever goes on generating until then does not stand still while the members of a broadcast gather.
    """

    def __init__(self, receiver: Receiver, available: WeightsAvailable, device: torch.device) -> None:
        """Wait for the first tensor; blocking, on a thread.

        Raises:
            BroadcastError: It does not come; the old weights are untouched.
        """
        self.manifest = available.manifest
        self._arriving = receiver.fetch(available, device)
        self._first = next(self._arriving)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield it and receive the rest on the way, once; raises as `Receiver.fetch`."""
        return chain([self._first], self._arriving)

    def close(self) -> None:
        """Want no more of it. Safe to repeat."""
        self._arriving.close()


def make_receiver(receiver: str, arguments: bytes) -> Receiver:
    """Import and call `module:name` with `arguments`."""
    made: Receiver = resolve_name(receiver)(arguments)
    return made
