"""The client against a served API whose run never ends by itself: hanging up and being cancelled."""

import asyncio
import os
import platform
import shutil
import sys
from pathlib import Path

import msgspec
import pytest

from asyncrl.buffer.ledger.store import SqliteLedger
from asyncrl.client import Run, connect
from asyncrl.config.algorithm import KLConfig
from asyncrl.config.live import undo_resume
from asyncrl.config.load import load_config, parse_config
from asyncrl.control.api import serve_api
from asyncrl.control.lifecycle.events import DrainRequested, StopRequested
from asyncrl.errors import AlreadyRunsError, ConfigError, LaunchError, RunLostError
from asyncrl.observe.steps import EVAL_FILE, EVENTS_FILE, STEPS_FILE, EvalReport, RunEvent, StepReport
from asyncrl.schema.status import ApiEndpoint, RunStatus
from tests.builders import until, write_rows


class Endless:
    """A run that drains for ever and ends when it is stopped; only what these tests ask is here."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.over = asyncio.Event()

    def __getattr__(self, name):
        return lambda *_: None

    def status(self) -> RunStatus:
        return RunStatus(name="r", run_folder="r", phase="running")

    async def end(self, event: DrainRequested | StopRequested) -> RunStatus:
        self.asked.append(event.reason)
        if isinstance(event, StopRequested):
            self.over.set()
        await self.over.wait()
        return self.status()

    async def take(self) -> None:
        self.asked.append("take")
        try:
            await self.over.wait()
        except asyncio.CancelledError:
            self.asked.append("take hung up")
            raise


async def test_cancelling_while_a_run_drains_stops_it_and_the_cancellation_goes_on(tmp_path):
    control = Endless()
    run = Run(parse_config({"folder": str(tmp_path), "name": "r"}))

    async def leave() -> None:
        await run.__aexit__(None, None, None)

    async with serve_api(control, tmp_path) as endpoint, asyncio.TaskGroup() as group:
        await run._open(endpoint.url, endpoint.token)
        leaving = group.create_task(leave())
        await until(lambda: control.asked)
        leaving.cancel()
        await asyncio.wait({leaving}, timeout=30)
    assert leaving.cancelled()
    assert control.asked == ["drain requested", "stop requested"]


async def test_a_take_whose_caller_hangs_up_is_not_carried_out_for_nobody(tmp_path):
    control = Endless()
    async with serve_api(control, tmp_path), connect(tmp_path) as guest, asyncio.TaskGroup() as group:
        taking = group.create_task(guest.take())
        await until(lambda: control.asked)
        taking.cancel()
        await until(lambda: "take hung up" in control.asked)


async def test_whoever_attaches_to_a_long_run_is_sent_as_many_steps_as_the_display_keeps(tmp_path):
    control = Endless()

    async def rows_of(*asked):
        control.asked.append(asked)
        return
        yield

    control.rows_of = rows_of
    (tmp_path / "config.toml").write_text("[observe]\npictures = false")
    steps = (StepReport(step=step, version=step + 1, time_s=0.0, reward_mean=0.5) for step in range(1000))
    write_rows(tmp_path / STEPS_FILE, *steps)
    async with serve_api(control, tmp_path), asyncio.timeout(60):
        attach = [sys.executable, "-m", "asyncrl", "attach", str(tmp_path), "--plain"]
        await (await asyncio.create_subprocess_exec(*attach, stdout=asyncio.subprocess.DEVNULL)).wait()
    assert control.asked == [(STEPS_FILE, "step", 599)]


@pytest.fixture
def config(tmp_path):
    """Return the config of a run whose folder was made."""
    config = parse_config({"folder": str(tmp_path), "name": "r"})
    with Run(config)._prepared_folder():
        return config


@pytest.mark.parametrize(("make", "name"), [
    *((Path.mkdir, name) for name in ("ledger.sqlite", "ledger.sqlite.payloads-000001", "api.json", "keys/client.key")),
    *((make, name) for name in ("steps.jsonl", "endpoint", "logs/learner.log") for make in (Path.mkdir, os.mkfifo)),
    *((Path.touch, name) for name in ("checkpoints", "model", "keys", "logs")),
])  # fmt: skip
async def test_a_folder_or_a_pipe_in_place_of_a_run_s_file_or_the_reverse_is_named_and_not_waited_for(
    tmp_path, config, make, name
):
    path = tmp_path / "r" / name
    path.parent.mkdir(exist_ok=True)
    shutil.rmtree(path, ignore_errors=True)
    make(path)
    with pytest.raises(ConfigError, match=rf"^{path} must be a {'folder' if make is Path.touch else 'file'}: move it away$"):
        await Run(config, resume=tmp_path / "r").__aenter__()


def test_of_a_start_that_ended_before_its_first_sample_the_next_one_keeps_its_logs_and_pids_alone(tmp_path, config):
    folder = tmp_path / "r"
    write_rows(folder / EVAL_FILE, EvalReport(version=0, num_samples=8, accuracy=0.5))
    write_rows(folder / EVENTS_FILE, RunEvent(seq=1, time_s=0.0, kind="phase"))
    others = ("record/decisions-0000.bin", "memory/learner.jsonl", "model/config.json", "revisions/0.toml", "tensorboard/events")
    for name in (*others, "seconds.jsonl", "spans.jsonl", "metrics.jsonl", "ledger.sqlite.payloads-000001", "pids.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    with Run(config)._prepared_folder():
        left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert left == {"config.toml", "logs/controller.log", "pids.jsonl"}


async def test_a_run_that_another_machine_has_open_is_neither_called_lost_nor_touched_and_that_machine_is_named(tmp_path, config):
    folder = tmp_path / "r"
    endpoint = msgspec.json.encode(ApiEndpoint("http://127.0.0.1:1", "token", 1, "there"))
    (folder / "api.json").write_bytes(endpoint)
    before = (folder / "config.toml").read_bytes()
    with pytest.raises(RunLostError, match=f"the run in {folder} is on there and answers there only; where that machine is gone"):
        await connect(folder).__aenter__()
    ledger = SqliteLedger(folder / "ledger.sqlite")
    with pytest.raises(AlreadyRunsError, match=f"already runs on there; `asyncrl stop {folder}` on there first"):
        Run(resume=folder, overrides={"num_steps": 7})._prepared_folder().__enter__()
    ledger.close()
    assert [(folder / name).read_bytes() for name in ("api.json", "config.toml")] == [endpoint, before]
    with Run(resume=folder)._prepared_folder():
        pass  # that machine is gone, and its lock with it


def test_a_run_whose_ledger_is_in_memory_is_not_resumed_from_a_checkpoint_and_says_why(tmp_path, config):
    folder, in_memory = tmp_path / "r", {"buffer.ledger": "memory"}
    (folder / "checkpoints" / "step-000000").mkdir(parents=True)
    with Run(resume=folder, overrides=in_memory)._prepared_folder():
        pass  # it begins anew
    (folder / "checkpoints" / "step-000050").mkdir()
    with pytest.raises(
        ConfigError, match=r"checkpoint of version 50, and with buffer\.ledger = 'memory'.*buffer\.ledger = \"disk\""
    ):
        Run(resume=folder, overrides=in_memory)._prepared_folder().__enter__()


def test_the_model_and_an_adapted_coefficient_cannot_change_as_a_run_is_resumed(tmp_path, config):
    folder = tmp_path / "r"
    other = {"model.hidden_size": 64, "algorithm.kl.target": 0.1}
    with Run(resume=folder, overrides=other)._prepared_folder():
        pass  # nothing was made yet
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="a run keeps its model"):
        Run(config, resume=folder)._prepared_folder().__enter__()
    with Run(resume=folder, overrides={"num_steps": 7})._prepared_folder():
        assert load_config(folder / "config.toml").model.hidden_size == 64
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.target adapts it"):
        Run(resume=folder, overrides={"algorithm.kl.coefficient": 0.5})._prepared_folder().__enter__()
    fixed = {"algorithm.kl.coefficient": 0.5, "algorithm.kl.target": None}
    with Run(resume=folder, overrides=fixed)._prepared_folder():
        assert load_config(folder / "config.toml").algorithm.kl == KLConfig(coefficient=0.5)
    assert undo_resume(folder)
    restored = load_config(folder / "config.toml")
    assert (restored.algorithm.kl, restored.num_steps) == (None, config.num_steps), "none of these resumes was ever running"


async def test_a_run_whose_controller_was_killed_is_lost_and_what_to_do_is_the_last_line(tmp_path, config):
    folder = tmp_path / "r"
    (folder / "api.json").write_bytes(msgspec.json.encode(ApiEndpoint("http://127.0.0.1:1", "token", 1, platform.node())))
    (folder / "logs" / "controller.log").write_text("12:00:00 INFO controller | step 7\n")
    with pytest.raises(RunLostError) as lost:
        await connect(folder).__aenter__()
    assert str(lost.value).splitlines() == [
        f"the end of {folder}/logs/controller.log is",
        "12:00:00 INFO controller | step 7",
        f"the run in {folder} is lost, its controller has ended: `asyncrl resume {folder}` goes on with it",
    ]


async def test_all_lines_of_the_controllers_own_error_are_said(tmp_path):
    (tmp_path / "api.json").write_bytes(msgspec.json.encode(ApiEndpoint("http://127.0.0.1:1", "token", 1, platform.node())))
    (tmp_path / "logs").mkdir()
    said = "asyncrl: placement: they do not fit:\n  training 2 GiB of 1\n  set more\n12:00:00 INFO controller | it ends\n"
    (tmp_path / "logs" / "controller.log").write_text(said)
    with pytest.raises(RunLostError, match="placement: they do not fit:\n  training 2 GiB of 1\n  set more; `asyncrl resume"):
        await connect(tmp_path).__aenter__()
    (tmp_path / "ledger.sqlite.lock").touch()  # and its ledger was removed
    with pytest.raises(RunLostError, match=r"set more$"):
        await connect(tmp_path).__aenter__()


async def test_a_command_for_a_copy_of_a_live_run_does_not_reach_the_original(tmp_path, monkeypatch):
    control, copied = Endless(), tmp_path / "copied"
    copied.mkdir()
    monkeypatch.setattr(control, "status", lambda: RunStatus(name="r", run_folder=str(tmp_path), phase="running"), raising=False)
    async with serve_api(control, tmp_path):
        shutil.copy(tmp_path / "api.json", copied)
        async with connect(tmp_path) as live:
            assert (await live.status()).run_folder == str(tmp_path)
        with pytest.raises(LaunchError, match=r"copied is a copy of .*, whose run is live: name that one"):
            await connect(copied).__aenter__()


def test_what_is_resumed_is_a_run_folder(tmp_path, config):
    for given in (None, config):
        with pytest.raises(ConfigError, match=r"typo is no run folder: it has no config\.toml"):
            Run(given, resume=tmp_path / "typo")


def test_a_folder_whose_name_is_not_utf_8_is_refused(tmp_path, monkeypatch):
    (tmp_path / "w\udcf6rk").mkdir()
    monkeypatch.chdir(tmp_path / "w\udcf6rk")
    with pytest.raises(ConfigError, match=r"folder, '.*w\\udcf6rk/runs/r', is not UTF-8 text: take another folder"):
        Run(parse_config({"name": "r"}))


def test_a_run_names_settings_that_are_probably_mistakes():
    *_, warning = Run(parse_config({"generate": {"sampling": {"top_p": 0.9}}})).choices
    assert warning.startswith("WARNING: generate.sampling.top_p = 0.9 and top_k = 0 leave tokens out")


def test_a_run_that_is_resumed_is_not_moved_by_its_name_or_folder(tmp_path, config):
    folder = tmp_path / "r"
    for overrides in ({"name": "other"}, ["folder=elsewhere"]):
        with pytest.raises(ConfigError, match=f"is resumed stays in {folder}; move or copy the folder"):
            Run(resume=folder, overrides=overrides)
    moved = folder.rename(tmp_path / "moved")
    assert Run(resume=moved, overrides={"name": "moved"}).config.name == "moved"
