"""Bytes of tensors from one place to another, as fast as memory allows.

torch copies element by element through the caches; numpy calls memcpy, which writes past them once a copy is large enough (when,
the C library decides, and `control/launch_local.py` for the processes of a run): half the time for the same bytes.

Called by models/layout.py, broadcast/snapshot.py and generate/weights_in_place.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

COPY_THREADS = max(1, min(4, os.cpu_count() or 1))
"""More do not copy faster: two to four keep the memory of one processor busy."""


def copy_tensor(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy `source` into `target`, of the same shape, casting and changing device where they differ; keeps no graph."""
    if are_same_bytes(source, target):
        np.copyto(bytes_of(target), bytes_of(source))
    else:
        with torch.no_grad():
            target.copy_(source)


def copy_tensors(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], num_threads: int = COPY_THREADS) -> None:
    """Copy each (source, target), several at once; targets must not overlap."""
    with ThreadPoolExecutor(num_threads, thread_name_prefix="asyncrl-copy") as pool:
        for _ in pool.map(lambda pair: copy_tensor(*pair), sorted(pairs, key=lambda pair: -pair[1].nbytes)):
            pass


def are_same_bytes(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Return whether copying one into the other is a matter of bytes alone."""
    alike = source.dtype == target.dtype and source.is_contiguous() and target.is_contiguous()
    return alike and source.device.type == target.device.type == "cpu"


def bytes_of(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the memory of a contiguous tensor on the CPU."""
    flat: np.ndarray[tuple[int], np.dtype[np.uint8]] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat
