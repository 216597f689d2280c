"""The value loss against plain loops, values and gradients, and how much of the returns a critic explains."""

import numpy as np
import pytest

from asyncrl.algorithms.diagnostics import explained_variance


def test_explained_variance_is_one_minus_the_share_of_variance_left():
    returns, values = np.array([1.0, 2.0, 4.0]), np.array([1.0, 1.0, 3.0])
    assert explained_variance(values, returns) == pytest.approx(1 - np.var([0.0, 1.0, 1.0]) / np.var([1.0, 2.0, 4.0]))
    assert explained_variance(returns + 3.0, returns) == pytest.approx(1.0)
    assert explained_variance(np.full(3, 9.0), returns) == pytest.approx(0.0)
    values = np.linspace(-3, 3, 4)
    assert explained_variance(values, values + (0.7 - values)) == 0.0
