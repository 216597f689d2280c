"""The memory that a process shares with others: taken and given back by the storage, counted, with a budget.

Invariants, for both (`SimulatedDevice` here, `CudaDevice` in cuda.py): what was given back can be had by others at once; a copy
has arrived when `copy` returns; running out raises torch.OutOfMemoryError and takes nothing.

Bytes are uint8 tensors, each with a storage of its own, because a model's tensors must not come to share one. On a CPU the
"device" is simulated over ordinary memory, with a count that falls when a storage is gone. `hold` puts tensors that came from
elsewhere on the same count.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch

from asyncrl.models.layout import copy_tensors

Copy = tuple[torch.Tensor, torch.Tensor]
"""(from, to), uint8, of one size."""


class Device(Protocol):
    """Where components are when they are on `device`."""

    @property
    def kind(self) -> torch.device:
        """Return what tensors there say of themselves."""
        ...

    @property
    def budget_bytes(self) -> int | None:
        """Return how much this process may have there; None: no limit."""
        ...

    @property
    def allocated_bytes(self) -> int:
        """Return how much it has now."""
        ...

    @property
    def peak_bytes(self) -> int:
        """Return the most it had since `reset_peak`."""
        ...

    def reset_peak(self) -> None:
        """Begin to measure the peak anew."""
        ...

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return memory there, uint8, one tensor a size, holding anything.

        Raises:
            torch.OutOfMemoryError: There is not enough; nothing was taken.
        """
        ...

    def take_host(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return host memory that copies go to fastest (pinned, where that means something), holding anything."""
        ...

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that lie there and were not made by `take`, until their memory is gone; twice counts once."""
        ...

    def copy(self, pairs: Sequence[Copy]) -> None:
        """Copy all of them, in whatever order, and return once all have arrived."""
        ...

    def give_back(self) -> None:
        """Let others have what is free."""
        ...


class SimulatedOutOfMemoryError(torch.OutOfMemoryError):
    """The simulated device is full; caught wherever a GPU's own error is."""


class SimulatedDevice:
    """A budget over memory of the host.

    Example:
        >>> device = SimulatedDevice(budget_bytes=1000)
        >>> (taken,) = device.take([600])
        >>> device.allocated_bytes
        600
        >>> del taken
        >>> device.allocated_bytes
        0
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        """Begin with nothing on it; `budget_bytes` None: no limit."""
        self.kind = torch.device("cpu")
        self.budget_bytes = budget_bytes
        self.allocated_bytes = 0
        """Of all storages on it that exist."""
        self.peak_bytes = 0
        """The most there was since `reset_peak`."""
        self._held: set[int] = set()
        """Addresses of the storages on the count."""

    def reset_peak(self) -> None:
        """Begin to measure the peak anew."""
        self.peak_bytes = self.allocated_bytes

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """See `Device`."""
        self._require(sum(sizes))
        tensors = self.take_host(sizes)
        self.hold(tensors)
        return tensors

    def take_host(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """See `Device`."""
        return [torch.empty(size, dtype=torch.uint8) for size in sizes]

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """See `Device`; may pass the budget, because the memory is taken already."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage.nbytes() and storage.data_ptr() not in self._held:
                self._held.add(storage.data_ptr())
                self.allocated_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
                weakref.finalize(storage, self._let_go, storage.data_ptr(), storage.nbytes())

    def copy(self, pairs: Sequence[Copy]) -> None:
        """See `Device`."""
        copy_tensors(pairs)

    def give_back(self) -> None:
        """Do nothing: the system has memory back as soon as its last tensor is gone."""

    @contextlib.contextmanager
    def counting_activations(self) -> Iterator[None]:
        """Count what autograd keeps for the backward pass, as long as it keeps it; too much raises as on a GPU.

        Weights are not counted again, if they are on the count already.
        """
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept):
            yield

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._held:
            self._require(storage.nbytes())
            self.hold([tensor])
        # Not the tensor itself: a graph that keeps its own output is a cycle, and a forward that fails half-way would leak it.
        return tensor.detach()

    def _let_go(self, address: int, num_bytes: int) -> None:
        self._held.discard(address)
        self.allocated_bytes -= num_bytes

    def _require(self, num_bytes: int) -> None:
        if self.budget_bytes is not None and self.allocated_bytes + num_bytes > self.budget_bytes:
            raise SimulatedOutOfMemoryError(
                f"the simulated device is out of memory: {num_bytes} bytes asked for, {self.allocated_bytes} of "
                f"{self.budget_bytes} taken"
            )
