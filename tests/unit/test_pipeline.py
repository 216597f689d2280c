"""What a controller that cannot begin leaves behind; that it works is seen in whole runs (tests/integration)."""

import asyncio
import sys
import threading

import pytest

from asyncrl.clock import SystemClock
from asyncrl.config.load import parse_config
from asyncrl.errors import ConfigError, TransportError
from asyncrl.pipeline import CLOCK_ANCHOR, ENDPOINT_FILE, clock_of, run_controller
from tests.fake_launcher import FakeLauncher


def test_a_process_has_the_clock_of_its_controller_and_a_controller_one_of_its_own(monkeypatch):
    monkeypatch.setenv(CLOCK_ANCHOR, "-3600.0")  # of a controller whose program starts another run
    controllers = clock_of("controller")
    assert abs(controllers.now() - SystemClock().now()) < 60.0
    assert clock_of("generator").anchor_s == controllers.anchor_s


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
