"""Pairs of a group, against a search over all pairs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.pairs import choose_pairs
from asyncrl.config.algorithm import PreferenceConfig

BEST_WORST = PreferenceConfig()
REWARDS = st.dictionaries(st.integers(0, 9), st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0, 2.0]), max_size=8)


def threshold(most=1, chosen=1.0, rejected=0.0):
    return PreferenceConfig(pairs="threshold", chosen_at_least=chosen, rejected_at_most=rejected, max_pairs_per_group=most)


def test_best_is_paired_with_worst_and_the_first_of_equals_counts():
    assert choose_pairs({0: 0.5, 1: 2.0, 2: 2.0, 3: -1.0, 4: -1.0}, BEST_WORST) == ((1, 3),)


def test_equal_rewards_make_no_pair():
    assert choose_pairs({0: 0.5, 1: 0.5}, BEST_WORST) == ()
    assert choose_pairs({0: 0.5}, BEST_WORST) == ()
    assert choose_pairs({}, BEST_WORST) == ()


def test_thresholds_pair_in_member_order_and_use_each_sample_once():
    rewards = {0: 0.0, 1: 1.0, 2: 1.5, 3: -1.0, 4: 1.0, 5: 0.5}
    assert choose_pairs(rewards, threshold(most=9)) == ((1, 0), (2, 3))
    assert choose_pairs(rewards, threshold(most=1)) == ((1, 0),)
    assert choose_pairs(rewards, threshold(most=9, chosen=1.5, rejected=1.0)) == ((2, 0),)


def test_thresholds_that_nothing_meets_make_no_pair():
    assert choose_pairs({0: 0.5, 1: 0.9}, threshold(most=9)) == ()


@given(REWARDS)
def test_no_pair_has_a_wider_gap_than_best_and_worst(rewards):
    pairs = choose_pairs(rewards, BEST_WORST)
    gaps = [rewards[a] - rewards[b] for a in rewards for b in rewards]
    assert bool(pairs) == (max(gaps, default=0.0) > 0)
    assert all(rewards[chosen] - rewards[rejected] == max(gaps) for chosen, rejected in pairs)


@given(REWARDS, st.integers(1, 4))
def test_threshold_pairs_are_as_many_as_there_can_be(rewards, most):
    pairs = choose_pairs(rewards, threshold(most))
    good = sum(reward >= 1.0 for reward in rewards.values())
    bad = sum(reward <= 0.0 for reward in rewards.values())
    members = [index for pair in pairs for index in pair]
    assert len(pairs) == min(good, bad, most)
    assert len(set(members)) == len(members)
    assert all(rewards[chosen] >= 1.0 and rewards[rejected] <= 0.0 for chosen, rejected in pairs)
