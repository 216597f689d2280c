"""The memory that a process shares with others: taken and given back by the storage, counted, with a budget.

Invariants, for both: what was given back can be had by others at once; a copy
has arrived when `copy` returns; running out raises torch.OutOfMemoryError and takes nothing.

Bytes are uint8 tensors, each with a storage of its own, because a model's tensors must not come to share one. On a CPU the
"device" is simulated over ordinary memory, with a count that falls when a storage is gone. `hold` puts tensors that came from
elsewhere on the same count. On a GPU host memory is pinned, copies run on a stream of their own, all of a component under way at
once, so they pass beside kernels of other streams, and memory that is given back goes to the driver.
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

    def take(self, sizes: Sequence[int], *, on_host: bool = False) -> list[torch.Tensor]:
        """Return memory there, uint8, one tensor a size, holding anything.

        Args:
            sizes: In bytes.
            on_host: In host memory that copies go to fastest (pinned, where that means something).

        Raises:
            torch.OutOfMemoryError: There is not enough; nothing was taken.
        """
        if not on_host:  # also 0 bytes more would be refused where `hold` has passed the budget
            self._require(sum(sizes))
        tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        self.hold(() if on_host else tensors)
        return tensors

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that lie there and were not made by `take`, until their memory is gone; twice counts once.

        May pass the budget, because the memory is taken already.
        """
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage.nbytes() and storage.data_ptr() not in self._held:
                self._held.add(storage.data_ptr())
                self.allocated_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
                weakref.finalize(storage, self._let_go, storage.data_ptr(), storage.nbytes())

    def copy(self, pairs: Sequence[Copy]) -> None:
        """Copy all of them, in whatever order, and return once all have arrived."""
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
            raise torch.OutOfMemoryError(
                f"the simulated device is out of memory: {num_bytes} bytes asked for, {self.allocated_bytes} of "
                f"{self.budget_bytes} taken"
            )


class CudaDevice:
    """One GPU, and this process's part of it."""

    def __init__(self, device: torch.device, budget_bytes: int | None = None) -> None:
        """Take a GPU; `budget_bytes` None: all it has."""
        self.kind = self._device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self.budget_bytes: int | None = budget_bytes or torch.cuda.get_device_properties(self._device).total_memory
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @property
    def allocated_bytes(self) -> int:
        """Return what torch has allocated for tensors."""
        return torch.cuda.memory_allocated(self._device)

    @property
    def peak_bytes(self) -> int:
        """Return the most of it since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        """Begin to measure the peak anew."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def take(self, sizes: Sequence[int], *, on_host: bool = False) -> list[torch.Tensor]:
        """As `SimulatedDevice.take`; torch keeps what is freed of pinned memory for the next time, in powers of two."""
        device = None if on_host else self._device
        return [torch.empty(size, dtype=torch.uint8, device=device, pin_memory=on_host) for size in sizes]

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: torch counts every tensor."""
        del tensors

    def copy(self, pairs: Sequence[Copy]) -> None:
        """Copy on the copy stream, after what the current stream was told before, and return once all have arrived."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
        self._stream.synchronize()

    def give_back(self) -> None:
        """Return torch's cached blocks to the driver: another process (an engine) wants them."""
        torch.cuda.empty_cache()


Device = SimulatedDevice | CudaDevice
"""Where components are when they are on `device`."""


def device_at(where: str, budget_bytes: int | None) -> Device:
    """Return a device by torch's name for it; a CPU is simulated. `budget_bytes` None: no limit, or all that a GPU has."""
    device = torch.device(where)
    return CudaDevice(device, budget_bytes) if device.type == "cuda" else SimulatedDevice(budget_bytes)


def hold_to_share(device: str, share: float, budget_bytes: int) -> None:
    """Let torch's allocator have `share` x `budget_bytes` of a GPU; on any other device do nothing.

    For `placement.kind = "async_hybrid"`, where generation and training share a GPU. vLLM's processes are held by their own
    arguments instead (control/placement/memory.py).

    Args:
        device: As torch writes it.
        share: Of the budget.
        budget_bytes: Of all processes of the run together; 0: all that the GPU has.
    """
    place = torch.device(device)
    if place.type != "cuda":
        return
    if place.index is None:  # torch wants a number here
        place = torch.device("cuda", torch.cuda.current_device())
    total_bytes = torch.cuda.get_device_properties(place).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, share * (budget_bytes or total_bytes) / total_bytes), place)
