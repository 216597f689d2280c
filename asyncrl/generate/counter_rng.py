"""Random numbers that are a function of (seed, position) and of nothing else.

A request draws its i-th token with `uniforms(seed, i)`, so neither the batch it sits in, nor a pause, nor the order of requests
can change what it draws. No state, nothing to save or restore.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_GOLDEN_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2: Final = np.uint64(0x94D049BB133111EB)
_MASK_64: Final = (1 << 64) - 1


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * _MULTIPLY_1
    words = (words ^ (words >> np.uint64(27))) * _MULTIPLY_2
    return words ^ (words >> np.uint64(31))


def uniforms(seeds: NDArray[np.uint64] | np.uint64, positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return uniform doubles in [0, 1), one for each (seed, position).

    Args:
        seeds: Any shape that broadcasts with `positions`.
        positions: Counter within the seed's stream.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), applied to the seed and then to seed plus counter.
    """
    words = _mix(_mix(np.atleast_1d(seeds) + _GOLDEN_GAMMA) + (positions + np.uint64(1)) * _GOLDEN_GAMMA)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def seed_word(seed: int) -> np.uint64:
    """Return the seed as the 64-bit word that `uniforms` takes; any integer is accepted."""
    return np.uint64(seed & _MASK_64)
