"""The command line as a user meets it: a real terminal process, real signals."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from typer.testing import CliRunner, Result

import asyncrl
from asyncrl.cli import app
from asyncrl.observe.steps import STEPS_FILE, StepReport
from tests.builders import write_rows
from tests.integration.conftest import NO_EVALUATION, NO_MODEL, NO_MODELS, assert_gone, command_line, recorded_pids, written


class Following:
    """`asyncrl run` or `resume` in the background, its output line by line."""

    def __init__(self, path: Path, command: str = "run", *options: str) -> None:
        arguments = [sys.executable, "-m", "asyncrl", command, str(path), "--plain", *options]
        self.process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.lines: list[str] = []

    def until(self, pattern: str) -> str:
        """Read output until a line matches."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return line
        raise AssertionError(f"{pattern!r} never came; the output was:\n{''.join(self.lines)}")

    def rest(self) -> int:
        """Read the rest of the output and return the exit code."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout.readlines()
        self.process.stdout.close()
        return self.process.wait(60)

    def family(self) -> set[psutil.Process]:
        """The process and everything below it."""
        return {psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)}


def said(*words: object) -> Result:
    """Return what the command line says in this process."""
    return CliRunner().invoke(app, [*map(str, words)])


ENDLESS = {**NO_EVALUATION, "num_steps": 100_000, "checkpoint__every_steps": 0}


def test_a_run_is_ordered_from_another_terminal_drains_at_one_interrupt_and_resumes(tiny, tmp_path):
    following, run_folder = Following(written(tiny(**ENDLESS, **NO_MODELS), tmp_path / "c.toml")), tmp_path / "tiny"
    following.until(r"\b1/100000|version\D+1\b|step\D+1\b")
    status = json.loads(command_line("status", run_folder, "--json").stdout)
    assert status["phase"] == "running"
    assert {process["name"] for process in status["processes"]} == {"learner", "generator-0", "reward-0"}
    assert "paused" in command_line("pause", run_folder).stdout
    held = json.loads(command_line("status", run_folder, "--json").stdout)
    assert "`asyncrl change" in command_line("resume", run_folder, "--set", "seed=9").stderr
    assert "running" in command_line("resume", run_folder).stdout
    assert held["phase"] == "paused"
    following.until(rf"\bstep {held['version'] + 2}/100000")
    assert (Path(command_line("checkpoint", run_folder).stdout.strip()) / "trainer" / "state.json").is_file()
    family = following.family()
    os.kill(following.process.pid, signal.SIGINT)
    assert following.rest() == 3, "".join(following.lines)
    assert "`asyncrl resume" in following.lines[-1]
    assert_gone(family)
    assert run_folder.stat().st_mode & 0o777 == 0o700
    checkpoints = sorted((run_folder / "checkpoints").glob("step-*"))
    assert checkpoints, "a drain writes a checkpoint"
    reached = int(checkpoints[-1].name.removeprefix("step-"))
    resumed = command_line("resume", run_folder, "--plain", "--set", f"num_steps={reached + 2}")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    lines = resumed.stdout.splitlines()
    assert [line for line in lines if line.endswith(f"resumed at step {reached} from {checkpoints[-1]}")], lines
    shown = [int(found[1]) for line in lines if (found := re.match(r"step (\d+)", line))]
    assert shown == [reached + 1, reached + 2]
    again = command_line("resume", run_folder)
    assert again.returncode == 2
    assert f"has done its {reached + 2} steps; `asyncrl resume {run_folder} --set num_steps=" in again.stderr
    trained = said("inspect", run_folder, "--sample", "g0.0")
    assert re.search(r"^completion: '.+'$", trained.stdout, re.MULTILINE), trained.output
    nowhere = said("inspect", run_folder, "--sample", f"g{10**30}.0")
    assert isinstance(nowhere.exception, asyncrl.AsyncRLError)
    overview = json.loads(said("inspect", run_folder, "--json").stdout)
    assert overview["steps"][-1]["step"] == reached + 1
    assert {row["state"] for row in overview["states"]} <= {"trained", "ready", "scoring", "running"}


def test_two_interrupts_stop_at_once_and_as_a_kill_of_the_command_line_leave_nothing_running(tiny, tmp_path):
    patient = ("--set", "supervision.drain_timeout_s=1000", "--set", "supervision.stall_timeout_s=1000")
    following = Following(written(tiny(**ENDLESS, **NO_MODELS), tmp_path / "c.toml"), "run", *patient)
    following.until(r"\b1/100000|version\D+1\b|step\D+1\b")
    family = following.family()
    learner = recorded_pids(tmp_path / "tiny")["learner"]
    os.kill(learner, signal.SIGSTOP)  # so that the drain cannot end
    os.kill(following.process.pid, signal.SIGINT)
    following.until("Ctrl-C again")
    asked_s = time.monotonic()
    os.kill(following.process.pid, signal.SIGINT)
    assert following.rest() == 3
    assert time.monotonic() - asked_s < 200, "two seconds on a machine that does nothing else; the drain would wait for 1000"
    with contextlib.suppress(ProcessLookupError):  # the controller has killed it, where this test was late
        os.kill(learner, signal.SIGCONT)
    assert not list((tmp_path / "tiny" / "checkpoints").glob("step-*")), "it waited for a drain"
    assert_gone(family)
    again = Following(tmp_path / "tiny", "resume")
    again.until(r"\bstep \d+/100000")  # a new one: those before are told again without the goal
    family = again.family()
    assert recorded_pids(tmp_path / "tiny").keys() == {"learner", "generator-0", "reward-0"}
    os.kill(again.process.pid, signal.SIGKILL)
    again.rest()
    assert_gone(family)


def test_a_failed_start_exits_with_one_says_why_and_does_not_keep_the_name(tiny, tmp_path):
    folder = tmp_path / "no-model-at-all"
    model = {"kind": "pretrained", "path": str(folder)}
    config = written(tiny(model=model, generate__engine=NO_MODEL, supervision__max_deaths=0), tmp_path / "c.toml")
    assert f"model.path: there is no folder {folder}" in str(said("run", config, "--plain").exception)
    assert not (tmp_path / "tiny").exists()
    (checkpoints := tmp_path / "killed" / "checkpoints").mkdir(parents=True)
    killed = {"model": model, "num_steps": 75, "name": "killed"}
    written(tiny(**killed, **NO_EVALUATION), checkpoints.parent / "config.toml")
    write_rows(checkpoints.parent / STEPS_FILE, StepReport(step=74, version=75, time_s=0.0, reward_mean=0.0))
    for newest, answer in {50: "there is no folder", 75: "has done its 75 steps"}.items():  # the last may never have been written
        (checkpoints / f"step-{newest:06}").mkdir()
        assert answer in str(said("resume", checkpoints.parent).exception)
    written(tiny(**killed), checkpoints.parent / "config.toml")  # its last evaluation is left
    assert "there is no folder" in str(said("resume", checkpoints.parent).exception)
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    answer = command_line("run", config, "--plain")
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert "learner" in answer.stderr
    mended = written(tiny(num_steps=2, **NO_EVALUATION | NO_MODELS), config)
    assert command_line("run", mended, "--plain").returncode == 0
    assert "already holds a run" in str(said("run", mended, "--plain").exception)
