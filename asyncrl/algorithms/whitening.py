"""Whitening over the trained tokens of a step. No torch. Called by algorithms/advantages.py."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncrl.algorithms.advantage_types import FloatArray

WHITEN_EPSILON = 1e-8
"""Keeps 1 / sqrt(variance) finite (verl, OpenRLHF)."""


def whitened(values: FloatArray, mask: NDArray[np.bool_], *, biased: bool = False) -> FloatArray:
    """Return (x - mean) / sqrt(variance) over the tokens where `mask` is true, 0 elsewhere.

    Args:
        values: [S, T]; whatever stands where `mask` is false (NaN too) changes nothing.
        mask: [S, T].
        biased: The variance is max(sum of squares / N, epsilon), as in OpenRLHF, not sum of squares / (N - 1) + epsilon, as in
            verl.

    Source: verl `masked_whiten`; OpenRLHF `compute_advantages_and_returns`.
    """
    whitened_ST = np.zeros(mask.shape)
    values_N = values[mask]
    num_tokens = len(values_N)
    if num_tokens == 0:
        return whitened_ST
    # Distances from one token: the rounded mean of equal values is not always equal to them.
    centred_N = values_N - values_N[0]
    centred_N -= centred_N.mean()
    squares = float(np.square(centred_N).sum())
    variance = max(squares / num_tokens, WHITEN_EPSILON) if biased else squares / max(num_tokens - 1, 1) + WHITEN_EPSILON
    whitened_ST[mask] = centred_N / np.sqrt(variance)
    return whitened_ST
