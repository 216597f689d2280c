"""The command line under wrong input, damaged run folders, two starts at once, and an output that is lost."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl import Run, cli
from asyncrl.config.load import dump_config, load_config, parse_config
from asyncrl.control.launch.processes import until_gone
from asyncrl.errors import ConfigError, LaunchError
from asyncrl.folders import lock_folder, write_whole
from asyncrl.tasks.json_lines import read_json_lines

FOLLOWER = """
import asyncio, os, signal, sys
from pathlib import Path
from asyncrl import cli
from asyncrl.observe.steps import StepReport
from asyncrl.schema.status import RunStatus


class Played:
    run_folder, drained, choices = Path("runs/r"), asyncio.Event(), ()

    async def __aenter__(self):
        return self

    async def __aexit__(self, kind, error, trace):
        Path("left").write_text(f"drained {self.drained.is_set()}")

    async def status(self):
        return RunStatus(name="r", run_folder="runs/r", phase="running", version=1, num_steps=9)

    async def steps(self, first=0):
        if "hangup" in sys.argv:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)  # the kernel and the shell both say it
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
                await self.drained.wait()
        else:
            await asyncio.sleep(60)
        return
        yield

    async def drain(self):
        self.drained.set()


try:
    cli._carry_out(Played(), detach=False, plain=True)
except cli.AsyncRLError as error:
    sys.exit(f"asyncrl: {error}")
"""


def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[int, str]:
    """Return the exit status of the command line and what it said on standard error."""
    monkeypatch.setattr(sys, "argv", ["asyncrl", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0), capsys.readouterr().err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the config of a run that generated nothing."""
    made = tmp_path / "r"
    (made / "logs").mkdir(parents=True)
    (made / "config.toml").write_text(dump_config(parse_config({"folder": str(tmp_path), "name": "r"})))
    return made


@pytest.mark.parametrize(("option", "words"), [
    ("\udcff=1", "is not UTF-8 text"), ("name=caf\udce9", r"or an override, is not UTF-8 text: 'caf\udce9'"),
    (r'folder="a\u0000b"', r"folder has a null character: 'a\x00b'"), ("num_steps=" + "[" * 2000, "Expected `int`"),
])  # fmt: skip
def test_an_option_of_any_bytes_is_refused_in_one_line(capsys, monkeypatch, option, words):
    status, line = said(capsys, monkeypatch, "run", "quickstart", "--dry-run", "--set", option)
    assert (status, line.count("\n")) == (2, 1), line
    assert words in line


def test_a_config_that_says_nothing_starts_no_run_and_resumes_none(capsys, monkeypatch, folder):
    (folder / "config.toml").write_text("num_steps = " + "9" * 5000)
    assert "is not TOML: " in said(capsys, monkeypatch, "resume", folder)[1]
    (folder / "config.toml").write_text("# \n")
    for command in (("run", folder / "config.toml", "--dry-run"), ("resume", folder)):
        assert said(capsys, monkeypatch, *command) == (
            2,
            f"asyncrl: {folder / 'config.toml'} says nothing: it is empty, or was cut short\n",
        )
    with pytest.raises(ConfigError, match="says nothing"):
        Run(resume=folder)


def test_files_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "c.toml").write_text('name = "x"\n', encoding="utf-8-sig")
    (tmp_path / "d.jsonl").write_text('{"question": "q"}\n', encoding="utf-8-sig")
    assert load_config(tmp_path / "c.toml").name == "x"
    assert [line.fields for line in read_json_lines(tmp_path / "d.jsonl")] == [{"question": "q"}]


def test_a_file_of_another_version_is_named_with_its_line(capsys, monkeypatch, folder):
    (folder / "steps.jsonl").write_text('torn\n{"step": "three"}\n')
    for command in ("resume", "report"):
        status, line = said(capsys, monkeypatch, command, folder)
        assert (status, line.count("\n")) == (2, 1), line
        assert f"{folder / 'steps.jsonl'}, line 2, is not what this version writes there" in line
    status, line = said(capsys, monkeypatch, "status", folder.parent)
    assert (status, "no run folder" in line) == (2, True)
    status, line = said(capsys, monkeypatch, "simulate", "--from-run", folder / "logs")
    assert (status, line) == (2, f"asyncrl: {folder / 'logs'} is no run folder: it has no config.toml\n")


def test_a_second_sweep_of_a_simulation_is_refused(capsys, monkeypatch):
    status, line = said(capsys, monkeypatch, "simulate", "--sweep", "max_staleness=0,1", "--sweep", "num_workers=1,2")
    assert (status, "--sweep takes one field, got max_staleness=0,1, num_workers=1,2" in line) == (2, True)


def test_a_working_directory_that_is_gone_is_said(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    command = [sys.executable, "-P", "-c", f"import os; os.rmdir({str(gone)!r}); from asyncrl.cli import main; main()"]
    ended = subprocess.run([*command, "run", "quickstart"], cwd=gone, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (2, "asyncrl: the working directory is gone: change to another\n")


@pytest.fixture
def controller(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Have a process that looks like a controller of that folder, which does not answer yet."""
    words = ("sh", "-c", "read line", "asyncrl.pipeline", "controller", "controller", folder)
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        yield process


async def test_of_two_starts_at_once_one_goes_on(folder):
    lock = lock_folder(folder)
    with pytest.raises(LaunchError, match="is being started by another process; `asyncrl attach"):
        await Run({"folder": str(folder.parent), "name": "r"}).__aenter__()
    os.close(lock)


@pytest.mark.usefixtures("controller")
async def test_the_ledger_of_a_run_that_is_starting_is_left_alone(folder):
    (folder / "ledger.sqlite").write_bytes(b"")
    with pytest.raises(LaunchError, match="already runs"):
        await Run({"folder": str(folder.parent), "name": "r"}).__aenter__()
    assert (folder / "ledger.sqlite").exists()


async def test_a_resume_waits_for_a_controller_that_no_longer_answers(folder, controller):
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(until_gone(folder, 60))
        assert not (await asyncio.wait([waiting], timeout=0.3))[0]
        controller.stdin.close()


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path):
    file = tmp_path / "config.toml"
    write_whole(file, "first")
    (tmp_path / "config.toml.partial").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        write_whole(file, "second")
    assert file.read_text() == "first"
    shutil.rmtree(tmp_path / "config.toml.partial")
    write_whole(file, "third")
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]
    assert file.read_text() == "third"


@pytest.mark.parametrize("output", ["full", "closed pipe"])
def test_an_output_that_takes_no_more_is_said_and_the_run_is_left(tmp_path, output):
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full", "wb") if output == "full" else os.fdopen(writing, "wb") as out:
        ended = subprocess.run(
            [sys.executable, "-P", "-c", FOLLOWER], cwd=tmp_path, stdout=out, stderr=subprocess.PIPE, text=True, check=False
        )
    why = {"full": "No space left on device", "closed pipe": "Broken pipe"}[output]
    line = f"asyncrl: the run's output cannot be written ({why}), so it was stopped; `asyncrl resume runs/r` continues\n"
    assert (ended.returncode, ended.stderr) == (1, line)
    assert (tmp_path / "left").read_text() == "drained False"


@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_is_closed_drains_the_run_unless_that_is_to_be_ignored(tmp_path, ignored):
    ended = subprocess.run(
        [sys.executable, "-P", "-c", FOLLOWER, "hangup"], cwd=tmp_path, capture_output=True, text=True, check=False,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL),
    )  # fmt: skip
    assert ended.returncode == 3
    assert (tmp_path / "left").read_text() == f"drained {not ignored}"
    assert ("ended before its last step" in ended.stderr) == ignored
