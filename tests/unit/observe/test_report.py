"""Pictures are drawn from what a run folder holds, and from no more than that."""

from __future__ import annotations

from pathlib import Path

from asyncrl.observe.report import write_report
from asyncrl.observe.spans import SPANS_FILE
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
