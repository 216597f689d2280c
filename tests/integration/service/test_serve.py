"""The daemon as it is used: a real process, real runs, real kills."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest

import asyncrl
from asyncrl.control.launch.controller_process import find_controllers, is_live, read_endpoint
from asyncrl.observe.steps import SECONDS_FILE, SecondReport, read_lines
from tests.integration import conftest as kit

pytestmark = pytest.mark.timeout(300)
SLOW = {**kit.NO_MODEL, "token_latency_s": 0.1}


def settings(folder: Path, **more):
    config = kit.tiny_settings(folder, **kit.NO_MODELS | kit.NO_EVALUATION | more)
    return {key: value for key, value in config.items() if key not in {"folder", "name"}}


class Daemon:
    """`asyncrl serve`, and a client of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, *options: str, **environment: str) -> asyncrl.Server:
        command = [sys.executable, "-m", "asyncrl", "serve", "--folder", str(self.folder), "--port", "0", *options]
        self.process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **environment})
        async with asyncio.timeout(60):
            while not (self.folder / "server.url").exists():
                assert self.process.returncode is None
                await asyncio.sleep(0.02)
        return asyncrl.Server((self.folder / "server.url").read_text(), (self.folder / "admin.token").read_text().strip())

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()
        (self.folder / "server.url").unlink()

    async def end(self) -> int:
        self.process.terminate()
        return await self.process.wait()


@pytest.fixture
async def daemon(tmp_path):
    one = Daemon(tmp_path / "served")
    yield one
    if one.process is not None and one.process.returncode is None:
        await one.end()
    for path in tmp_path.glob("*/runs/*/api.json"):
        endpoint = read_endpoint(path.parent)
        if endpoint is not None and is_live(path.parent):
            os.kill(endpoint.pid, signal.SIGKILL)


async def until(server, run, reached, within_s=120):
    async with asyncio.timeout(within_s):
        while not reached(record := await server.show(run)):
            assert record.outcome != "failed", record.reason
            await asyncio.sleep(0.1)
    return record


async def ended_as(server, run, outcome, attempts, version=None):
    """Wait for the end of a run, and see that it is this one."""
    async for ended in server.ended([run]):
        told = (ended.outcome, ended.attempts, ended.version)
        assert told == (outcome, attempts, ended.version if version is None else version), ended.reason


def seconds_of(folder):
    return [second.time_s for second in read_lines(folder / SECONDS_FILE, SecondReport)]


async def test_runs_outlive_a_daemon_that_is_killed_are_adopted_by_the_next_and_resumed_where_they_died_too(daemon):
    async with await daemon.start() as server:
        run = await server.submit(settings(daemon.folder, num_steps=40, generate__engine=SLOW), name="one")
        await until(server, run.id, lambda record: record.version >= 1)
        await daemon.kill()
    folder = daemon.folder / "runs" / "one"
    pid = read_endpoint(folder).pid
    assert psutil.pid_exists(pid)
    async with await daemon.start() as server:
        adopted = await until(server, "one", lambda record: record.state == "live" and record.version >= 3)
        assert adopted.attempts == 1
        async with server.connect("one") as client:
            assert client.run_folder == folder
            assert (await client.status()).name == "one"
            async for event in client.events("phase", after=1):
                assert event.seq > 1
                if event.subject == "running":
                    break
        await daemon.kill()
    os.kill(pid, signal.SIGKILL)
    before = seconds_of(folder)
    with (folder / SECONDS_FILE).open("ab") as file:
        file.write(b'{"time_s":1.5,"val')  # torn, as where the disk was full
    (daemon.folder / "server.sqlite").write_bytes(b"damaged" * 1000)  # and the books with them: runs are found from their folders
    async with await daemon.start() as server:
        async with server.connect("one") as client:
            events = [event async for event in client.events()]  # until it ends
            assert [event.seq for event in events] == list(range(1, len(events) + 1))
        await ended_as(server, "one", "done", 2, version=40)
        async with server._http.get(f"{server._url}/v1/runs/one/seconds") as answer:
            told = [row["time_s"] for row in (await answer.json())["rows"]]
    kit.assert_every_step_once(folder, 40)
    after = seconds_of(folder)
    assert after[: len(before)] == before != after
    assert told == after == sorted(set(after))


