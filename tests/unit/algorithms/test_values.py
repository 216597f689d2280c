"""The value loss against plain loops, values and gradients; masked tokens hold NaN throughout."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.diagnostics import explained_variance
from asyncrl.algorithms.loss_terms import AGGREGATIONS
from asyncrl.algorithms.losses import ValueInputs, value_loss
from asyncrl.algorithms.types import Denominators

CLIP = 0.155
"""Between the numbers the strategies make, so that no value stands on an edge."""
quick = settings(max_examples=30, deadline=None)


@st.composite
def batches(draw):
    """(values, old values, returns, mask), [S, T], NaN where the mask is false; at least one token is trained."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 5)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mask = random.random(shape) < 0.6
    mask[0, 0] |= not mask.any()
    values, old_values, returns = (random.integers(-400, 400, shape) / 100 for _ in range(3))
    return *(np.where(mask, array, np.nan) for array in (values, values + old_values / 10, returns)), mask


def inputs_of(values, old_values, returns, mask, denominators=None):
    return ValueInputs(
        values=values.reshape(-1),
        old_values=torch.from_numpy(old_values).reshape(-1),
        returns=torch.from_numpy(returns).reshape(-1),
        mask=torch.from_numpy(mask).reshape(-1),
        sequence_ids=torch.arange(len(mask)).repeat_interleave(mask.shape[1]),
        num_sequences=len(mask),
        denominators=denominators or Denominators(int(mask.sum()), int(mask.any(axis=1).sum()), 7.0),
    )


def token_weight(aggregation, mask, s):
    """What one trained token of row s weighs in the loss."""
    num_rows, length = int(mask.any(axis=1).sum()), int(mask[s].sum())
    return {
        "token-mean": 1 / int(mask.sum()),
        "seq-mean-token-mean": 1 / (num_rows * max(length, 1)),
        "token-sum": 1.0,
        "seq-mean-token-sum": 1 / num_rows,
        "seq-mean-token-sum-norm": 1 / (num_rows * 7.0),
        "constant": 1 / (num_rows * 7.0),
    }[aggregation]


def slow_value_loss(values, old_values, returns, mask, clip, aggregation):
    loss, gradient, clipped = 0.0, np.zeros(mask.shape), np.zeros(mask.shape, dtype=bool)
    for s, t in np.argwhere(mask):
        v, old, target = values[s, t], old_values[s, t], returns[s, t]
        weight = token_weight(aggregation, mask, s)
        error, slope = (v - target) ** 2, 2 * (v - target)
        if abs(v - old) > clip:
            bounded = old + clip if v > old else old - clip
            if (bounded - target) ** 2 > error:
                error, slope, clipped[s, t] = (bounded - target) ** 2, 0.0, True
        loss += 0.5 * weight * error
        gradient[s, t] = 0.5 * weight * slope
    return loss, gradient, clipped


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("clip", [CLIP, float("inf")])
@quick
@given(batch=batches())
def test_loss_gradient_and_clipping_are_those_of_a_loop(aggregation, clip, batch):
    values, old_values, returns, mask = batch
    # On the very bound both branches are equal, and torch gives each half of the gradient.
    assume(not np.isclose(np.abs(values - old_values), clip).any())
    leaf = torch.tensor(values, requires_grad=True)
    outputs = value_loss(inputs_of(leaf, old_values, returns, mask), clip=clip, aggregation=aggregation)
    outputs.loss.backward()
    loss, gradient, clipped = slow_value_loss(*batch, clip, aggregation)
    np.testing.assert_allclose(outputs.loss.item(), loss, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(leaf.grad.numpy(), gradient, rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(outputs.clipped.numpy().reshape(mask.shape), clipped)
    assert (leaf.grad.numpy()[~mask] == 0).all()


class TestExplainedVariance:
    @quick
    @given(batch=batches())
    def test_it_is_one_minus_the_share_of_variance_left(self, batch):
        values, _, returns, mask = batch
        got = explained_variance(*(torch.from_numpy(array) for array in (values, returns, mask)))
        spread = np.var(returns[mask])
        expected = 1 - np.var(returns[mask] - values[mask]) / spread if spread > 1e-12 else 0.0
        assert got == pytest.approx(expected, abs=1e-9)

    def test_a_perfect_critic_explains_all_and_a_constant_nothing(self):
        returns, mask = torch.tensor([1.0, 2.0, 4.0, float("nan")]), torch.tensor([True, True, True, False])
        assert explained_variance(returns + 3.0, returns, mask) == pytest.approx(1.0)
        assert explained_variance(torch.full((4,), 9.0), returns, mask) == pytest.approx(0.0)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_returns_that_vary_by_rounding_only_count_as_constant(self, dtype):
        values = torch.linspace(-3, 3, 9, dtype=dtype)
        returns = values + (torch.full_like(values, 0.7) - values)
        assert explained_variance(values, returns, torch.ones(9, dtype=torch.bool)) == 0.0
