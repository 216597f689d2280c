"""A GPU as the residency manager sees it: pinned host memory, a stream of its own for copies, memory given back to the driver.

Copies run on the copy stream, all of a component under way at once, and begin after what the current stream was told before; so
they pass beside kernels of other streams. Only `device_at` and `hold_to_share` do something without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from asyncrl.residency.device import Copy, Device, SimulatedDevice


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

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """See `Device`; torch raises its own OutOfMemoryError."""
        return [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]

    def take_host(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return pinned memory; torch keeps what is freed of it for the next time, in powers of two."""
        return [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: torch counts every tensor."""
        del tensors

    def copy(self, pairs: Sequence[Copy]) -> None:
        """See `Device`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
        self._stream.synchronize()

    def give_back(self) -> None:
        """Return torch's cached blocks to the driver: another process (an engine) wants them."""
        torch.cuda.empty_cache()


def device_at(where: str, budget_bytes: int | None) -> Device:
    """Return a device by torch's name for it; a CPU is simulated. `budget_bytes` None: no limit, or all that a GPU has."""
    device = torch.device(where)
    return CudaDevice(device, budget_bytes) if device.type == "cuda" else SimulatedDevice(budget_bytes)


def hold_to_share(device: str, share: float, budget_bytes: int) -> None:
    """Let torch's allocator have `share` x `budget_bytes` of a GPU; on any other device do nothing.

    For `placement.kind = "async_hybrid"`, where generation and training share a GPU. vLLM's processes are held by their own
    arguments instead (control/placement/gpu_share.py).

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
