"""Exact quantiles of any number of values. `torch.quantile` refuses more than 2^24.

Called by algorithms/diagnostics.py and learner/token_figures.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def quantiles(values: torch.Tensor, levels: Sequence[float]) -> tuple[float, ...]:
    """Return the quantiles of `values` [N] at each of `levels`, interpolated linearly between neighbours.

    Selects the few order statistics that are needed instead of sorting everything, on the CPU.

    Args:
        values: [N] of any real type, N at least 1, no NaN.
        levels: Each in [0, 1].

    Source: Hyndman and Fan 1996, definition 7: the default of numpy and torch.
    """
    array = values.detach().cpu().numpy()
    positions = np.asarray(levels, dtype=np.float64) * (len(array) - 1)
    below = np.floor(positions).astype(np.int64)
    above = np.minimum(below + 1, len(array) - 1)
    chosen = np.partition(array, np.union1d(below, above))
    low, high = chosen[below].astype(np.float64), chosen[above].astype(np.float64)
    return tuple((low + (positions - below) * (high - low)).tolist())
