import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.advantages import ADVANTAGES, AdvantageInputs

samples = st.lists(st.tuples(st.integers(0, 4), st.floats(-10, 10)), min_size=1, max_size=30)


def advantages(name, drawn, **options):
    return ADVANTAGES[name](
        AdvantageInputs(
            rewards=np.array([reward for _, reward in drawn]), group_ids=np.array([group for group, _ in drawn]), **options
        )
    )


@pytest.mark.parametrize("name", ADVANTAGES)
@given(drawn=samples)
def test_advantages_of_a_group_sum_to_zero(name, drawn):
    values = advantages(name, drawn)
    for group in {group for group, _ in drawn}:
        assert values[[other == group for other, _ in drawn]].sum() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
@given(drawn=samples, seed=st.integers(0, 100))
def test_order_does_not_matter(name, drawn, seed):
    order = np.random.default_rng(seed).permutation(len(drawn))
    shuffled = advantages(name, [drawn[index] for index in order])
    np.testing.assert_allclose(shuffled, advantages(name, drawn)[order], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_group_of_one_has_advantage_zero(name):
    assert advantages(name, [(0, 5.0), (1, 1.0), (1, 2.0)])[0] == 0.0


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_rewards_have_advantage_zero(name):
    assert (advantages(name, [(3, 0.7)] * 5) == 0).all()


def test_grpo_divides_by_the_unbiased_deviation():
    np.testing.assert_allclose(advantages("grpo", [(0, 0.0), (0, 2.0)]), [-1 / np.sqrt(2), 1 / np.sqrt(2)], rtol=1e-5)


def test_rloo_compares_with_the_others():
    np.testing.assert_allclose(advantages("rloo", [(0, 1.0), (0, 0.0), (0, 0.0)]), [1.0, -0.5, -0.5])
