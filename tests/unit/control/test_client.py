"""The client against a served API whose run never ends by itself: hanging up and being cancelled."""

import asyncio
import math
import os
import shutil
from pathlib import Path

import pytest

from asyncrl.client import Run, connect
from asyncrl.config.load import load_config, parse_config
from asyncrl.control.api import serve_api
from asyncrl.errors import ConfigError
from asyncrl.schema.status import RunStatus


class Endless:
    """A run that drains for ever and ends when it is stopped; only what these tests ask is here."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.changed = asyncio.Event()
        self.over = asyncio.Event()

    def __getattr__(self, name):
        return lambda *_: None

    def status(self) -> RunStatus:
        return RunStatus(name="r", run_folder="r", phase="running")

    async def drain(self) -> RunStatus:
        self._note("drain")
        await self.over.wait()
        return self.status()

    async def stop(self) -> RunStatus:
        self._note("stop")
        self.over.set()
        return self.status()

    async def take(self) -> None:
        self._note("take")
        try:
            await self.over.wait()
        except asyncio.CancelledError:
            self._note("take hung up")
            raise

    def _note(self, what: str) -> None:
        self.asked.append(what)
        self.changed.set()

    async def until(self, what: str) -> None:
        async with asyncio.timeout(30):
            while what not in self.asked:
                self.changed.clear()
                await self.changed.wait()


async def test_cancelling_while_a_run_drains_stops_it_and_the_cancellation_goes_on(tmp_path):
    control = Endless()
    run = Run(parse_config({"folder": str(tmp_path), "name": "r"}))

    async def leave() -> None:
        await run.__aexit__(None, None, None)

    async with serve_api(control, tmp_path) as endpoint, asyncio.TaskGroup() as group:
        await run._open(endpoint)
        leaving = group.create_task(leave())
        await control.until("drain")
        leaving.cancel()
        await asyncio.wait({leaving}, timeout=30)
    assert leaving.cancelled()
    assert control.asked == ["drain", "stop"]


async def test_a_take_whose_caller_hangs_up_is_not_carried_out_for_nobody(tmp_path):
    control = Endless()
    async with serve_api(control, tmp_path), connect(tmp_path) as guest, asyncio.TaskGroup() as group:
        taking = group.create_task(guest.take())
        await control.until("take")
        taking.cancel()
        await control.until("take hung up")


@pytest.mark.parametrize(("call", "given", "message"), [
    ("trained", (2**70,), "trained: what was given cannot be sent"),
    ("trained", (0, {"loss": "\udcff"}), "trained: what was given cannot be sent"),
    ("submit", (None,), "submit takes an ExternalGroup, got NoneType"),
    ("announce_weights", (math.nan,), "announce_weights takes a WeightsAvailable, got float"),
])  # fmt: skip
async def test_what_cannot_be_sent_is_refused_with_its_reason(tmp_path, call, given, message):
    async with serve_api(Endless(), tmp_path), connect(tmp_path) as run:
        with pytest.raises(ConfigError, match=message):
            await getattr(run, call)(*given)


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


def test_the_model_of_a_run_cannot_change_as_it_is_resumed(tmp_path, config):
    folder = tmp_path / "r"
    other = {"model.hidden_size": 64}
    with Run(resume=folder, overrides=other)._prepared_folder():
        pass  # nothing was made yet
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="a run keeps its model"):
        Run(config, resume=folder)._prepared_folder().__enter__()
    with Run(resume=folder, overrides={"num_steps": 7})._prepared_folder():
        assert load_config(folder / "config.toml").model.hidden_size == 64
