"""A version that whoever holds the model fetches itself: for media whose bytes never pass through the generator's process.

NCCL ends in the GPU of the process that holds the model, CUDA IPC hands it a pointer. The generator passes on what was announced
and where the receiving end is to be imported from; the engine, or each of its worker processes, makes one and keeps it.

Called by pipeline.py (makes) and generate (engines).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from asyncrl.schema.weights import WeightsAvailable

if TYPE_CHECKING:
    import torch


class Receiver(Protocol):
    """The receiving end of a medium, in the process that holds the model."""

    def fetch(self, available: WeightsAvailable, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the version's tensors in the order of the layout, verified bucket by bucket before they are yielded.

        A tensor is valid until the next one is asked for. Two buckets are held at most.

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


def make_receiver(receiver: str, arguments: bytes) -> Receiver:
    """Import and call `module:function` with `arguments`."""
    module, _, name = receiver.partition(":")
    made: Receiver = getattr(import_module(module), name)(arguments)
    return made
