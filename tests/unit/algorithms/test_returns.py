"""Recursions over tokens against plain loops, and the identities between them. Masked tokens hold NaN throughout."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms import returns, types
from asyncrl.algorithms.returns import Trajectories

FRACTIONS = st.floats(0, 1)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
quick = settings(max_examples=40, deadline=None)


@st.composite
def rows_of(draw, count, ends=0):
    """`count` arrays [S, T] with NaN where the mask, which comes last, is false; `ends` bool arrays before it."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 7)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mask = random.random(shape) < draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    arrays = [np.where(mask, random.uniform(-3, 3, shape), np.nan) for _ in range(count)]
    return *arrays, *(random.random(shape) < 0.4 for _ in range(ends)), mask


def slow_returns(rewards, mask, gamma):
    out = np.zeros(mask.shape)
    for s in range(mask.shape[0]):
        later = 0.0
        for t in reversed(range(mask.shape[1])):
            if mask[s, t]:
                later = rewards[s, t] + gamma * later
                out[s, t] = later
    return out


def slow_gae(rewards, values, mask, gamma, gae_lambda, gaps):
    advantages, targets = np.zeros(mask.shape), np.zeros(mask.shape)
    for s in range(mask.shape[0]):
        next_value = next_advantage = 0.0
        for t in reversed(range(mask.shape[1])):
            if mask[s, t]:
                delta = rewards[s, t] + gamma * next_value - values[s, t]
                next_advantage = delta + gamma * gae_lambda * next_advantage
                next_value = values[s, t]
                advantages[s, t], targets[s, t] = next_advantage, next_advantage + next_value
            elif gaps == "discount":
                next_advantage = gamma * next_value + gamma * gae_lambda * next_advantage
                next_value = 0.0
    return advantages, targets


def slow_vtrace(rewards, values, log_ratios, mask, gamma, rho_bar, c_bar):
    """The n-step sum of IMPALA's equation 1, term by term, over the trained tokens of a row."""
    advantages, targets = np.zeros(mask.shape), np.zeros(mask.shape)
    for s in range(mask.shape[0]):
        tokens = np.flatnonzero(mask[s])
        weights = [float(np.exp(log_ratios[s, t])) for t in tokens]
        value = [values[s, t] for t in tokens] + [0.0]
        reward = [rewards[s, t] for t in tokens]
        vs = [0.0] * (len(tokens) + 1)
        for start in range(len(tokens)):
            vs[start], trace = value[start], 1.0
            for later in range(start, len(tokens)):
                delta = min(weights[later], rho_bar) * (reward[later] + gamma * value[later + 1] - value[later])
                vs[start] += gamma ** (later - start) * trace * delta
                trace *= min(weights[later], c_bar)
        for i, t in enumerate(tokens):
            targets[s, t] = vs[i]
            advantages[s, t] = min(weights[i], rho_bar) * (reward[i] + gamma * vs[i + 1] - value[i])
    return advantages, targets


@quick
@given(rows=rows_of(1), gamma=FRACTIONS)
def test_returns_are_those_of_a_loop(rows, gamma):
    np.testing.assert_allclose(returns.discounted_returns(*rows, gamma), slow_returns(*rows, gamma), **CLOSE)


@pytest.mark.parametrize("gaps", ["skip", "discount"])
@quick
@given(rows=rows_of(2), gamma=FRACTIONS, gae_lambda=FRACTIONS)
def test_gae_is_that_of_a_loop(gaps, rows, gamma, gae_lambda):
    outputs = returns.gae(*rows, gamma=gamma, gae_lambda=gae_lambda, gaps=gaps)
    advantages, targets = slow_gae(*rows, gamma, gae_lambda, gaps)
    np.testing.assert_allclose(outputs.advantages, advantages, **CLOSE)
    np.testing.assert_allclose(outputs.returns, targets, **CLOSE)


