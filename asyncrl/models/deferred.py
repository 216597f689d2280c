"""A version that whoever holds the model fetches itself: for media whose bytes never pass through the generator's process.

NCCL ends in the GPU of the process that holds the model, CUDA IPC hands it a pointer. The generator passes on what was announced
and where the receiving end is to be imported from; the engine, or each of its worker processes, makes one and keeps it.

Called by pipeline.py (makes) and generate (engines).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from asyncrl.schema.weights import WeightsAvailable

if TYPE_CHECKING:
    import torch


class Receiver(Protocol):
    """The receiving end of a medium, in the process that holds the model."""

    def fetch(self, available: WeightsAvailable, device: torch.device) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield the version's tensors in the order of the layout, verified bucket by bucket before they are yielded.

        A tensor is valid until the next one is asked for. Two buckets are held at most. Who wants no more of it closes it.

        Raises:
            BroadcastError: The version is gone, damaged, or does not come in time; what was yielded may be half a version.
        """
        ...

    def close(self) -> None:
        """Leave; the others go on. Safe to repeat."""
        ...


class DeferredTensors(Mapping[str, "torch.Tensor"]):
    """Stands for a version's tensors where an engine takes them; has none of its own."""

    def __init__(self, available: WeightsAvailable, receiver: str, arguments: bytes) -> None:
        """Note how to fetch.

        Args:
            available: The announcement.
            receiver: `module:function`; the function takes `arguments` and returns a Receiver.
            arguments: What it needs, as JSON.
        """
        self.available = available
        self.receiver = receiver
        self.arguments = arguments

    def __getitem__(self, name: str) -> torch.Tensor:
        """Refuse: the bytes are not here."""
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        """Go over nothing."""
        return iter(())

    def __len__(self) -> int:
        """Return 0."""
        return 0


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
    """Import and call `module:function` with `arguments`."""
    module, _, name = receiver.partition(":")
    made: Receiver = getattr(import_module(module), name)(arguments)
    return made
