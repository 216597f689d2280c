"""The keeper beside a controller that stands still, or is slow to go: a process that does nothing, and an API of this test.

And who starts: all or nothing, by priority, then first come, and nobody overtakes.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.load import dump_config, load_config, resolve_config
from asyncrl.control.launch.process_main import BY_SIGTERM
from asyncrl.control.lifecycle.state import DRAIN_TIMED_OUT, GOAL_REACHED
from asyncrl.errors import RunError
from asyncrl.folders import lock_folder
from asyncrl.observe.steps import EVENTS_FILE, RunEvent
from asyncrl.schema.status import ApiEndpoint, RunStatus
from asyncrl.serve.keeper import AGAIN_S, Keeper
from asyncrl.serve.machine import Machine, admit, demand_of, in_order, machine, waits
from asyncrl.serve.records import SUBMITTED_FILE, Demand, Records, RunRecord
from asyncrl.serve.submit import Submission
from tests.builders import until, write_rows
from tests.virtual_clock import VirtualClock


class StandIn:
    """A controller's API; its process ends with its standard input."""

    def __init__(self, folder):
        self.folder, self.url = folder, ""
        self.answers, self.version, self.num_refused = True, 1, 0
        self.end, self.phase, self.reason = ("stopped", "drain requested", 4), "running", ""
        self.process = None

    def begin(self):
        words = ("sh", "-c", "read line", "asyncrl.pipeline", "controller", "controller", str(self.folder.resolve()))
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE)
        endpoint = ApiEndpoint(url=self.url, token="t", pid=self.process.pid)
        (self.folder / "api.json").write_bytes(msgspec.json.encode(endpoint))

    async def status(self, _request):
        if not self.answers:
            self.num_refused += 1
            return web.Response(status=500)
        about = {"phase": self.phase, "reason": self.reason, "version": self.version, "num_steps": 9}
        return web.Response(body=msgspec.msgpack.encode(RunStatus(name="r", run_folder=str(self.folder), **about)))

    async def drain(self, request):
        self.phase, self.reason, self.version = self.end
        self.process.stdin.close()
        return await self.status(request)


@pytest.fixture
def records(tmp_path):
    with contextlib.closing(Records(tmp_path)) as records:
        yield records


@pytest.fixture
async def stand_in(records):
    """One that has not begun, of a run which is live."""
    records.put_run(RunRecord(id="r", number=1, state="live", num_steps=9))
    one, app = StandIn(records.run_folder("r")), web.Application()
    app.router.add_get("/status", one.status)
    app.router.add_post("/drain", one.drain)
    async with TestServer(app) as server:
        one.url = str(server.make_url("/"))
        yield one
        if one.process is not None:
            with one.process:
                one.process.stdin.close()


@pytest.fixture
def controller(stand_in):
    """That of a run which is live."""
    stand_in.begin()
    return stand_in


@contextlib.asynccontextmanager
async def kept(records, clock, **there):
    keeper = Keeper(records, Machine(cores=2, memory_bytes=1 << 40, **there), clock)
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


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_run_that_is_resumed_waits_for_its_controller_to_go_and_goes_on_where_its_daemon_is_killed_meanwhile(
    records, controller, is_killed
):
    (controller.folder / "config.toml").write_text("num_stepz = 9")
    write_rows(controller.folder / EVENTS_FILE, RunEvent(seq=1, time_s=0.0, kind="phase", subject="stopped"))
    records.put_run(RunRecord(id="r", number=1, state="queued", num_steps=9, events_told=1))
    async with contextlib.AsyncExitStack() as daemons:
        await daemons.enter_async_context(kept(records, VirtualClock()))
        await until(lambda: records.runs["r"].state != "queued")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await until(lambda: records.runs["r"].state != "starting" or records.runs["r"].attempts)
        if is_killed:
            await daemons.aclose()
        controller.process.stdin.close()
        if is_killed:
            controller.process.wait()
            await daemons.enter_async_context(kept(records, VirtualClock()))
        await until(lambda: records.runs["r"].state == "ended")
    assert "num_stepz" in records.runs["r"].reason


