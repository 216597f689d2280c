"""The memory that a process shares with others: taken and given back by the storage, counted, with a budget.

Invariants, for both (`SimulatedDevice` here, `CudaDevice` in residency/cuda.py): what was given back can be had by others at
once; a copy has arrived when `copy` returns; running out raises torch.OutOfMemoryError and takes nothing.

Bytes are uint8 tensors, each with a storage of its own, because a model's tensors must not come to share one. On a CPU the
"device" is a simulation over real memory: a piece of memory (residency/arenas.py) for each `take`, which anyone on the machine
can have once the last tensor on it is gone, and a count that falls just then. `hold` puts tensors that came from elsewhere on
the same count.

Called by residency/tensors.py, residency/manager.py and learner/residents.py.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from asyncrl.models.copying import copy_tensors
from asyncrl.residency.arenas import Arenas

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

    def give_back(self, *, at_once: bool) -> None:
        """Let others have what is free; with `at_once` nothing of it is kept for the next time, as far as there is a choice."""
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
        self._budget_bytes = budget_bytes
        self._allocated = 0
        self._peak = 0
        self._held: set[int] = set()
        """Addresses of the storages on the count."""
        self._arenas = Arenas()

    @property
    def kind(self) -> torch.device:
        """Return the CPU."""
        return torch.device("cpu")

    @property
    def budget_bytes(self) -> int | None:
        """Return the budget."""
        return self._budget_bytes

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes of all storages on it that exist."""
        return self._allocated

    @property
    def peak_bytes(self) -> int:
        """Return the most there was since `reset_peak`."""
        return self._peak

    def reset_peak(self) -> None:
        """Begin to measure the peak anew."""
        self._peak = self._allocated

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """See `Device`."""
        num_bytes = sum(sizes)
        self._require(num_bytes)
        piece, tensors = self._arenas.take(sizes)
        if piece is not None:
            self._count(piece, num_bytes)
        for tensor in tensors:
            self._note_address(tensor.untyped_storage())
        return tensors

    def take_host(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """See `Device`."""
        return self._arenas.take(sizes)[1]

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """See `Device`; may pass the budget, because the memory is taken already."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage.nbytes() and storage.data_ptr() not in self._held:
                self._note_address(storage)
                self._count(storage, storage.nbytes())

    def copy(self, pairs: Sequence[Copy]) -> None:
        """See `Device`."""
        copy_tensors(pairs)

    def give_back(self, *, at_once: bool) -> None:
        """See `Device`; what is free is on offer to the system already, and `at_once` the system has it."""
        if at_once:
            self._arenas.drop()

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

    def _note_address(self, storage: torch.UntypedStorage) -> None:
        self._held.add(storage.data_ptr())
        weakref.finalize(storage, self._held.discard, storage.data_ptr())

    def _count(self, owner: Any, num_bytes: int) -> None:  # noqa: ANN401 - whatever dies when the memory does
        self._allocated += num_bytes
        self._peak = max(self._peak, self._allocated)
        weakref.finalize(owner, self._uncount, num_bytes)

    def _uncount(self, num_bytes: int) -> None:
        self._allocated -= num_bytes

    def _require(self, num_bytes: int) -> None:
        if self._budget_bytes is not None and self._allocated + num_bytes > self._budget_bytes:
            raise SimulatedOutOfMemoryError(
                f"the simulated device is out of memory: {num_bytes} bytes asked for, {self._allocated} of "
                f"{self._budget_bytes} taken"
            )