async def test_a_run_whose_daemon_and_controller_are_killed_ends_with_the_weights_of_one_that_was_not_disturbed(daemon, tmp_path):
    """Twice, and at max_staleness 0, where weights depend on nothing but the seed."""
    config = settings(tmp_path, num_steps=60, buffer__max_staleness=0, checkpoint__every_steps=7, learner__fake_step_s=None)
    config["generate"]["engine"] = {"kind": "transformers", "num_slots": 8, "max_sequence_tokens": 16}
    runs = daemon.folder / "runs"
    async with await daemon.start() as server:
        await server.submit(config, name="whole")
        async for ended in server.ended(["whole"]):
            assert ended.outcome == "done", ended.reason
        await server.submit(config, name="killed")
        await until(server, "killed", lambda record: record.version >= 10)
        await kill_both(daemon, "killed")
    async with await daemon.start() as server:
        await until(server, "killed", lambda record: record.version >= 30)
        await kill_both(daemon, "killed")
    async with await daemon.start() as server:
        await ended_as(server, "killed", "done", 3, version=60)
    weights = [(runs / name / "checkpoints" / "step-000060" / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1]
    kit.assert_every_step_once(runs / "killed", 60)


async def kill_both(daemon: Daemon, run: str) -> None:
    pid = read_endpoint(daemon.folder / "runs" / run).pid
    await daemon.kill()
    os.kill(pid, signal.SIGKILL)


async def test_a_run_of_an_older_version_is_adopted_followed_and_drained_by_a_newer_daemon(daemon, tmp_path):
    older = tmp_path / "older"
    shutil.copytree(Path(asyncrl.__file__).parent, older / "asyncrl", ignore=shutil.ignore_patterns("__pycache__"))
    front = older / "asyncrl" / "__init__.py"
    front.write_text(front.read_text() + '\n__version__ = "0.0.1"\n')
    async with await daemon.start(PYTHONPATH=str(older), PYTHONSAFEPATH="1") as server:
        assert await version_of(daemon) == "0.0.1"
        await server.submit(settings(tmp_path, num_steps=1000, generate__engine=SLOW), name="one")
        await until(server, "one", lambda record: record.version >= 1)
        await daemon.kill()
    folder = daemon.folder / "runs" / "one"
    pid = read_endpoint(folder).pid
    assert psutil.Process(pid).environ()["PYTHONPATH"] == str(older)
    async with await daemon.start() as server:
        assert await version_of(daemon) == asyncrl.__version__
        adopted = await until(server, "one", lambda record: record.state == "live" and record.version >= 3)
        assert (adopted.attempts, read_endpoint(folder).pid, [run.id for run in await server.runs()]) == (1, pid, ["one"])
        async with server.connect("one") as client:
            seen = []
            async for report in client.steps():
                seen.append(report.step)
                if len(seen) == 5:
                    await client.drain()
        ended = await until(server, "one", lambda record: record.state == "ended")
    assert (seen, ended.outcome) == (list(range(ended.version)), "stopped")
    kit.assert_every_step_once(folder, ended.version)


async def version_of(daemon) -> str:
    async with aiohttp.ClientSession() as http, http.get((daemon.folder / "server.url").read_text() + "/version") as answer:
        return (await answer.json())["version"]


async def test_the_queue_keeps_its_order_and_a_run_that_ended_goes_on(daemon, tmp_path):
    everything = {"learner__num_threads": os.cpu_count() or 1, "learner__fake_step_s": None}
    async with await daemon.start() as server:
        first = await server.submit(settings(tmp_path, num_steps=500, **everything), name="first", tags=["t"])
        for name, priority in (("second", 0), ("third", 0), ("urgent", 1)):
            await server.submit(settings(tmp_path, num_steps=3, **everything), name=name, priority=priority)
        await until(server, first.id, lambda record: record.version >= 1)
        assert (await server.cancel("third")).outcome == "cancelled"
        with pytest.raises(asyncrl.RunError, match="another name"):
            await server.submit(settings(tmp_path), name="second")
        with pytest.raises(asyncrl.RunError, match="only a queued run"):
            await server.cancel("first")
        wrong = {"values": {"task.kind": "gsm8k", "buffer.max_staleness": -1, "eval.every_steps": 3}}
        async with server._http.patch(f"{server._url}/v1/runs/first/config", json=wrong) as answer:
            assert (answer.status, [fault["field"] for fault in (await answer.json())["faults"]]) == (422, [*wrong["values"]][:2])
        async with server.connect("first") as client:
            assert (await client.change({"learner.learning_rate": 1e-4}, who="somebody else")).revision == 1
            status = await client.drain()
        assert "revision 1 by " in (daemon.folder / "runs" / "first" / "config.toml").read_text()
        order = [record.id async for record in server.ended(["first", "second", "urgent"])]
        assert order.index("urgent") < order.index("second")
        assert (await server.show("first")).outcome == "stopped"
        goal = {"num_steps": status.version + 2}
        async with server._http.post(f"{server._url}/v1/runs/first/resume", json=goal) as answer:
            assert answer.status == 200
        await ended_as(server, "first", "done", 2)
        kit.assert_every_step_once(daemon.folder / "runs" / "first", goal["num_steps"])
        forked = await server.fork("first", "child", set={"num_steps": 2})
        shutil.rmtree(daemon.folder / "runs" / "first" / "checkpoints")  # as a run does that goes on while its fork waits
        assert forked.parent.startswith("first/checkpoints/step-")
        async for ended in server.ended([forked]):
            assert ended.outcome == "done", ended.reason
        assert [record.id for record in await server.runs(tag="t")] == ["first"]
    assert status.phase == "stopped"
    assert await daemon.end() == 0


async def test_a_program_elsewhere_judges_a_run_while_it_is_queued_lost_and_resumed(daemon, tmp_path):
    judged = []

    async def reward(prompt: asyncrl.Prompt, text: str) -> float:
        judged.append(text)
        return float(len(judged) % 3)

    async with await daemon.start() as server:
        caller = {"reward": {"functions": [{"kind": "caller"}]}, "num_steps": 20, "generate__engine": SLOW}
        await server.submit(settings(tmp_path, **caller), name="one")
        folder = daemon.folder / "runs" / "one"
        async with server.connect("one") as client, asyncio.TaskGroup() as group:
            group.create_task(client.score(reward))
            await until(server, "one", lambda record: record.version >= 2)
            os.kill(read_endpoint(folder).pid, signal.SIGKILL)
            await ended_as(server, "one", "done", 2)
        await server.submit(settings(tmp_path, num_steps=1000), name="own")
        await until(server, "own", lambda record: record.version >= 1)
        async with server.connect("own") as client:
            with pytest.raises(asyncrl.RunError, match="reward functions of its own"):
                await client.score(reward)
            await client.stop()
    kit.assert_every_step_once(folder, 20)
    assert len(judged) >= 20 * 16


async def test_events_are_streamed_and_a_run_that_cannot_start_has_failed_with_its_reason(daemon, tmp_path):
    async with await daemon.start() as server:
        await server.submit({**settings(tmp_path), "transport": {"kind": "tcp", "host": "203.0.113.1"}}, name="one")
        async for ended in server.ended(["one"]):
            assert ended.outcome == "failed"
            assert "203.0.113.1" in ended.reason
        seen, last = [], "0"
        while "ended" not in [kind for _, kind in seen]:
            headers = {"Accept": "text/event-stream", "Last-Event-ID": last}
            async with server._http.get(f"{server._url}/v1/events", headers=headers) as answer:
                lines = [(await answer.content.readline()).decode().split(": ", 1)[1].strip() for _ in range(2)]
            seen.append(tuple(lines))
            last = lines[0]
    assert [int(number) for number, _ in seen] == list(range(1, len(seen) + 1))
    kinds = [kind for _, kind in seen]
    assert kinds == ["submitted", "ended"]


async def test_systemd_is_told_and_a_container_drains(daemon, tmp_path):
    loop, told = asyncio.get_running_loop(), []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        loop.add_reader(systemd, lambda: told.append(systemd.recv(100)))
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "300000"}
        async with await daemon.start("--drain", **environment) as server:
            await server.submit(settings(tmp_path, num_steps=5000), name="one")
            await until(server, "one", lambda record: record.version >= 1)
            assert await daemon.end() == 0
        loop.remove_reader(systemd)
    assert told[0] == b"READY=1"
    assert {b"WATCHDOG=1", b"STOPPING=1"} <= set(told)
    folder = daemon.folder / "runs" / "one"
    assert not is_live(folder)
    assert list((folder / "checkpoints").glob("step-*"))
    daemon.folder = daemon.folder.rename(tmp_path / "moved")  # as a volume that is mounted elsewhere
    async with await daemon.start() as server:
        before = (await server.show("one")).version
        went_on = await until(server, "one", lambda record: record.version > before)
        assert (went_on.state, went_on.attempts) == ("live", 2)


