"""Memory of the host in large pieces: taken fast, let go of truly, and had again without a fault if nobody wanted it meanwhile.

What a component leaves when it moves is exactly what it takes when it comes back, so a piece that was let go of stays mapped,
with its pages on offer to the kernel (MADV_FREE): they count as available memory, and go to whoever on the machine, or in the
memory group, has need of them, before anything is swapped. Pages that nobody took are written again as they are; others come
back fresh, by faults, which cost more than the copy that follows.

Invariants: a piece is on offer only once no tensor is left on it; at most `MOST_FREE` pieces are on offer, the oldest is unmapped
first; without MADV_FREE nothing is kept. Until the kernel takes such pages they count in the process's resident size (`LazyFree`
in smaps). Called by residency/device.py.

Source: jemalloc's dirty pages that become "muzzy"; `man 2 madvise`.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections import deque
from collections.abc import Sequence

import torch

ALIGNMENT = 64
HUGE_PAGES_FROM = 4 << 20
"""Smaller pieces are not worth pages of 2 MiB."""
MOST_FREE = 16
"""More than a process has components, twice: in host memory and on the device."""


class Arenas:
    """Pieces of memory, in use and on offer.

    Example:
        >>> arenas = Arenas()
        >>> _, (first, second) = arenas.take([100, 200])
        >>> del first, second, _
        >>> arenas.num_free
        1
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self._free: deque[mmap.mmap] = deque(maxlen=MOST_FREE)

    @property
    def num_free(self) -> int:
        """Return how many pieces are on offer."""
        return len(self._free)

    def take(self, sizes: Sequence[int]) -> tuple[memoryview | None, list[torch.Tensor]]:
        """Return one piece, and a uint8 tensor for each size on it, holding anything.

        The first lives exactly as long as some tensor is on the piece; None where all sizes are 0.
        """
        places, end = [], 0
        for size in sizes:
            places.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        if not end:
            return None, [_nothing() for _ in sizes]
        mapping = self._again(end) or _map(end)
        piece = memoryview(mapping)
        # At exit tensors may still be in use by other threads, so nothing is done there.
        weakref.finalize(piece, self._offer, mapping).atexit = False
        tensors = [
            torch.frombuffer(piece, dtype=torch.uint8, count=size, offset=place) if size else _nothing()
            for place, size in zip(places, sizes, strict=True)
        ]
        return piece, tensors

    def drop(self) -> None:
        """Unmap all that is on offer: it is not expected to be taken again."""
        self._free.clear()

    def _again(self, num_bytes: int) -> mmap.mmap | None:
        """Return a piece of just this size that was let go of, the latest first: most of it will still be there."""
        # Of a copy: the collector may end a piece, which is then on offer too and may push this one out, in between.
        mapping = next((one for one in reversed(list(self._free)) if len(one) == num_bytes), None)
        with contextlib.suppress(ValueError):
            if mapping is not None:
                self._free.remove(mapping)
        return mapping

    def _offer(self, mapping: mmap.mmap) -> None:
        with contextlib.suppress(AttributeError, OSError):  # a system without it: the mapping ends here
            mapping.madvise(mmap.MADV_FREE)
            self._free.append(mapping)


def _map(num_bytes: int) -> mmap.mmap:
    # Private, which Python's default is not: the kernel gives shared mappings no huge pages, and faults take four times as long.
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= HUGE_PAGES_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        # Not every kernel is built with them; without, pages are small and all else is the same.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)
