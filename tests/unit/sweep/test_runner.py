"""What a sweep does about what it finds: cells that ended, that were begun, that are of something else, that fail."""

import asyncio
import fcntl

import msgspec
import pytest
from msgspec.structs import replace

from asyncrl.errors import ConfigError, RunError
from asyncrl.observe.steps import EvalReport, StepReport
from asyncrl.sweep.grid import load_sweep
from asyncrl.sweep.results import code_now, read_results
from asyncrl.sweep.runner import CELL_FILE, Begun, run_sweep, status_text
from tests.builders import write_rows
from tests.virtual_clock import VirtualClock

COMMAND = '[[external]]\nname = "shell"\ncommand = ["sh", "-c", "test ! -e broken && cp given.json $0/result.json", "{out}"]\n'


def written(folder, text):
    (folder / "sweep.toml").write_text(f'base = "quickstart"\nseeds = 2\nmetrics = ["reward"]\n{text}')
    return load_sweep(folder)


@pytest.fixture
def swept(tmp_path):
    """Write a sweep of this text and run it, or go on with it."""
    said: list[str] = []
    (tmp_path / "given.json").write_text('{"seconds": [1.0, 2.0], "rewards": [0.2, 0.6]}')

    def run(text: str, *, resumed: bool = False):
        sweep = written(tmp_path, text)
        asyncio.run(run_sweep(sweep, VirtualClock(), said.append, resumed=resumed))
        return read_results(sweep.results), said

    return run


def begin(sweep, cell, num_steps: int, **more) -> None:
    """Write what a run of this cell leaves that came so far."""
    folder = sweep.cells_folder / cell.id
    folder.mkdir(parents=True)
    (folder / CELL_FILE).write_bytes(msgspec.json.encode(Begun(**{"settings": cell.settings, "code": code_now(), **more})))
    steps = [StepReport(step=step, version=step + 1, time_s=float(step), reward_mean=0.5) for step in range(num_steps)]
    write_rows(folder / "steps.jsonl", *steps)
    write_rows(folder / "eval.jsonl", EvalReport(version=num_steps, accuracy=0.5, num_samples=8, finished_s=9.0))


def test_commands_are_run_and_one_that_fails_stops_the_sweep_and_is_run_again(swept, tmp_path):
    (tmp_path / "broken").touch()
    with pytest.raises(RunError, match=r"the command of shell seed 0 ended with 1; see .*command.log"):
        swept(COMMAND)
    assert read_results(tmp_path / "results.jsonl") == []
    (tmp_path / "broken").unlink()
    with pytest.raises(ConfigError, match=r"0 of 2 cells are in .* 1 more were begun: `asyncrl sweep resume` goes on"):
        swept(COMMAND)
    lines, said = swept(COMMAND, resumed=True)
    assert [(line.seed, line.attempts, line.outcome.reward) for line in lines] == [(0, 2, 0.4), (1, 1, 0.4)]
    assert said == ["1/2 shell-seed0: reward 0.400 (2 steps in 2 s)", "2/2 shell-seed1: reward 0.400 (2 steps in 2 s)"]


def test_runs_that_ended_as_their_sweep_was_killed_are_not_run_again(swept, tmp_path):
    text = "set = { num_steps = 3 }\n"
    sweep = written(tmp_path, text)
    for cell in sweep.cells:
        begin(sweep, cell, 3)
    lines, _ = swept(text, resumed=True)
    assert [(line.seed, line.outcome.steps, line.outcome.accuracy) for line in lines] == [(0, 3, 0.5), (1, 3, 0.5)]
    assert status_text(sweep) == "base  2/2 done"
    again, _ = swept(text, resumed=True)
    assert again == lines
    for change in ("bar = 0.1\nwindow = 3\n", "window = 3\n"):
        with pytest.raises(ConfigError, match="base seed 0 with other settings, bar, window or metrics than"):
            swept(change + text, resumed=True)
    (tmp_path / "sweep.toml").write_text(f'base = "quickstart"\nseeds = 3\nmetrics = ["reward"]\n{text}')
    assert status_text(load_sweep(tmp_path)).startswith("base  2/3 done")


def test_a_cell_that_ran_beside_others_says_so_after_a_resume_with_one_job(swept, tmp_path):
    sweep = written(tmp_path, COMMAND)
    begin(sweep, sweep.cells[0], 0, jobs=2)
    lines, _ = swept(COMMAND, resumed=True)
    assert [line.jobs for line in lines] == [2, 1]


def test_every_arm_is_checked_in_full_before_the_first_cell_runs(swept, tmp_path):
    few = '[[axes]]\nname = "x"\nchoices = { few = { "task.digits" = 1, "task.held_out" = 512 }, rest = {} }\n'
    with pytest.raises(ConfigError, match=r"the runs of few would fail:\n.*held_out"):
        swept(COMMAND + few)
    assert [path.name for path in (tmp_path / "cells").iterdir()] == ["lock"]


def test_what_is_of_something_else_is_refused(swept, tmp_path):
    text = "set = { num_steps = 3 }\n"
    sweep = written(tmp_path, text)
    begin(sweep, sweep.cells[0], 2, code=replace(code_now(), files="other"))
    assert status_text(sweep) == "base  0/2 done, seed 0 at step 2 of 3"
    with pytest.raises(ConfigError, match=r"\(other\), this is .* Results of two codes are not mixed"):
        swept(text, resumed=True)
    with pytest.raises(ConfigError, match="was begun with other settings"):
        swept(text.replace("3", "4"), resumed=True)
    (sweep.cells_folder / sweep.cells[0].id / CELL_FILE).write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        swept(text, resumed=True)


def test_two_sweeps_in_one_folder_are_one_too_many(swept, tmp_path):
    (tmp_path / "cells").mkdir()
    with (tmp_path / "cells" / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another sweep works in"):
            swept(COMMAND)
