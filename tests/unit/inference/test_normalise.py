"""Scores to rewards."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.stages import RewardModel
from asyncrl.inference.normalise import RunningMoments, ScoreNormaliser

scores_lists = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=40)


def _normaliser(**settings):
    return ScoreNormaliser(RewardModel(name="judge", path="", **settings))


@given(scores_lists)
def test_running_moments_are_those_of_all_values_at_once(values):
    moments = RunningMoments()
    for value in values:
        moments.add(value)
    assert moments.count == len(values)
    assert moments.mean == pytest.approx(np.mean(values), abs=1e-9, rel=1e-9)
    assert moments.std == pytest.approx(np.std(values, ddof=1), abs=1e-7, rel=1e-7)


def test_running_moments_keep_their_digits_far_from_zero():
    moments = RunningMoments()
    for value in (1e9 + 4, 1e9 + 7, 1e9 + 13, 1e9 + 16):
        moments.add(value)
    assert moments.std**2 == pytest.approx(30.0)


def test_fixed_figures_shift_scale_and_clip():
    normaliser = _normaliser(mean=2.0, std=4.0, clip=1.5)
    assert normaliser.normalise([2.0, 4.0, 10.0, -10.0], [True] * 4) == [0.0, 0.5, 1.5, -1.5]
    assert normaliser.moments.count == 0


@given(scores_lists, scores_lists)
def test_running_scores_come_after_the_fixed_figures_and_before_the_clip(first, second):
    normaliser = _normaliser(normalise="running", mean=1.0, std=2.0, clip=0.7)
    normaliser.normalise(first, [True] * len(first))
    rewards = normaliser.normalise(second, [True] * len(second))
    seen = (np.array(first + second) - 1.0) / 2.0
    spread = np.std(seen, ddof=1)
    expected = np.clip(((np.array(second) - 1.0) / 2.0 - seen.mean()) / (spread if spread > 0 else 1.0), -0.7, 0.7)
    if spread > 1e-6:
        assert rewards == pytest.approx(expected.tolist(), abs=1e-6)


def test_equal_scores_give_equal_rewards_within_a_batch_and_a_first_score_gives_0():
    normaliser = _normaliser(normalise="running")
    assert normaliser.normalise([3.0], [True]) == [0.0]
    rewards = normaliser.normalise([5.0, 1.0, 5.0], [True] * 3)
    assert rewards[0] == rewards[2] > rewards[1]


def test_what_does_not_count_is_normalised_and_not_remembered():
    normaliser = _normaliser(normalise="running")
    normaliser.normalise([0.0, 2.0], [True, True])
    assert normaliser.normalise([1.0, 101.0], [False, False]) == pytest.approx([0.0, 100 / 2**0.5])
    assert normaliser.moments.count == 2