@pytest.mark.parametrize(("end", "becomes"), [
    (("stopped", "drain requested", 4), ""), (("failed", f"draining took 121 s, {DRAIN_TIMED_OUT}", 4), ""),
    (("stopped", "drain requested", 9), ""),  # in its last evaluation
    (("stopped", GOAL_REACHED, 9), "done"), (("failed", "the disk is full", 4), "failed"),
])  # fmt: skip
async def test_a_daemon_that_drains_leaves_a_run_to_the_next_unless_that_has_done_all_or_has_failed(
    records, controller, end, becomes
):
    (controller.folder / "config.toml").write_text("num_steps = 9")
    (controller.folder / "checkpoints" / "step-000009").mkdir(parents=True)
    controller.end, clock = end, VirtualClock()
    async with kept(records, clock) as keeper, asyncio.TaskGroup() as group:
        await until(lambda: keeper.statuses)
        draining = group.create_task(keeper.drain_all())
        await until(lambda: clock.advance(0.5) or draining.done())
    assert (records.runs["r"].state, records.runs["r"].outcome) == ("ended" if becomes else "queued", becomes)


@pytest.mark.parametrize(("reason", "drains", "version", "outcome"), [
    (BY_SIGTERM, False, 4, "resumed"), (BY_SIGTERM, True, 4, "stopped"), ("stop requested", False, 4, "stopped"),
    ("drain requested", False, 9, "stopped"), (GOAL_REACHED, False, 9, "done"),
])  # fmt: skip
async def test_a_run_that_ended_without_a_daemon_is_resumed_if_its_machine_went_down(records, reason, drains, version, outcome):
    folder = records.run_folder("r")
    (folder / "checkpoints" / f"step-{version:06}").mkdir(parents=True)
    (folder / "config.toml").write_text("num_stepz = 9")
    write_rows(folder / EVENTS_FILE, RunEvent(seq=1, time_s=0.0, kind="phase", subject="stopped", text=reason))
    records.put_run(RunRecord(id="r", number=1, state="live", num_steps=9, version=version, drains=drains))
    async with kept(records, VirtualClock()) as keeper:
        await until(lambda: records.runs["r"].state == "ended")
    assert ("resumed" if "num_stepz" in records.runs["r"].reason else records.runs["r"].outcome) == outcome
    if outcome == "done":
        with pytest.raises(RunError, match="has done its 9 steps"):
            keeper.resume_ended("r", "me")
    else:
        assert keeper.resume_ended("r", "me").state == "queued"


async def test_a_run_waits_while_nvidia_smi_gives_no_answer(records, tmp_path, monkeypatch):
    tool, clock = tmp_path / "bin" / "nvidia-smi", VirtualClock()
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nexit 9")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine().is_asked_again
    records.put_run(run(1, gpus=1, state="queued"))
    records.put_run(run(0, state="queued"))
    async with kept(records, clock, is_asked_again=True) as keeper:
        await until(lambda: records.runs["r0"].state == "ended")  # it was started, and has no config
        assert (records.runs["r1"].state, keeper.machine.gpus) == ("queued", ())
        tool.write_text("#!/bin/sh\necho GPU-a")
        await until(lambda: clock.advance(AGAIN_S) or records.runs["r1"].state == "ended")
        assert keeper.machine == Machine(("GPU-a",), cores=2, memory_bytes=1 << 40)
    assert "No such file" in records.runs["r1"].reason


@pytest.mark.parametrize(("visible", "gpus"), [
    (None, ("GPU-a", "GPU-b", "GPU-c")), ("2,0", ("GPU-c", "GPU-a")), ("GPU-b", ("GPU-b",)), ("1,9,0", ("GPU-b",)), ("", ()),
    ("0, 1,0", ("GPU-a", "GPU-b")), ("MIG-1", ("MIG-1",)),
])  # fmt: skip
def test_of_the_machine_s_gpus_a_daemon_has_those_that_it_sees(tmp_path, monkeypatch, visible, gpus):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'GPU-a, 0\\nGPU-b, 1\\nGPU-c, 2\\n'")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine().gpus == gpus


