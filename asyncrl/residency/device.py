"""Device memory that a process shares with others: taken and given back storage by storage, counted, with a budget.

Invariants of both kinds: other processes can use returned memory at once; a copy is complete when `copy` returns; running out of
memory raises torch.OutOfMemoryError and takes nothing.

Bytes are uint8 tensors, each with its own storage, because a model's tensors must not start to share one. On a CPU the "device"
is simulated in ordinary memory, with a count that decreases when a storage is freed; `hold` adds tensors made elsewhere to it. On
a GPU host memory is pinned, all copies of a component run at once on a separate stream, in parallel to kernels of other streams,
and returned memory goes to the driver.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch

from asyncrl.models.layout import copy_tensors

Copy = tuple[torch.Tensor, torch.Tensor]
"""(from, to), uint8, of one size."""


class SimulatedDevice:
    """A simulated device: a budget over host memory.

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
        """Start empty; `budget_bytes` None: no limit."""
        self.kind = torch.device("cpu")
        self.budget_bytes = budget_bytes
        self.allocated_bytes = 0
        """Bytes of all existing storages on it."""
        self.peak_bytes = 0
        """Largest `allocated_bytes` since `reset_peak`."""
        self._held: set[int] = set()
        """Addresses of the counted storages."""

    def reset_peak(self) -> None:
        """Begin to measure the peak anew."""
        self.peak_bytes = self.allocated_bytes

    def take(self, sizes: Sequence[int], *, on_host: bool = False) -> list[torch.Tensor]:
        """Return uninitialised memory, uint8, one tensor per size.

        Args:
            sizes: In bytes.
            on_host: Take host memory with the fastest copies (pinned, on a GPU) instead of device memory.

        Raises:
            torch.OutOfMemoryError: There is not enough memory; nothing was taken.
        """
        if not on_host:  # also 0 bytes more would be refused where `hold` has passed the budget
            self._require(sum(sizes))
        tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        self.hold(() if on_host else tensors)
        return tensors

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors on the device that `take` did not make, until their memory is freed; each storage counts once.

        The count may exceed the budget, because the memory is already in use.
        """
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage.nbytes() and storage.data_ptr() not in self._held:
                self._held.add(storage.data_ptr())
                self.allocated_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
                weakref.finalize(storage, self._let_go, storage.data_ptr(), storage.nbytes())

    def copy(self, pairs: Sequence[Copy]) -> None:
        """Copy all pairs, in any order, and return when all copies are complete."""
        copy_tensors(pairs)

    def give_back(self) -> None:
        """Do nothing: memory returns to the system when its last tensor is freed."""

    @contextlib.contextmanager
    def counting_activations(self) -> Iterator[None]:
        """Count tensors that autograd stores for the backward pass, while it stores them; running out raises as on a GPU.

        Weights that are already counted are not counted again.
        """
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept):
            yield

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._held:
            self._require(storage.nbytes())
            self.hold([tensor])
        # Not the tensor itself: a graph that stores its own output is a cycle, and a forward that fails would leak it.
        return tensor.detach()

    def _let_go(self, address: int, num_bytes: int) -> None:
        self._held.discard(address)
        self.allocated_bytes -= num_bytes

    def _require(self, num_bytes: int) -> None:
        if self.budget_bytes is not None and self.allocated_bytes + num_bytes > self.budget_bytes:
            raise torch.OutOfMemoryError(
                f"the simulated device is out of memory: {num_bytes} bytes asked for, {self.allocated_bytes} of "
                f"{self.budget_bytes} taken"
            )


class CudaDevice:
    """One GPU, with this process's part of its memory."""

    def __init__(self, device: torch.device, budget_bytes: int | None = None) -> None:
        """Use a GPU; `budget_bytes` None: all its memory."""
        self.kind = self._device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self.budget_bytes: int | None = budget_bytes or torch.cuda.get_device_properties(self._device).total_memory
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes that torch has allocated for tensors."""
        return torch.cuda.memory_allocated(self._device)

    @property
    def peak_bytes(self) -> int:
        """Return the largest `allocated_bytes` since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        """Begin to measure the peak anew."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def take(self, sizes: Sequence[int], *, on_host: bool = False) -> list[torch.Tensor]:
        """As `SimulatedDevice.take`; torch caches freed pinned memory, in sizes of powers of two."""
        device = None if on_host else self._device
        return [torch.empty(size, dtype=torch.uint8, device=device, pin_memory=on_host) for size in sizes]

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: torch counts every tensor."""
        del tensors

    def copy(self, pairs: Sequence[Copy]) -> None:
        """Copy on the copy stream, after earlier work of the current stream, and return when all copies are complete."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
        self._stream.synchronize()

    def give_back(self) -> None:
        """Return torch's cached blocks to the driver, because another process (an engine) needs them."""
        torch.cuda.empty_cache()


Device = SimulatedDevice | CudaDevice
"""The device of components whose residence is `device`."""


def device_at(where: str, budget_bytes: int | None) -> Device:
    """Return the device of this torch name; a CPU is simulated. `budget_bytes` None: no limit, or all memory of a GPU."""
    device = torch.device(where)
    return CudaDevice(device, budget_bytes) if device.type == "cuda" else SimulatedDevice(budget_bytes)


def hold_to_share(device: str, share: float, budget_bytes: int) -> None:
    """Limit torch's allocator to `share` x `budget_bytes` of a GPU; do nothing on any other device.

    For `placement.kind = "async_hybrid"`, where generation and training share a GPU. vLLM's processes are limited by their own
    arguments instead (control/placement/memory.py).

    Args:
        device: Name of the device in torch.
        share: Share of the budget.
        budget_bytes: Budget of all processes of the run together; 0: all memory of the GPU.
    """
    place = torch.device(device)
    if place.type != "cuda":
        return
    if place.index is None:  # torch needs a number here
        place = torch.device("cuda", torch.cuda.current_device())
    total_bytes = torch.cuda.get_device_properties(place).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, share * (budget_bytes or total_bytes) / total_bytes), place)
