"""Advantages of which nobody published numbers (tests/golden has the others), and what holds of all of them."""

import statistics
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.algorithms.advantages import ADVANTAGES, AdvantageConfig, AdvantageInputs, whitened
from asyncrl.algorithms.diagnostics import LOG_RATIO_LIMIT
from asyncrl.config.algorithm_table import ADVANTAGE_RULES

OF_GROUPS = [name for name, rule in ADVANTAGE_RULES.items() if rule.needs_groups]
any_advantage = pytest.mark.parametrize("name", ADVANTAGES)
any_whitening = pytest.mark.parametrize("whiten", [False, True, "samples"])


def drawn(seed=0, shape=(7, 6)):
    """All that an advantage may read, NaN at masked tokens; some samples have gaps, the last has no trained token at all."""
    random = np.random.default_rng(seed)
    mask = random.random(shape) < 0.6
    mask[-1] = False
    token_rewards, values, log_ratios = (np.where(mask, random.normal(size=shape), np.nan) for _ in range(3))
    rewards, greedy_rewards = random.normal(size=(2, shape[0]))
    group_ids = np.array([5, 3, 5, 3, 3, 5, 3])
    return AdvantageInputs(rewards, group_ids, mask, token_rewards, values, log_ratios, greedy_rewards)


@pytest.mark.parametrize("name", ["reward", "remax", "grpo_batch"])
def test_samples_have_the_number_of_the_formula(name):
    inputs, config = drawn(), AdvantageConfig()
    deviation = statistics.stdev(inputs.rewards.tolist()) + config.epsilon
    for s, row in enumerate(ADVANTAGES[name](inputs, config).advantages):
        mean = statistics.fmean(inputs.rewards[inputs.group_ids == inputs.group_ids[s]])
        baseline, scale = {"reward": (0, 1), "remax": (inputs.greedy_rewards[s], 1), "grpo_batch": (mean, deviation)}[name]
        np.testing.assert_allclose(row, np.where(inputs.mask[s], (inputs.rewards[s] - baseline) / scale, 0.0))


def test_vtrace_bounds_the_weights_of_differences_and_of_traces_apart():
    """IMPALA's equation 1 as a recursion, and the advantage of its section 4.2."""
    (rewards, values, log_ratios), gamma = np.random.default_rng(0).normal(size=(3, 6)), 0.9
    rho, c = np.exp(log_ratios).clip(max=2.0), np.exp(log_ratios).clip(max=0.5)
    targets, next_value, advantages = [0.0], 0.0, []
    for t in reversed(range(6)):
        delta = rho[t] * (rewards[t] + gamma * next_value - values[t])
        advantages.append(rho[t] * (rewards[t] + gamma * targets[-1] - values[t]))
        targets.append(values[t] + delta + gamma * c[t] * (targets[-1] - next_value))
        next_value = values[t]
    tokens = (row[None] for row in (np.ones(6, dtype=bool), rewards, values, log_ratios))
    config = AdvantageConfig(gamma=gamma, vtrace_rho=2.0, vtrace_c=0.5)
    got = ADVANTAGES["vtrace"](AdvantageInputs(np.zeros(1), np.zeros(1, dtype=np.int64), *tokens), config)
    np.testing.assert_allclose((got.advantages[0], got.returns[0]), (advantages[::-1], targets[:0:-1]))


@any_advantage
@any_whitening
@pytest.mark.parametrize("seed", range(3))
def test_what_is_not_trained_changes_nothing_and_costs_no_discount(name, whiten, seed):
    """The same once the trained tokens of each row have moved together."""
    inputs, config = drawn(seed), AdvantageConfig(gamma=0.9, gae_lambda=0.8, whiten=whiten)
    order = np.argsort(~inputs.mask, axis=1, kind="stable")
    fields = ("mask", "token_rewards", "values", "log_ratios")
    together = replace(inputs, **{field: np.take_along_axis(getattr(inputs, field), order, axis=1) for field in fields})
    apart, expected = (ADVANTAGES[name](each, config) for each in (inputs, together))
    assert (apart.returns is None) == (expected.returns is None)
    for got, wanted in ((apart.advantages, expected.advantages), (apart.returns, expected.returns)):
        if got is not None:
            np.testing.assert_allclose(np.take_along_axis(got, order, axis=1), wanted, rtol=1e-9, atol=1e-12)
            assert (got[~inputs.mask] == 0).all()
            assert np.abs(got).sum() > 0


@pytest.mark.parametrize("name", [name for name in OF_GROUPS if name != "grpo_batch"])
@any_whitening
def test_a_sample_alone_in_its_group_has_zero_and_does_not_count_for_the_others(name, whiten):
    """Of `grpo_batch` it counts: the deviation is that of all rewards."""
    inputs, config = drawn(), AdvantageConfig(whiten=whiten)
    others = np.arange(len(inputs.rewards)) > 0
    alone = replace(inputs, group_ids=np.where(others, inputs.group_ids, 9))
    fewer = AdvantageInputs(inputs.rewards[others], inputs.group_ids[others], inputs.mask[others])
    got = ADVANTAGES[name](alone, config).advantages
    assert inputs.mask[0].any()
    assert (got[0] == 0).all()
    np.testing.assert_allclose(got[others], ADVANTAGES[name](fewer, config).advantages, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", OF_GROUPS)
@pytest.mark.parametrize("value", [0.1, 0.7, -1 / 3, 1e9])
def test_equal_rewards_have_exactly_zero(name, value):
    """No rounding error is blown up by a tiny deviation."""
    mask = np.arange(10) <= np.arange(10)[:, None]
    inputs = AdvantageInputs(np.full(10, value), np.array([0] * 7 + [1] * 3), mask)
    assert (ADVANTAGES[name](inputs, AdvantageConfig()).advantages == 0).all()


def test_whitening_by_sample_takes_mean_and_deviation_of_the_samples_means():
    values = np.array([[1.0, np.nan, 3.0], [4.0, np.nan, np.nan], [np.nan] * 3])
    mask = ~np.isnan(values)
    expected = np.where(mask, (values - 3) / 2**0.5, 0.0)
    np.testing.assert_allclose(whitened(values, mask, "samples"), expected, rtol=1e-7)


def test_weights_of_policies_far_apart_stay_finite():
    mask = np.ones((1, 2), dtype=bool)
    inputs = AdvantageInputs(np.zeros(1), np.zeros(1), mask, mask * 1.0, mask * 0.0, np.array([[1e6, -1e6]]))
    outputs = ADVANTAGES["vtrace"](inputs, AdvantageConfig(vtrace_rho=np.inf, vtrace_c=np.inf))
    assert np.isfinite(outputs.advantages).all()
    assert outputs.advantages[0, 1] == pytest.approx(np.exp(-LOG_RATIO_LIMIT))


@any_advantage
@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0), (2, 3)])
def test_nothing_trained_gives_zeros(name, shape):
    nothing, mask = np.full(shape, np.nan), np.zeros(shape, dtype=bool)
    inputs = AdvantageInputs(np.zeros(shape[0]), np.arange(shape[0]), mask, nothing, nothing, nothing, np.zeros(shape[0]))
    np.testing.assert_array_equal(ADVANTAGES[name](inputs, AdvantageConfig()).advantages, np.zeros(shape))