@quick
@given(rows=rows_of(3), gamma=FRACTIONS, rho_bar=st.floats(0.1, 4), c_bar=st.floats(0.1, 4))
def test_vtrace_is_the_sum_of_the_paper(rows, gamma, rho_bar, c_bar):
    outputs = returns.vtrace(*rows, gamma=gamma, rho_bar=rho_bar, c_bar=c_bar)
    advantages, targets = slow_vtrace(*rows, gamma, rho_bar, c_bar)
    np.testing.assert_allclose(outputs.advantages, advantages, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(outputs.returns, targets, rtol=1e-8, atol=1e-8)


def test_a_gap_costs_nothing_when_skipped_and_gamma_lambda_a_token_when_not():
    rewards, values = np.array([[0.0, np.nan, np.nan, 1.0]]), np.array([[0.0, np.nan, np.nan, 0.0]])
    mask = np.array([[True, False, False, True]])
    skipped = returns.gae(rewards, values, mask, gamma=0.5, gae_lambda=0.5, gaps="skip")
    discounted = returns.gae(rewards, values, mask, gamma=0.5, gae_lambda=0.5, gaps="discount")
    np.testing.assert_allclose(skipped.advantages, [[0.25, 0.0, 0.0, 1.0]])
    np.testing.assert_allclose(discounted.advantages, [[0.25**3, 0.0, 0.0, 1.0]])


@quick
@given(rows=rows_of(3, ends=2), gamma=st.floats(0.5, 1), gae_lambda=FRACTIONS)
def test_episodes_in_one_row_do_not_see_each_other(rows, gamma, gae_lambda):
    """Each episode alone, in a row of its own, gives the same numbers as all of them in one row."""
    rewards, values, log_ratios, done, terminated, mask = rows
    rewards, values, log_ratios = (np.where(mask, x, 0.5) for x in (rewards, values, log_ratios))
    terminated &= done
    next_values = np.concatenate([values[:, 1:], np.ones((len(values), 1))], axis=1) + 7.0 * done
    together = Trajectories.of_episodes(rewards, values, next_values, done, terminated, gamma)
    bounds = {"rho_bar": 1.5, "c_bar": 1.0, "pg_rho_bar": None}
    of_gae = returns.gae_of_trajectories(together, gae_lambda)
    of_vtrace = returns.vtrace_of_trajectories(together, log_ratios, **bounds)
    for s in range(len(values)):
        ends = [*np.flatnonzero(done[s]), values.shape[1] - 1]
        start = 0
        for end in sorted(set(ends)):
            part = (slice(s, s + 1), slice(start, end + 1))
            alone = Trajectories.of_episodes(rewards[part], values[part], next_values[part], done[part], terminated[part], gamma)
            alone_gae = returns.gae_of_trajectories(alone, gae_lambda)
            alone_vtrace = returns.vtrace_of_trajectories(alone, log_ratios[part], **bounds)
            np.testing.assert_allclose(of_gae.advantages[part], alone_gae.advantages, **CLOSE)
            np.testing.assert_allclose(of_gae.returns[part], alone_gae.returns, **CLOSE)
            np.testing.assert_allclose(of_vtrace.advantages[part], alone_vtrace.advantages, **CLOSE)
            np.testing.assert_allclose(of_vtrace.returns[part], alone_vtrace.returns, **CLOSE)
            start = end + 1


def test_a_cut_episode_is_worth_its_next_value_and_a_terminated_one_nothing():
    zeros, ones = np.zeros((1, 2)), np.ones((1, 2))
    done = np.array([[True, False]])
    for terminated, worth in ((np.zeros_like(done), 0.5 * 8.0), (done, 0.0)):
        rows = Trajectories.of_episodes(ones, zeros, np.array([[8.0, 4.0]]), done, terminated, 0.5)
        of_vtrace = returns.vtrace_of_trajectories(rows, zeros, rho_bar=1.0, c_bar=1.0, pg_rho_bar=1.0)
        for outputs in (returns.gae_of_trajectories(rows, 0.9), of_vtrace):
            np.testing.assert_allclose(outputs.advantages, [[1.0 + worth, 3.0]])
            np.testing.assert_allclose(outputs.returns, [[1.0 + worth, 3.0]])


def test_unbounded_weights_stay_finite():
    rows = Trajectories.of_samples(np.ones((1, 2)), np.zeros((1, 2)), 1.0)
    outputs = returns.vtrace_of_trajectories(rows, np.array([[1e6, -1e6]]), rho_bar=None, c_bar=None, pg_rho_bar=None)
    assert np.isfinite(outputs.advantages).all()
    assert np.isfinite(outputs.returns).all()
    assert outputs.advantages[0, 1] == pytest.approx(np.exp(-returns.LOG_RATIO_LIMIT))


def test_the_bound_of_log_ratios_is_that_of_the_losses():
    assert returns.LOG_RATIO_LIMIT == types.LOG_RATIO_LIMIT


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0), (2, 3)])
def test_nothing_trained_gives_zeros(shape):
    nothing, mask = np.full(shape, np.nan), np.zeros(shape, dtype=bool)
    for gaps in ("skip", "discount"):
        outputs = returns.gae(nothing, nothing, mask, gamma=1.0, gae_lambda=1.0, gaps=gaps)
        np.testing.assert_array_equal(outputs.advantages, np.zeros(shape))
    np.testing.assert_array_equal(returns.discounted_returns(nothing, mask, 1.0), np.zeros(shape))
    outputs = returns.vtrace(nothing, nothing, nothing, mask, gamma=1.0, rho_bar=1.0, c_bar=1.0)
    np.testing.assert_array_equal(outputs.returns, np.zeros(shape))
