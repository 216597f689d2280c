"""A GPU as the residency manager sees it: pinned host memory, a stream of its own for copies, memory given back to the driver.

Copies run on the copy stream, all of a component under way at once, and begin after what the current stream was told before; so
they pass beside kernels of other streams. `device_at`, which chooses between a GPU and the simulated device, is called by
learner/residents.py and inference/residents.py. Nothing else here runs without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from asyncrl.residency.device import Copy, Device, SimulatedDevice


class CudaDevice:
    """One GPU, and this process's part of it."""

    def __init__(self, device: torch.device, budget_bytes: int | None = None) -> None:
        """Take a GPU; `budget_bytes` None: all it has."""
        self._device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self._budget_bytes = budget_bytes or torch.cuda.get_device_properties(self._device).total_memory
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @property
    def kind(self) -> torch.device:
        """Return the GPU."""
        return self._device

    @property
    def budget_bytes(self) -> int | None:
        """Return the budget, or all that the GPU has."""
        return self._budget_bytes

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

    def give_back(self, *, at_once: bool) -> None:
        """Return torch's cached blocks to the driver, always at once: another process (an engine) wants them."""
        del at_once
        torch.cuda.empty_cache()


def device_at(where: str, budget_bytes: int | None) -> Device:
    """Return a device by torch's name for it; a CPU is simulated. `budget_bytes` None: no limit, or all that a GPU has."""
    device = torch.device(where)
    return CudaDevice(device, budget_bytes) if device.type == "cuda" else SimulatedDevice(budget_bytes)
