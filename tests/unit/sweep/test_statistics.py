"""Intervals and tests against published numbers, and against scipy 1.17 (`stats.bootstrap`, `stats.permutation_test`)."""

import numpy as np
import pytest

from asyncrl.errors import ConfigError
from asyncrl.sweep.statistics import bootstrap_interval, compare, holm, sign_flip_p

DARWIN = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
"""Eighths of an inch by which crossed maize was taller than its self-fertilised pair; Fisher, 1935, section 21."""
ACCURACIES = [0.898, 0.889, 0.93, 0.92, 0.905, 0.911, 0.887, 0.94]


def test_the_p_of_pairs_is_that_of_fisher_and_scipy_and_two_over_two_to_the_n_at_least():
    assert sign_flip_p(DARWIN) == 1726 / 32768
    assert sign_flip_p([0.3, -0.1, 0.25, 0.4, 0.05, 0.2, -0.02, 0.31]) == 12 / 256
    assert (sign_flip_p([0.0] * 8), sign_flip_p([0.1, 0.2, 0.3, 0.1, 0.2, 0.3])) == (1.0, 2 / 64)


def test_the_interval_is_scipys_percentile_bootstrap():
    assert bootstrap_interval(ACCURACIES) == pytest.approx((0.898, 0.9226), abs=3e-4)
    assert bootstrap_interval(ACCURACIES) == bootstrap_interval(ACCURACIES)
    assert bootstrap_interval([0.5]) == (0.5, 0.5)
    assert bootstrap_interval([0.0, 1.0]) == (0.0, 1.0)


def test_holm_is_what_r_says():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # p.adjust(p, "holm")
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_arms_are_compared_with_the_baseline_where_both_have_the_seed():
    base, crossed = dict(enumerate([0.0] * 15)), dict(enumerate(map(float, DARWIN)))
    other = {0: 1.0, 1: 3.0, 99: 5.0}
    first, second, third = compare({"self": base, "crossed": crossed, "other": other, "empty": {}})
    assert (first.arm, first.pairs, first.p) == ("self", 0, 1.0)
    assert (second.arm, second.num, second.pairs, second.p) == ("crossed", 15, 15, 1726 / 32768)
    assert second.mean == second.difference == pytest.approx(sum(DARWIN) / 15)
    assert second.interval == bootstrap_interval(DARWIN)
    assert (third.num, third.pairs, third.mean, third.difference, third.p) == (3, 2, 3.0, 2.0, 0.5)
    assert (second.family_p, third.family_p) == (2 * 1726 / 32768, 0.5)
    assert compare({"a": {0: 1.0}, "b": {0: 2.0}}, baseline="b")[0].difference == -1.0
    with pytest.raises(ConfigError, match=r"no arm 'c' .* \['a'\]"):
        compare({"a": {0: 1.0}}, baseline="c")


def test_of_null_controls_about_one_in_twenty_is_told_apart():
    """The same arm twice, eight seeds, three comparisons each: a false claim among them no more often than promised."""
    rng = np.random.default_rng(0)
    claims = sum(min(holm([sign_flip_p(rng.normal(size=8)) for _ in range(3)])) < 0.05 for _ in range(1000))
    assert 25 <= claims <= 60
