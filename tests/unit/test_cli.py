"""Exit statuses, and what is said of a run's folder when no run is started."""

import platform
import sys

import msgspec
import pytest

from asyncrl.cli import _exit_by, main
from asyncrl.observe.steps import STEPS_FILE, StepReport
from asyncrl.schema.status import ApiEndpoint, RunStatus
from asyncrl.serve.daemon import own_records
from tests.builders import write_rows


@pytest.fixture
def ended(tmp_path, monkeypatch, capsys):
    """Return a function that gives a command for `tmp_path` and returns its exit status, standard output and error."""
    (tmp_path / "config.toml").write_text("num_steps = 60\n[eval]\nat_end = false\n")

    def command(name, *options):
        monkeypatch.setattr(sys, "argv", ["asyncrl", name, str(tmp_path), *options])
        with pytest.raises(SystemExit) as exit_:
            main()
        return exit_.value.code or 0, *capsys.readouterr()

    return command


@pytest.mark.parametrize("command", ["status", "pause", "drain", "attach"])
def test_a_lost_run_ends_a_command_with_one_and_the_last_line_says_what_to_do(tmp_path, ended, command):
    (tmp_path / "api.json").write_bytes(msgspec.json.encode(ApiEndpoint("http://127.0.0.1:1", "token", 1, platform.node())))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "controller.log").write_text("12:00:00 INFO controller | step 7\n")
    status, _, said = ended(command)
    assert status == 1
    assert said.splitlines()[-1].endswith(f"`asyncrl resume {tmp_path}` goes on with it")


def test_a_run_that_has_done_more_steps_than_it_is_asked_for_says_how_many(tmp_path, ended):
    (tmp_path / "checkpoints" / "step-000060").mkdir(parents=True)
    write_rows(tmp_path / STEPS_FILE, StepReport(step=59, version=60, time_s=0.0, reward_mean=0.0))
    status, _, said = ended("resume", "--set", "num_steps=40")
    assert status == 2
    assert f"has done its 60 steps; `asyncrl resume {tmp_path} --set num_steps=120` trains more" in said


def test_a_run_of_a_daemon_that_serves_is_resumed_by_the_daemon(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "config.toml").touch()
    (folder / "served.json").touch()
    monkeypatch.setattr(sys, "argv", ["asyncrl", "resume", str(folder)])
    with own_records(tmp_path), pytest.raises(SystemExit) as exit_:
        main()
    assert (exit_.value.code, "POST /v1/runs/one/resume continues it" in capsys.readouterr().err) == (2, True)


def test_a_token_for_a_new_folder_says_so_and_one_of_no_role_makes_none(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "served"
    for role, code, said in (("viewr", 2, "'viewr' is not one of"), ("viewer", 0, f"{folder} is new"), ("operator", 0, "")):
        assert folder.exists() == (role == "operator")
        monkeypatch.setattr(sys, "argv", ["asyncrl", "token", "add", role, role, "--folder", str(folder)])
        with pytest.raises(SystemExit) as exit_:
            main()
        err = capsys.readouterr().err
        assert (exit_.value.code or 0, said in err, bool(err)) == (code, True, bool(said))


def test_a_report_of_a_run_without_steps_says_that_there_is_nothing_to_draw(tmp_path, ended):
    assert ended("report") == (0, f"{tmp_path} has no steps yet: there is nothing to draw\n", "")


def test_a_model_folder_without_a_config_is_refused_before_a_generator_joins(tmp_path, ended):
    status, _, said = ended("join", "--model", str(tmp_path / "none"))
    assert status == 2
    assert f"--model {tmp_path / 'none'}: there is no config.json in it" in said


@pytest.mark.parametrize(("version", "reason", "at_end", "missing"), [
    (9, "goal reached", True, ""), (9, "drained by a signal", False, ""), (8, "drained by a signal", False, "its last step"),
    (9, "drained by a signal", True, "the end of its last evaluation, or its last checkpoint"),
])  # fmt: skip
def test_a_run_without_its_last_evaluation_has_not_finished(tmp_path, capsys, version, reason, at_end, missing):
    (tmp_path / "config.toml").write_text(f"num_steps = 9\n[eval]\nat_end = {str(at_end).lower()}\n")
    (tmp_path / "checkpoints" / "step-000009").mkdir(parents=True)
    status = RunStatus(name="r", run_folder=str(tmp_path), phase="ended", reason=reason, version=version, num_steps=9)
    if not missing:
        _exit_by(status, tmp_path)
        return
    with pytest.raises(SystemExit) as ended:
        _exit_by(status, tmp_path)
    assert ended.value.code == 3
    assert f"ended before {missing}; `asyncrl resume" in capsys.readouterr().err
