from __future__ import annotations

import pytest

from asyncrl.algorithms.screening import (
    NO_PAIR,
    NO_SPREAD,
    TRUNCATED,
    Member,
    Screen,
    objection,
    pairs_among,
    trained_members,
)
from asyncrl.config.algorithm import AlgorithmConfig, PreferenceConfig


def members(rewards, truncated=()):
    return [Member(index, reward, index in truncated) for index, reward in enumerate(rewards) if reward is not None]


@pytest.mark.parametrize(
    ("screen", "rewards", "truncated", "expected"),
    [
        (Screen(), [1.0, 1.0], (), ""),
        (Screen(), [1.0, 0.0], (0, 1), ""),
        (Screen(drop_equal=True), [1.0, 1.0], (), NO_SPREAD),
        (Screen(drop_equal=True), [1.0, None, 1.0], (), NO_SPREAD),
        (Screen(drop_equal=True), [1.0, 0.5], (), ""),
        (Screen(drop_equal=True, greedy_index=2), [1.0, 1.0, 0.0], (), ""),
        (Screen(drop_equal=True, greedy_index=2), [1.0, 1.0, 1.0], (), NO_SPREAD),
        (Screen(mask_truncated=True), [1.0, 0.0], (0, 1), TRUNCATED),
        (Screen(mask_truncated=True), [1.0, 0.0], (0,), ""),
        (Screen(mask_truncated=True, greedy_index=2), [1.0, 0.0, 1.0], (0, 1), TRUNCATED),
        (Screen(mask_truncated=True, greedy_index=2), [1.0, 0.0, 1.0], (2,), ""),
        (Screen(preference=PreferenceConfig()), [1.0, 1.0], (), NO_PAIR),
        (Screen(preference=PreferenceConfig()), [1.0, 0.0], (), ""),
        (Screen(preference=PreferenceConfig(), mask_truncated=True), [1.0, 0.0], (1,), NO_PAIR),
    ],
)
def test_a_group_is_objected_to_where_it_teaches_nothing(screen, rewards, truncated, expected):
    assert objection(members(rewards, truncated), screen) == expected


@pytest.mark.parametrize(
    ("screen", "rewards", "truncated", "expected"),
    [
        (Screen(), [1.0, None, 0.0], (2,), (0, 2)),
        (Screen(greedy_index=2), [1.0, 0.0, 1.0], (), (0, 1)),
        (Screen(mask_truncated=True), [1.0, 0.0, 1.0], (1,), (0, 2)),
        (Screen(mask_truncated=True), [1.0, 0.0], (0, 1), (0, 1)),
        (Screen(mask_truncated=True, greedy_index=2), [1.0, 0.0, 1.0], (0, 1), (0, 1)),
        (Screen(preference=PreferenceConfig()), [0.5, 0.0, 0.7, 1.0], (), (1, 3)),
        (Screen(preference=PreferenceConfig()), [0.5, 0.5], (), ()),
        (Screen(preference=PreferenceConfig(), mask_truncated=True), [0.5, 0.0, 0.7, 1.0], (3,), (1, 2)),
    ],
)
def test_only_what_teaches_is_trained(screen, rewards, truncated, expected):
    assert trained_members(members(rewards, truncated), screen) == expected


def test_there_are_no_pairs_without_preferences():
    assert pairs_among(members([1.0, 0.0]), Screen()) == ()


def test_the_screen_of_a_config():
    remax = AlgorithmConfig(advantage="remax", group_size=4, dynamic_sampling=True, mask_truncated=True)
    assert Screen.of(remax) == Screen(drop_equal=True, mask_truncated=True, greedy_index=4)
    dpo = AlgorithmConfig(kind="dpo", advantage="remax", preference=PreferenceConfig(beta=0.5))
    assert Screen.of(dpo) == Screen(preference=PreferenceConfig(beta=0.5))
    assert dpo.members_per_group == dpo.group_size
