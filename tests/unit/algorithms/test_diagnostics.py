"""Diagnostics beside the published numbers of tests/golden."""

import math

import numpy as np
import pytest

from asyncrl.algorithms import diagnostics
from asyncrl.schema.samples import PackedSample, StepBatch


def test_policies_far_apart_stay_finite_and_sequences_without_tokens_do_not_count():
    learner, behaviour = np.array([-0.1, -300.0, -0.2]), np.array([-300.0, -0.1, -0.2])
    figures = diagnostics.sequence_figures(learner, behaviour, np.array([0, 1, 1]))
    assert diagnostics.sequence_figures(learner, behaviour, np.array([1, 4, 4])) == figures
    figures |= diagnostics.token_figures(learner, behaviour)
    assert all(math.isfinite(value) for name, value in figures.items() if name != "perplexity/learner")


def test_explained_variance_is_one_minus_the_share_of_variance_left():
    returns, values = np.array([1.0, 2.0, 4.0]), np.array([1.0, 1.0, 3.0])
    assert diagnostics.explained_variance(values, returns) == pytest.approx(1 - np.var([0.0, 1.0, 1.0]) / np.var(returns))
    assert diagnostics.explained_variance(returns + 3.0, returns) == pytest.approx(1.0)
    values = np.linspace(-3, 3, 4)
    assert diagnostics.explained_variance(values, values + (0.7 - values)) == 0.0


def test_a_group_has_spread_only_where_rewards_differ_and_not_by_rounding():
    rewards_G = [[0.1] * 3, [-1e9 + 0.1] * 7, [0.25, 0.25, 1.0]]
    samples = tuple(
        PackedSample(group_id, index, 0, 0, prompt_tokens=1, response_tokens=1, reward=reward, oldest_version=0)
        for group_id, rewards in enumerate(rewards_G)
        for index, reward in enumerate(rewards)
    )
    metrics = diagnostics.batch_metrics(StepBatch(0, samples, (), len(samples), temperature=1.0), None)
    assert metrics["reward/zero_spread_fraction"] == pytest.approx(2 / 3)
    assert metrics["reward/group_std_mean"] == pytest.approx(np.std(rewards_G[-1]) / 3)
