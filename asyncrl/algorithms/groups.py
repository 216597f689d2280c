"""Sums and means over the samples of one prompt. No torch.

Legend: S samples in any order, G groups. Called by algorithms/advantages.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.algorithms.advantage_types import FloatArray


@dataclass(frozen=True, slots=True)
class Groups:
    """Which samples answer the same prompt."""

    numbers: NDArray[np.intp]
    """[S], number of each sample's group, from 0 to G - 1."""
    firsts: NDArray[np.intp]
    """[S], the first sample of each sample's group."""
    sizes: FloatArray
    """[S], how many samples each sample's group has."""

    @classmethod
    def of(cls, group_ids: NDArray[np.int64]) -> Groups:
        """Return the groups of samples with these ids [S]."""
        _, firsts_G, numbers_S, sizes_G = np.unique(group_ids, return_index=True, return_inverse=True, return_counts=True)
        return cls(numbers_S, firsts_G[numbers_S], sizes_G[numbers_S].astype(np.float64))

    def sum(self, values: FloatArray) -> FloatArray:
        """Return [S], the sum of `values` [S] over each sample's group."""
        sums_S: FloatArray = np.bincount(self.numbers, weights=values)[self.numbers].astype(np.float64)
        return sums_S

    def minus_mean(self, values: FloatArray, weights: FloatArray | None = None) -> FloatArray:
        """Return [S], `values` minus their group's mean, weighted by `weights` [S]; exactly 0 where a group's are equal."""
        # Distances from one member: the rounded mean of equal values is not always equal to them.
        distances_S = values - values[self.firsts]
        if weights is None:
            return distances_S - self.sum(distances_S) / self.sizes
        totals_S = self.sum(weights)
        means_S: FloatArray = self.sum(weights * distances_S) / np.where(totals_S > 0, totals_S, 1.0)
        return distances_S - means_S