async def test_queued_runs_wait_while_the_disk_is_full(records, monkeypatch, caplog):
    clock, there = VirtualClock(), shutil.disk_usage(records.run_folder(""))
    records.put_run(run(1, state="queued"))
    async with kept(records, clock):
        with monkeypatch.context() as full:
            full.setattr(shutil, "disk_usage", lambda _: there._replace(free=9 << 20))
            await until(lambda: clock.advance(AGAIN_S) or "has 9 MiB free: make room; tried again" in caplog.text)
            assert records.runs["r1"].state == "queued"
        await until(lambda: clock.advance(AGAIN_S) or records.runs["r1"].state == "ended")


@pytest.mark.parametrize("is_locked", [False, True])
async def test_a_controller_that_comes_into_sight_as_the_next_is_started_is_adopted_in_its_attempt(records, stand_in, is_locked):
    """The daemon that began it was killed: the folder is locked until that process runs what it is to run."""
    config, clock = stand_in.folder / "config.toml", VirtualClock()
    os.mkfifo(config)  # who starts the next reads it in between
    records.put_run(RunRecord(id="r", number=1, state="starting", num_steps=9, attempts=1))
    async with kept(records, clock) as keeper:
        await until(lambda: records.runs["r"].attempts == 2)
        lock = lock_folder(stand_in.folder)
        if not is_locked:
            os.close(lock)
            stand_in.begin()
        with await asyncio.to_thread(config.open, "w") as reader:
            config.unlink()
            config.write_text("num_steps = 9")
            reader.write("num_steps = 9")
        await until(lambda: records.runs["r"].attempts == 1)
        if is_locked:
            os.close(lock)
            stand_in.begin()
        await until(lambda: clock.advance(0.5) or keeper.statuses)
        assert (records.runs["r"].state, records.runs["r"].attempts) == ("live", 1)


async def test_a_run_whose_generators_are_changed_while_it_is_live_takes_what_it_then_has(records, controller):
    config = resolve_config("quickstart", {"generate.num_workers": 7})
    (controller.folder / "config.toml").write_text(dump_config(config))
    write_rows(
        controller.folder / EVENTS_FILE,
        RunEvent(seq=1, time_s=0.0, kind="change", text="from step 1 on: generate.num_workers from 1 to 7"),
    )
    async with kept(records, VirtualClock()) as keeper:
        await until(lambda: records.runs["r"].demand == demand_of(config, keeper.machine))
    assert records.runs["r"].demand.memory_bytes > demand_of(resolve_config("quickstart"), keeper.machine).memory_bytes


async def test_a_run_that_somebody_else_starts_is_refused_to_a_user_who_resumes_it(records, stand_in):
    (stand_in.folder / "config.toml").write_text("num_steps = 9")
    records.put_run(RunRecord(id="r", number=1, state="queued", num_steps=9))
    lock = lock_folder(stand_in.folder)
    async with kept(records, VirtualClock()):
        await until(lambda: records.runs["r"].state == "ended")
    os.close(lock)
    assert "is being started by another process" in records.runs["r"].reason


async def test_a_run_that_somebody_else_has_resumed_is_adopted_and_keeps_its_version_until_its_learner_is_ready(
    records, controller, monkeypatch
):
    monkeypatch.setattr("asyncrl.serve.keeper.CONTROLLER_END_S", 0.1)
    (controller.folder / "config.toml").write_text("num_steps = 9")
    records.put_run(RunRecord(id="r", number=1, state="ended", outcome="stopped", num_steps=9, version=4, attempts=1))
    controller.version, clock = -1, VirtualClock()
    async with kept(records, clock) as keeper:
        keeper.resume_ended("r", "me")
        await until(lambda: clock.advance(0.5) or keeper.statuses)
        told = records.runs["r"]
        assert (told.state, told.outcome, told.attempts, told.version) == ("live", "", 1, 4)
        controller.version = 3
        await until(lambda: clock.advance(0.5) or records.runs["r"].version == 3)
    assert controller.process.poll() is None


