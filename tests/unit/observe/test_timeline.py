"""The numbers behind timeline.png."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.observe.report import choose_window, lanes_of, mean_occupancy
from asyncrl.observe.spans import GENERATE, SCORE, STEP, Span


def test_lanes_are_generators_by_number_then_reward_then_learner() -> None:
    spans = [Span(STEP, 0, 1, "learner"), Span(SCORE, 0, 1, "reward-1"), Span(SCORE, 0, 1, "reward-0")]
    spans += [Span(GENERATE, 0, 1, f"generator-{number}") for number in (10, 2, 0)]
    assert [lane.process for lane in lanes_of(spans)] == ["generator-0", "generator-2", "generator-10", "reward", "learner"]


def test_mean_occupancy_is_the_share_of_each_bin() -> None:
    spans = [Span(GENERATE, 0.0, 2.0, "g"), Span(GENERATE, 1.0, 3.0, "g")]
    assert mean_occupancy(spans, np.array([0.0, 1.0, 2.0, 4.0])).tolist() == pytest.approx([1.0, 2.0, 0.5])
    assert mean_occupancy([], np.array([0.0, 1.0])).tolist() == [0.0]


@pytest.mark.parametrize(("step_s", "length_s"), [(0.1, 1.4), (5.0, 20.0)])
def test_window_is_in_the_middle_and_can_be_read(step_s: float, length_s: float) -> None:
    steps = [Span(STEP, step_s * number, step_s * (number + 1), "learner") for number in range(100)]
    first, last = choose_window(steps)
    assert last - first == pytest.approx(length_s)
    assert 0 < first < step_s * 50 < last < step_s * 100
