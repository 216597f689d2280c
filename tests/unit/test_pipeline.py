"""What a controller that cannot begin leaves behind; that it works is seen in whole runs (tests/integration)."""

import asyncio
import logging
import os
import platform
import sys
import threading

import pytest

from asyncrl.clock import SystemClock
from asyncrl.config.load import dump_config, parse_config
from asyncrl.control.join import JoinRequest
from asyncrl.control.launch.process_main import EXIT_FAILED, EXIT_OK
from asyncrl.errors import ConfigError, TransportError
from asyncrl.pipeline import CLOCK_ANCHOR, ENDPOINT_FILE, clock_of, join_run, run_controller
from asyncrl.schema.control import Heartbeat, JoinTerms, Shutdown
from asyncrl.transport.protocol import Lane
from asyncrl.transport.zmq_server import open_listener
from tests.builders import receive
from tests.fake_launcher import FakeLauncher


def test_a_process_has_the_clock_of_its_controller_and_a_controller_one_of_its_own(monkeypatch):
    monkeypatch.setenv(CLOCK_ANCHOR, "-3600.0")  # of a controller whose program starts another run
    controllers = clock_of("controller")
    assert abs(controllers.now() - SystemClock().now()) < 60.0
    assert clock_of("generator").anchor_s == controllers.anchor_s


@pytest.mark.parametrize("module", ["asyncrl.generate.worker", "asyncrl.weights.subscriber", "asyncrl.residency.device"])
async def test_a_generator_that_joins_imports_before_it_connects(tmp_path, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=module):  # it does not even look for the run
        await join_run(JoinRequest(run_folder=str(tmp_path)), SystemClock())


async def test_a_joined_generator_that_is_dismissed_ends_with_one_and_one_that_is_told_to_end_with_zero(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # a process sets up its own
    monkeypatch.setattr(logging.getLogger("asyncrl"), "level", logging.INFO)
    config = parse_config({
        "generate": {"engine": {"kind": "fake"}}, "learner": {"fake_step_s": 0.0}, "broadcast": {"medium": {"kind": "files"}},
    })  # fmt: skip
    listener = await open_listener(config.transport, tmp_path)
    (tmp_path / ENDPOINT_FILE).write_text(listener.address)
    (tmp_path / "api.json").write_text("{}")
    (tmp_path / "config.toml").write_text(dump_config(config))
    codes = []
    for is_told in (False, True):
        async with asyncio.TaskGroup() as group, asyncio.timeout(30):
            running = group.create_task(join_run(JoinRequest(run_folder=str(tmp_path)), SystemClock()))
            near = await listener.accept()
            await near.send(JoinTerms(dump_config(config), str(tmp_path), platform.node()), Lane.CONTROL)
            if is_told:
                await near.send(Shutdown(), Lane.CONTROL)
            else:
                await receive(near, Heartbeat)
                await near.close("its samples failed")
        codes.append(running.result())
    await listener.close()
    assert codes == [EXIT_FAILED, EXIT_OK]


@pytest.mark.parametrize(("settings", "error"), [
    ({}, IsADirectoryError), ({"transport": {"kind": "tcp", "host": "192.0.2.1"}}, TransportError),
    ({"observe": {"wandb": "offline"}}, ConfigError),
])  # fmt: skip
async def test_a_controller_that_cannot_begin_leaves_no_socket_thread_or_folder(tmp_path, monkeypatch, folders, settings, error):
    config = parse_config({"generate": {"engine": {"kind": "fake"}}, **settings})
    if error is IsADirectoryError:
        (tmp_path / ENDPOINT_FILE).mkdir()
    monkeypatch.setitem(sys.modules, "wandb", None)
    threads = set(threading.enumerate())
    with pytest.raises(error):
        await run_controller(config, tmp_path, SystemClock(), asyncio.Event(), FakeLauncher())
    assert folders() == []
    assert "ledger" not in {thread.name for thread in set(threading.enumerate()) - threads}
