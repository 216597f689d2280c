"""The value loss against plain loops, values and gradients, and how much of the returns a critic explains."""

import numpy as np
import pytest
import torch

from asyncrl.algorithms.diagnostics import explained_variance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_explained_variance_is_one_minus_the_share_of_variance_left(dtype):
    returns, mask = torch.tensor([1.0, 2.0, 4.0, float("nan")], dtype=dtype), torch.tensor([True, True, True, False])
    values = torch.tensor([1.0, 1.0, 3.0, 9.0], dtype=dtype)
    assert explained_variance(values, returns, mask) == pytest.approx(1 - np.var([0.0, 1.0, 1.0]) / np.var([1.0, 2.0, 4.0]))
    assert explained_variance(returns + 3.0, returns, mask) == pytest.approx(1.0)
    assert explained_variance(torch.full((4,), 9.0, dtype=dtype), returns, mask) == pytest.approx(0.0)
    values = torch.linspace(-3, 3, 4, dtype=dtype)
    by_rounding = values + (torch.full_like(values, 0.7) - values)
    assert explained_variance(values, by_rounding, torch.ones(4, dtype=torch.bool)) == 0.0
