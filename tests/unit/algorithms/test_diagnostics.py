"""Diagnostics beside the published numbers of tests/golden."""

import math

import numpy as np
import pytest

from asyncrl.algorithms import diagnostics


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
