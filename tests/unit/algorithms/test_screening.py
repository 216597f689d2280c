"""Pairs of a group, against a search over all pairs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms import screening
from asyncrl.config.algorithm import PreferenceConfig

EQUAL, CUT, PAIRS = {"drop_equal": True}, {"mask_truncated": True}, {"preference": PreferenceConfig()}
GREEDY = {"greedy_index": 2}


@pytest.mark.parametrize(("screen", "rewards", "truncated", "objection", "trained"), [
    ({}, [1.0, 1.0], (), "", (0, 1)),
    ({}, [1.0, None, 0.0], (0, 2), "", (0, 2)),
    (GREEDY, [1.0, 0.0, 1.0], (), "", (0, 1)),
    (EQUAL, [1.0, None, 1.0], (), screening.NO_SPREAD, (0, 2)),
    (EQUAL, [1.0, 0.5], (), "", (0, 1)),
    (EQUAL | GREEDY, [1.0, 1.0, 0.0], (), "", (0, 1)),
    (EQUAL | GREEDY, [1.0, 1.0, 1.0], (), screening.NO_SPREAD, (0, 1)),
    (CUT, [1.0, 0.0], (0, 1), screening.TRUNCATED, (0, 1)),
    (CUT, [1.0, 0.0, 1.0], (1,), "", (0, 2)),
    (CUT | GREEDY, [1.0, 0.0, 1.0], (0, 1), screening.TRUNCATED, (0, 1)),
    (CUT | GREEDY, [1.0, 0.0, 1.0], (2,), "", (0, 1)),
    (PAIRS, [0.5, 0.5], (), screening.NO_PAIR, ()),
    (PAIRS, [0.5, 0.0, 0.7, 1.0], (), "", (1, 3)),
    (PAIRS | CUT, [1.0, 0.0], (1,), screening.NO_PAIR, ()),
    (PAIRS | CUT, [0.5, 0.0, 0.7, 1.0], (3,), "", (1, 2)),
])  # fmt: skip
def test_a_group_that_teaches_nothing_is_objected_to_and_what_teaches_is_trained(screen, rewards, truncated, objection, trained):
    held = [screening.Member(index, reward, index in truncated) for index, reward in enumerate(rewards) if reward is not None]
    assert screening.objection(held, screening.Screen(**screen)) == objection
    assert screening.trained_members(held, screening.Screen(**screen)) == trained


REWARDS = st.dictionaries(st.integers(0, 9), st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0, 2.0]), max_size=8)


def threshold(most=1, chosen=1.0, rejected=0.0):
    return PreferenceConfig(pairs="threshold", chosen_at_least=chosen, rejected_at_most=rejected, max_pairs_per_group=most)


@given(REWARDS)
def test_best_is_paired_with_worst_and_the_first_of_equals_counts(rewards):
    ordered = sorted(rewards.items(), key=lambda item: (item[1], -item[0]))
    expected = ()
    if len(set(rewards.values())) > 1:
        expected = ((ordered[-1][0], min(rewards, key=lambda index: (rewards[index], index))),)
    assert screening.choose_pairs(rewards, PreferenceConfig()) == expected


@given(REWARDS, st.integers(1, 4))
def test_threshold_pairs_are_as_many_as_there_can_be(rewards, most):
    pairs = screening.choose_pairs(rewards, threshold(most))
    good = sum(reward >= 1.0 for reward in rewards.values())
    bad = sum(reward <= 0.0 for reward in rewards.values())
    members = [index for pair in pairs for index in pair]
    assert len(pairs) == min(good, bad, most)
    assert len(set(members)) == len(members)
    assert all(rewards[chosen] >= 1.0 and rewards[rejected] <= 0.0 for chosen, rejected in pairs)
