import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.advantages import whitened


@pytest.mark.parametrize("biased", [False, True])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_trained_tokens_get_mean_0_and_variance_1_and_others_0(biased, seed):
    random = np.random.default_rng(seed)
    values, mask = random.uniform(-100, 100, (3, 4)), random.random((3, 4)) < 0.5
    white = whitened(np.where(mask, values, np.nan), mask, biased=biased)
    assert (white[~mask] == 0).all()
    if mask.sum() > 1 and values[mask].std() > 0.1:
        assert white[mask].mean() == pytest.approx(0, abs=1e-8)
        assert white[mask].var(ddof=0 if biased else 1) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_equal_values_come_out_as_exact_zeros(biased, num_tokens):
    values = np.full((1, num_tokens), 0.1)
    assert (whitened(values, np.ones_like(values, dtype=bool), biased=biased) == 0).all()
