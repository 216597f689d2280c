"""Which samples share a row: best-fit-decreasing into a token budget.

Pure and deterministic: the same lengths give the same rows, on every machine. A length is never split. Called by
packing/tensors.py.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from asyncrl.errors import ConfigError


def pack_lengths(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put every length into a bin of at most `capacity`, in few bins.

    Best-fit-decreasing; where that needs more bins than the sum makes necessary, first-fit-decreasing is tried too and the fewer
    bins win.

    Args:
        lengths: Tokens of each sample, each in [1, capacity].
        capacity: Tokens of a row.

    Returns:
        One list of indices into `lengths` per bin, ascending within a bin, bins by their first index.

    Raises:
        ConfigError: A length does not fit into any bin.

    Source: best-fit-decreasing as in D. S. Johnson, Near-optimal bin packing algorithms (1973).
    """
    if not lengths:
        return []
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if lengths[longest] > capacity:
        raise ConfigError(
            f"sample {longest} has {lengths[longest]} tokens and packing.tokens_per_row is {capacity}: a sample is never split; "
            f"raise packing.tokens_per_row to at least {lengths[longest]}"
        )
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins = _best_fit(lengths, order, capacity)
    if len(bins) > num_bins_at_least(lengths, capacity):
        bins = min(bins, _first_fit(lengths, order, capacity), key=len)
    for members in bins:
        members.sort()
    return sorted(bins)


def num_bins_at_least(lengths: Sequence[int], capacity: int) -> int:
    """Return ceil(sum / capacity): no packing has fewer bins."""
    return -(-sum(lengths) // capacity)


def _best_fit(lengths: Sequence[int], order: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for i in order:
        at = bisect_left(room, (lengths[i], -1))
        if at == len(room):
            insort(room, (capacity - lengths[i], len(bins)))
            bins.append([i])
        else:
            free, chosen = room.pop(at)
            insort(room, (free - lengths[i], chosen))
            bins[chosen].append(i)
    return bins


def _first_fit(lengths: Sequence[int], order: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room = np.full(len(lengths), capacity, dtype=np.int64)
    for i in order:
        # An unopened bin is as roomy as can be, so the first bin with room always exists.
        chosen = int((room >= lengths[i]).argmax())
        if chosen == len(bins):
            bins.append([])
        room[chosen] -= lengths[i]
        bins[chosen].append(i)
    return bins
