"""Pictures are drawn from what a run folder holds, and from no more than that; both are seen in tests/integration/run."""

from pathlib import Path

from asyncrl.observe.report import write_report
from asyncrl.observe.spans import SPANS_FILE
from asyncrl.observe.steps import EVAL_FILE


def test_run_without_evaluations_and_spans_has_its_reward(run_folder: Path) -> None:
    (run_folder / EVAL_FILE).unlink()
    (run_folder / SPANS_FILE).unlink()
    assert write_report(run_folder) == {"reward": run_folder / "reward.png"}
    assert (run_folder / "reward.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert not list(run_folder.glob(".*.tmp"))
