"""The keeper beside a controller that stands still, or is slow to go: a process that does nothing, and an API of this test."""

import asyncio
import contextlib
import signal
import subprocess

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from asyncrl.schema.status import ApiEndpoint, RunStatus
from asyncrl.serve.keeper import Keeper
from asyncrl.serve.machine import Machine
from asyncrl.serve.records import Records, RunRecord
from tests.builders import until
from tests.virtual_clock import VirtualClock


class StandIn:
    """A controller's API; its process ends with its standard input."""

    def __init__(self, folder):
        self.folder = folder
        self.answers, self.version, self.num_refused = True, 1, 0
        words = ("sh", "-c", "read line", "asyncrl.pipeline", "controller", "controller", str(folder.resolve()))
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE)

    async def status(self, _request):
        if not self.answers:
            self.num_refused += 1
            return web.Response(status=500)
        status = RunStatus(name="r", run_folder=str(self.folder), phase="running", version=self.version, num_steps=9)
        return web.Response(body=msgspec.msgpack.encode(status))


@pytest.fixture
def records(tmp_path):
    with contextlib.closing(Records(tmp_path)) as records:
        yield records


@pytest.fixture
async def controller(records):
    """That of a run which is live."""
    records.put_run(RunRecord(id="r", number=1, state="live", num_steps=9))
    stand_in, app = StandIn(records.run_folder("r")), web.Application()
    app.router.add_get("/status", stand_in.status)
    async with TestServer(app) as server:
        endpoint = ApiEndpoint(url=str(server.make_url("/")), token="t", pid=stand_in.process.pid)
        (stand_in.folder / "api.json").write_bytes(msgspec.json.encode(endpoint))
        with stand_in.process:
            yield stand_in


@contextlib.asynccontextmanager
async def kept(records, clock):
    keeper = Keeper(records, Machine(cores=2, memory_bytes=1 << 40), clock)
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(keeper.run())
        yield keeper
        keeping.cancel()


async def test_a_controller_that_answers_again_is_followed_at_once_and_one_that_does_not_is_killed_after_a_minute(
    records, controller
):
    clock = VirtualClock()
    async with kept(records, clock) as keeper:
        await until(lambda: keeper.statuses)
        for version in (2, 3):
            controller.answers, refused_before = False, controller.num_refused
            await until(lambda: clock.advance(0.5) or controller.num_refused > refused_before)  # noqa: B023 - awaited at once
            controller.answers, controller.version = True, version
            async with asyncio.timeout(20):
                await until(lambda: clock.advance(0.1) or records.runs["r"].version == version)  # noqa: B023 - as above
        assert controller.process.poll() is None
        controller.answers, since_s = False, clock.now()
        await until(lambda: clock.advance(0.5) or controller.process.poll() is not None)
        assert controller.process.returncode == -signal.SIGKILL
        assert clock.now() - since_s >= 60.0
        await until(lambda: clock.advance(0.5) or records.runs["r"].state == "ended")
    told = [event.kind for event in records.events(0)]
    assert told == ["adopted", "lost", "ended"]  # the next controller has no config


async def test_a_run_that_is_resumed_waits_for_its_controller_to_go(records, controller):
    (controller.folder / "config.toml").write_text("num_stepz = 9")
    records.put_run(RunRecord(id="r", number=1, state="queued", num_steps=9))
    async with kept(records, VirtualClock()):
        await until(lambda: records.runs["r"].state != "queued")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await until(lambda: records.runs["r"].state != "starting" or records.runs["r"].attempts)
        controller.process.stdin.close()
        await until(lambda: records.runs["r"].state == "ended")
    assert "num_stepz" in records.runs["r"].reason
