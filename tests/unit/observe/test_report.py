"""Pictures are drawn from what a run folder holds, and from no more than that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asyncrl.observe.report import MOST_GENERATORS_SHOWN, choose_window, draw_timeline, lanes_of, mean_occupancy, write_report
from asyncrl.observe.spans import GENERATE, SCORE, SPANS_FILE, STEP, Span
from asyncrl.observe.steps import EVAL_FILE

PNG = b"\x89PNG\r\n\x1a\n"


def test_both_pictures_of_a_whole_run(run_folder: Path) -> None:
    paths = write_report(run_folder)
    assert paths == {"reward": run_folder / "reward.png", "timeline": run_folder / "timeline.png"}
    assert all(path.read_bytes().startswith(PNG) for path in paths.values())
    assert not list(run_folder.glob(".*.tmp"))


def test_run_without_evaluations_and_spans_has_its_reward(run_folder: Path) -> None:
    (run_folder / EVAL_FILE).unlink()
    (run_folder / SPANS_FILE).unlink()
    assert list(write_report(run_folder)) == ["reward"]


def test_many_generators_are_not_all_drawn_and_the_title_says_so() -> None:
    spans = [Span(GENERATE, 0.0, 1.0, f"generator-{number}") for number in range(64)] + [Span(STEP, 0.0, 1.0, "learner")]
    figure = draw_timeline(lanes_of(spans), "big")
    assert figure.get_suptitle().endswith(f"({64 - MOST_GENERATORS_SHOWN} more generators not shown)")
    assert len(figure.axes[0].get_yticks()) == MOST_GENERATORS_SHOWN + 1


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