async def test_a_run_whose_folder_is_gone_says_so_and_has_no_new_one(records, stand_in):
    records.put_run(RunRecord(id="r", number=1, state="queued", num_steps=9))
    shutil.rmtree(stand_in.folder)
    async with kept(records, VirtualClock()) as keeper:
        await until(lambda: records.runs["r"].state == "ended")
        assert records.runs["r"].reason.startswith("the folder of r is gone (moved or deleted)")
        with pytest.raises(RunError, match="the folder of r is gone"):
            keeper.resume_ended("r", "me")
    assert not stand_in.folder.exists()


def test_a_fork_has_the_files_that_links_in_its_start_lead_to_and_none_begins_with_adapters(records, tmp_path):
    start, weights = tmp_path / "snapshot", tmp_path / "weights"
    start.mkdir()
    weights.write_bytes(b"x")
    (start / "model.safetensors").symlink_to("../weights")
    keeper = Keeper(records, Machine(cores=2, memory_bytes=1 << 40), VirtualClock())
    config = resolve_config({"name": "fork", "model": {"kind": "pretrained", "path": str(start)}})
    fork = {"asked": Submission(), "demand": Demand(), "who": "me", "parent": "r/checkpoints/step-000001", "answers": None}
    keeper.submit(config=config, **fork)
    linked = Path(load_config(records.run_folder("fork") / SUBMITTED_FILE).model.path) / "model.safetensors"
    assert linked.samefile(weights)
    assert not linked.is_symlink()
    (start / "adapter_config.json").write_text("{}")
    with pytest.raises(RunError, match="has LoRA adapters beside its base: merge them"):
        keeper.submit(config=msgspec.structs.replace(config, name="second"), **fork)
    assert not records.run_folder("second").exists()


def run(number, gpus=0, cores=1, memory=0, priority=0, **more):
    return RunRecord(id=f"r{number}", number=number, priority=priority, demand=Demand(gpus, cores, memory), **more)


def test_what_a_run_waits_for_is_said():
    machine = Machine(("a", "b"), cores=4, memory_bytes=8 << 30)
    live = RunRecord(id="r0", number=0, state="live", gpus=("a",), demand=Demand(1, 3, 6 << 30))
    assert waits(machine, [live, run(2), run(1, gpus=2, memory=3 << 30)]) == ["2 GPUs (1 free), 3 GiB (2 free)", "1 before it"]
    assert waits(machine, [live, run(1)]) == ["its start"]


def test_the_most_generators_that_a_run_may_grow_to_are_counted():
    machine, elastic = Machine(cores=1000), {"launch": {"kind": "local", "elastic": {"max_generators": 64}}}
    grown = demand_of(resolve_config("quickstart", {"generate.num_workers": 64}), machine)
    assert demand_of(resolve_config("quickstart", {"generate.num_workers": 2, **elastic}), machine) == grown
    assert grown.cores >= 64


demands = st.integers(0, 3), st.integers(1, 4), st.integers(0, 4)
listed = st.builds(run, st.integers(0, 1000), *demands, st.integers(-1, 1), state=st.sampled_from(["queued", "ended"]))


def test_a_run_that_a_larger_machine_took_does_not_hold_the_queue_up():
    assert list(admit(Machine(cores=2), [run(1, cores=16), run(2)])) == ["r1"]


@given(st.lists(listed, max_size=12, unique_by=lambda one: one.number), st.integers(0, 4), st.integers(1, 8), st.integers(0, 8))
def test_what_is_given_is_there_and_is_the_head_of_the_queue(runs, gpus, cores, memory):
    machine = Machine(tuple(map(str, range(gpus))), cores, memory)
    granted = admit(machine, runs)
    by_id = {one.id: one for one in runs}
    assert list(granted) == [one.id for one in in_order(runs)][: len(granted)]
    given_out = [gpu for gpus in granted.values() for gpu in gpus]
    assert len(given_out) == len(set(given_out))
    assert all(len(gpus) == by_id[run].demand.gpus for run, gpus in granted.items())
    assert sum(min(by_id[run].demand.cores, cores) for run in granted) <= cores
    assert sum(by_id[run].demand.memory_bytes for run in granted) <= memory
