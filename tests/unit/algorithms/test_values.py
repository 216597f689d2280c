"""The value loss against plain loops, values and gradients, and how much of the returns a critic explains."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.diagnostics import explained_variance
from asyncrl.algorithms.losses import ValueInputs, value_loss
from asyncrl.algorithms.types import Denominators


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("clip", [0.155, float("inf")])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_loss_gradient_and_clipping_are_those_of_a_loop(aggregation, clip, seed):
    """Masked tokens hold NaN; numbers are hundredths, so that none stands on the clip's edge."""
    random = np.random.default_rng(seed)
    mask = random.random((3, 5)) < 0.6
    mask[0, 0] = True
    old, returns, moved = (np.where(mask, random.integers(-40, 40, mask.shape) / 100, np.nan) for _ in range(3))
    leaf = torch.tensor(old + moved, requires_grad=True)
    rows = mask.any(axis=1).sum()
    inputs = ValueInputs(
        values=leaf.reshape(-1),
        old_values=torch.from_numpy(old).reshape(-1),
        returns=torch.from_numpy(returns).reshape(-1),
        mask=torch.from_numpy(mask).reshape(-1),
        sequence_ids=torch.arange(3).repeat_interleave(5),
        num_sequences=3,
        denominators=Denominators(int(mask.sum()), int(rows)),
    )
    outputs = value_loss(inputs, clip=clip, aggregation=aggregation)
    outputs.loss.backward()
    loss, gradient, clipped = 0.0, np.zeros(mask.shape), np.zeros(mask.shape, dtype=bool)
    for s, t in np.argwhere(mask):
        value, target = old[s, t] + moved[s, t], returns[s, t]
        bounded = old[s, t] + np.clip(moved[s, t], -clip, clip)
        clipped[s, t] = (bounded - target) ** 2 > (value - target) ** 2 and bounded != value
        share = 1 / mask.sum() if aggregation == "token-mean" else 1 / (rows * mask[s].sum())
        loss += 0.5 * share * max((value - target) ** 2, (bounded - target) ** 2)
        gradient[s, t] = 0.0 if clipped[s, t] else share * (value - target)
    assert outputs.loss.item() == pytest.approx(loss, rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(leaf.grad.numpy(), gradient, rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(outputs.clipped.numpy().reshape(mask.shape), clipped)


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
