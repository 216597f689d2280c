"""Following a run: lines for a pipe, a picture for a terminal, the reason when it failed."""

import io
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from asyncrl.config.run import RunConfig
from asyncrl.observe.display import RunView, follow_run
from asyncrl.observe.report import DrawnStep, draw_reward, write_report
from asyncrl.observe.spans import SPANS_FILE
from asyncrl.observe.steps import EVAL_FILE, EvalReport, StepReport, read_steps
from asyncrl.schema.status import ProcessStatus, RunStatus
from tests.builders import write_rows


class PlayedRun:
    """A run that plays the steps of a folder back at once."""

    def __init__(self, run_folder: Path) -> None:
        self.run_folder, self.version = run_folder, 0

    async def status(self) -> RunStatus:
        over = self.version == 60
        phase, checkpoint = ("stopped", "checkpoints/step-000060") if over else ("running", "")
        waits = (ProcessStatus("learner", "learner", 1, "ready", 0, "a batch", 3.0),)
        return RunStatus(
            name="played [one]", run_folder=str(self.run_folder), phase=phase, version=self.version, num_steps=60,
            checkpoint=checkpoint, waiting="learner waits for a batch since 3 s", processes=waits,
        )  # type: ignore[arg-type]  # fmt: skip

    async def steps(self, first: int = 0) -> AsyncIterator[StepReport]:
        for report in read_steps(self.run_folder)[first:]:
            self.version = report.version
            yield report


async def followed(run: PlayedRun, *, plain: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=not plain)
    await follow_run(run.status, run.steps(), run.run_folder, plain=plain, console=console)
    return out.getvalue()


async def test_a_pipe_gets_one_line_a_step_and_the_outcome_and_a_terminal_the_panel(run_folder: Path) -> None:
    lines = (await followed(PlayedRun(run_folder), plain=True)).splitlines()
    assert sum(line.startswith("step ") for line in lines) == 60
    assert "held-out accuracy 0.270 (version 0) -> 0.840 (version 60), 256 samples each" in lines
    assert f"reward      {run_folder / 'reward.png'}" in lines
    assert "checkpoint  checkpoints/step-000060" in lines
    assert lines[-1] == "stopped"
    panel = Text.from_ansi(await followed(PlayedRun(run_folder), plain=False)).plain
    for part in ("played [one]", "staleness", "learner waits for a batch since 3 s", "3 groups ready  40 running  2 scoring"):
        assert part in panel
    assert {len(line) for line in panel.splitlines() if line.startswith("│")} == {100}
    for name in (EVAL_FILE, SPANS_FILE, "reward.png"):
        (run_folder / name).unlink()
    assert write_report(run_folder) == {"reward": run_folder / "reward.png"}  # of what there is, and of no more
    assert (run_folder / "reward.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert not list(run_folder.glob(".*.tmp"))  # noqa: ASYNC240 - a fixture of files


def test_the_rewards_of_a_run_are_smoothed_over_a_twelfth_of_it() -> None:
    steps = [DrawnStep(step, step + 1, float(step % 2)) for step in range(2_400)]
    smooth = draw_reward(steps, [], RunConfig()).axes[0].lines[1].get_ydata()
    assert list(smooth[:3]) == [0.0, 0.5, pytest.approx(1 / 3)]
    assert smooth[-1] == pytest.approx(0.5)


async def test_an_evaluation_of_which_every_sample_failed_is_told_from_one_without_a_right_answer(run_folder: Path) -> None:
    all_failed = EvalReport(version=0, accuracy=0.0, num_samples=16, num_failed=16)
    (run_folder / EVAL_FILE).unlink()
    write_rows(run_folder / EVAL_FILE, all_failed, EvalReport(version=3, accuracy=0.0, num_samples=16, num_failed=1))
    lines = (await followed(PlayedRun(run_folder), plain=True)).splitlines()
    both = "0.000 (version 0, 16 of 16 failed) -> 0.000 (version 3, 1 of 16 failed), 16 samples each"
    assert f"held-out accuracy {both}" in lines
    warning = "WARNING: all held-out samples of version 0 failed: its accuracy says nothing of the policy"
    assert [line for line in lines if line.startswith("WARNING")] == [warning]


def status(phase: str = "running", *, deaths: int = 0, why: str = "", **more: object) -> RunStatus:
    process = ProcessStatus("generator-0", "generator", 7, "ready", deaths, last_death=why)
    return RunStatus(name="r", run_folder="runs/r", phase=phase, num_steps=100, processes=(process,), uptime_s=65.0, **more)  # type: ignore[arg-type]


def test_only_what_is_new_in_a_status_is_news() -> None:
    view = RunView()
    assert view.take_status(status("warming")) == ["warming"]
    assert view.take_status(status("warming")) == []
    died, accuracy = "generator-0 died (once so far), now ready: no memory for it", "held-out accuracy before training 0.250"
    assert view.take_status(status(deaths=1, why="no memory\nfor it", accuracy_before=0.25)) == ["running", died, accuracy]
    assert view.take_status(status("failed", deaths=1, accuracy_before=0.25, reason="stalled")) == ["failed: stalled"]
    assert view.events[0] == "1:05  warming"
    (died,) = view.take_status(status("failed", deaths=2, why="much to say " * 100))
    assert died.startswith("generator-0 died (2 times so far), now ready: much to say")
    assert len(died) < 500
