"""Holds this process to a share of a GPU's memory: what torch would take beyond it is an out-of-memory error here, and not there.

Called by pipeline.py where generation and training share a GPU (`placement.kind = "async_hybrid"`). vLLM's processes are held by
their own arguments instead (control/device_share.py). Not run on a GPU yet.
"""

from __future__ import annotations

import torch


def hold_to_share(device: str, share: float, budget_bytes: int) -> None:
    """Let torch's allocator have `share` x `budget_bytes` of a GPU; on any other device do nothing.

    Args:
        device: As torch writes it.
        share: Of the budget.
        budget_bytes: Of all processes of the run together; 0: all that the GPU has.
    """
    place = torch.device(device)
    if place.type != "cuda":
        return
    total_bytes = torch.cuda.get_device_properties(place).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, share * (budget_bytes or total_bytes) / total_bytes), place)