async def controllers_of(folder: Path) -> list[int]:
    """The controller of a run, as soon as there is one."""
    async with asyncio.timeout(60):
        while not (pids := find_controllers(folder)):
            await asyncio.sleep(0)
    return pids


async def test_killed_controllers_are_started_again_and_no_more_often_than_allowed(daemon, tmp_path):
    """One before it answers; one whose learner stands still, and is ended; one again and again."""
    async with await daemon.start() as server:
        await server.submit(settings(tmp_path, num_steps=3), name="one")
        folder, killed = daemon.folder / "runs" / "one", 0
        for pid in await controllers_of(folder):
            os.kill(pid, signal.SIGKILL)
        await ended_as(server, "one", "done", 2)
        kit.assert_every_step_once(folder, 3)
        await server.submit(settings(tmp_path, num_steps=20, generate__engine=SLOW), name="stopped")
        await until(server, "stopped", lambda record: record.version >= 1)
        folder = daemon.folder / "runs" / "stopped"
        learner = psutil.Process(kit.recorded_pids(folder)["learner"])
        learner.suspend()
        os.kill(read_endpoint(folder).pid, signal.SIGKILL)
        await ended_as(server, "stopped", "done", 2)
        assert not learner.is_running()
        kit.assert_every_step_once(folder, 20)
        await server.submit(settings(tmp_path, num_steps=3), name="two")
        async with asyncio.timeout(120):
            while (record := await server.show("two")).state != "ended":
                for pid in find_controllers(daemon.folder / "runs" / "two"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        killed += 1
                await asyncio.sleep(0.01)
        assert (record.outcome, record.attempts) == ("failed", 3)
        assert "3 times without a step" in record.reason
        assert killed >= 3


async def test_a_run_that_is_starting_can_be_told_to_end_and_is_adopted_where_its_daemon_is_killed(daemon, tmp_path):
    async with await daemon.start() as server:
        for order in ("stop", "drain"):
            await server.submit(settings(tmp_path, num_steps=1000), name=order)
            await controllers_of(daemon.folder / "runs" / order)
            assert (await server.show(order)).state == "starting"
            async with server._http.post(f"{server._url}/v1/runs/{order}/{order}") as answer:
                assert (answer.status, (await answer.json())["phase"]) == (200, "stopped")
            await ended_as(server, order, "stopped", 1)
            assert not find_controllers(daemon.folder / "runs" / order)
        await server.submit(settings(tmp_path, num_steps=3), name="adopted")
        folder = daemon.folder / "runs" / "adopted"
        await controllers_of(folder)
        await daemon.kill()
    assert read_endpoint(folder) is None
    async with await daemon.start() as server:
        await ended_as(server, "adopted", "done", 1)
    kit.assert_every_step_once(folder, 3)


async def test_a_daemon_that_would_be_open_or_in_the_way_is_refused(daemon, tmp_path):
    async with await daemon.start():
        port = (daemon.folder / "server.url").read_text().rpartition(":")[2]
        for said, *options in (
            ("another daemon", daemon.folder),
            ("cannot listen", tmp_path / "b", "--port", port),
            ("--tls-cert", tmp_path / "b", "--host", "0.0.0.0"),
        ):
            refused = await asyncio.to_thread(kit.command_line, "serve", "--folder", *options)
            assert (refused.returncode, said in refused.stderr) == (2, True)
    with pytest.raises(asyncrl.LaunchError, match="no daemon answers"):
        async with asyncrl.Server("http://127.0.0.1:9", "x"):
            pass
    assert msgspec.json.decode((daemon.folder / "admin.token").read_bytes().strip().join([b'"', b'"']))
