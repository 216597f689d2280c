"""Diagnostics against plain Python loops, and what must not change them."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms import diagnostics

FLOATS = st.floats(-50, 50, allow_nan=False, width=32)


def policies(seed, tokens, spread=0.4):
    random = torch.Generator().manual_seed(seed)
    behaviour = -2 + torch.randn(tokens, generator=random, dtype=torch.float64)
    return behaviour + spread * torch.randn(tokens, generator=random, dtype=torch.float64), behaviour


@settings(max_examples=50, deadline=None)
@given(values=st.lists(FLOATS, min_size=1, max_size=40), levels=st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_quantiles_are_numpys(values, levels):
    got = diagnostics.quantiles(torch.tensor(values), levels)
    np.testing.assert_allclose(got, np.quantile(np.asarray(values, dtype=np.float64), levels), rtol=1e-6, atol=1e-6)


def test_quantiles_work_beyond_two_to_the_24_elements():
    count = 2**24 + 1
    values = (torch.arange(count, dtype=torch.int32) % 101).to(torch.int8)
    assert diagnostics.quantiles(values, (0.0, 0.05, 0.5, 0.95, 1.0)) == (0.0, 5.0, 50.0, 95.0, 100.0)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), lengths=st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(any))
def test_sequence_mismatch_is_that_of_a_loop_and_skips_sequences_without_tokens(seed, lengths):
    learner, behaviour = policies(seed, sum(lengths))
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    got = diagnostics.sequence_mismatch(learner, behaviour, ids, len(lengths))
    chosen = [ids == sequence for sequence in range(len(lengths)) if lengths[sequence]]
    means = [(learner[own].mean().item(), behaviour[own].mean().item(), int(own.sum())) for own in chosen]
    mean = statistics.fmean
    assert got.chi2 == pytest.approx(mean(math.exp(2 * n * (a - b)) for a, b, n in means) - 1, abs=1e-12)
    assert got.perplexity_ratio == pytest.approx(mean(math.exp(b - a) for a, b, _ in means))
    perplexities = (got.learner_perplexity, got.learner_log_perplexity, got.behaviour_perplexity, got.behaviour_log_perplexity)
    expected = [
        figure for logs in list(zip(*means, strict=True))[:2] for figure in (mean(math.exp(-x) for x in logs), -mean(logs))
    ]
    assert perplexities == pytest.approx(tuple(expected))
    gaps = [b - a for a, b, _ in means]
    figures = (got.log_perplexity_gap, got.log_perplexity_gap_abs, got.log_perplexity_gap_min, got.log_perplexity_gap_max)
    assert figures == pytest.approx((mean(gaps), mean(map(abs, gaps)), min(gaps), max(gaps)), abs=1e-12)


def test_policies_far_apart_stay_finite():
    learner, behaviour = torch.tensor([-0.1, -300.0, -0.2]), torch.tensor([-300.0, -0.1, -0.2])
    tokens = diagnostics.token_mismatch(learner, behaviour)
    sequences = diagnostics.sequence_mismatch(learner, behaviour, torch.tensor([0, 1, 1]), 2)
    figures = [tokens.ratio_max, tokens.chi2, tokens.ess, tokens.kl_max, sequences.chi2, sequences.perplexity_ratio]
    assert np.isfinite(figures).all()


def test_every_staleness_has_one_bucket():
    names = {0: "0", 1: "1", 2: "2", 3: "3-4", 4: "3-4", 5: "5-8", 8: "5-8", 9: "9+", 500: "9+"}
    buckets = diagnostics.staleness_bucket(torch.tensor(list(names))).tolist()
    assert [diagnostics.STALENESS_BUCKETS[index] for index in buckets] == list(names.values())
    assert diagnostics.staleness_bucket(torch.tensor([-1])).tolist() == [-1]


def test_a_sequence_is_as_stale_as_its_oldest_known_token():
    staleness, ids = torch.tensor([2, 5, -1, 0, -1]), torch.tensor([0, 0, 0, 1, 3])
    assert diagnostics.sequence_staleness(staleness, ids, 4).tolist() == [5, 0, -1, -1]
