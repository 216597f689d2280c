"""Diagnostics against plain Python loops, and what must not change them."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms import diagnostics

FLOATS = st.floats(-50, 50, allow_nan=False, width=32)


def policies(seed, tokens, spread=0.4):
    random = np.random.default_rng(seed)
    behaviour = -2 + random.normal(size=tokens)
    return behaviour + spread * random.normal(size=tokens), behaviour


@settings(max_examples=50, deadline=None)
@given(values=st.lists(FLOATS, min_size=1, max_size=40), levels=st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_quantiles_are_numpys(values, levels):
    got = diagnostics.quantiles(np.array(values), levels)
    np.testing.assert_allclose(got, np.quantile(np.asarray(values, dtype=np.float64), levels), rtol=1e-6, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), lengths=st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(any))
def test_sequence_figures_are_those_of_a_loop_and_skip_sequences_without_tokens(seed, lengths):
    learner, behaviour = policies(seed, sum(lengths))
    ids = np.arange(len(lengths)).repeat(lengths)
    chosen = [ids == sequence for sequence in range(len(lengths)) if lengths[sequence]]
    means = [(learner[own].mean(), behaviour[own].mean(), own.sum()) for own in chosen]
    gaps, mean = [b - a for a, b, _ in means], statistics.fmean
    assert diagnostics.sequence_figures(learner, behaviour, ids) == pytest.approx(
        {
            "ratio/chi2_sequence": mean(math.exp(2 * n * (a - b)) for a, b, n in means) - 1,
            "ratio/perplexity": mean(math.exp(b - a) for a, b, _ in means),
            "perplexity/learner": mean(math.exp(-a) for a, _, _ in means),
            "perplexity/learner_log": -mean(a for a, _, _ in means),
            "perplexity/behaviour": mean(math.exp(-b) for _, b, _ in means),
            "perplexity/behaviour_log": -mean(b for _, b, _ in means),
            "perplexity/log_gap_mean": mean(gaps),
            "perplexity/log_gap_abs_mean": mean(map(abs, gaps)),
            "perplexity/log_gap_max": max(gaps),
            "perplexity/log_gap_min": min(gaps),
        },
        abs=1e-12,
    )


def test_policies_far_apart_stay_finite():
    learner, behaviour = np.array([-0.1, -300.0, -0.2]), np.array([-300.0, -0.1, -0.2])
    figures = diagnostics.token_figures(learner, behaviour)
    figures |= diagnostics.sequence_figures(learner, behaviour, np.array([0, 1, 1]))
    assert all(math.isfinite(value) for name, value in figures.items() if name != "perplexity/learner")


def test_every_staleness_has_one_bucket():
    names = {0: "0", 1: "1", 2: "2", 3: "3-4", 4: "3-4", 5: "5-8", 8: "5-8", 9: "9+", 500: "9+"}
    buckets = diagnostics.staleness_bucket(np.array([*names, -1.0]))
    assert [diagnostics.STALENESS_BUCKETS[index] for index in buckets[:-1]] == list(names.values())
    assert buckets[-1] == -1
