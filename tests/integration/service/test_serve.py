"""The daemon as it is used: a real process, real runs, real kills."""

import asyncio
import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
from pathlib import Path
from typing import Any, get_args

import aiohttp
import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file

import asyncrl
from asyncrl.buffer.ledger.reader import LedgerReader
from asyncrl.config.load import parse_config
from asyncrl.control.launch.processes import find_controllers, is_live, kill_controllers, read_endpoint, until_gone
from asyncrl.control.tools.inspect import inspect_run
from asyncrl.observe.samples import read_samples, read_tokens
from asyncrl.observe.steps import SECONDS_FILE, EventKind, SecondReport, read_events, read_lines, read_steps
from asyncrl.schema.samples import ids_from_bytes
from asyncrl.serve.daemon import view_runs
from asyncrl.serve.records import Records
from tests import builders
from tests.integration import conftest as kit
from tests.integration.placement.test_synchronous_equality import plain_loop

SLOW = {**kit.NO_MODEL, "token_latency_s": 0.1}

EIGHT_CORES = """
import sys
if "serve" in sys.argv:
    from asyncrl.control.placement import limits
    limits.num_cores = lambda: 8.0
"""
"""For a daemon that would take several small runs at once, on a machine of two cores too."""
CLOCK_SET_BACK = """
import os, time
now = time.time
time.time = lambda: now() - 3600 * os.path.exists({flag!r})
"""
"""By an hour, from when there is a file of this name."""
HELD = """
import os, sys, time
while "controller" in sys.argv and not os.path.exists({flag!r}):
    time.sleep(0.02)
"""
"""A controller that begins goes on once there is a file of this name."""
JOINS_LATE = """
if "serve" in sys.argv:
    from asyncrl.serve import keeper
    connect = keeper.connect
    def late(folder):
        time.sleep(0.2)
        return connect(folder)
    keeper.connect = late
"""
"""A daemon that takes its time before it connects to a run; to be run behind HELD."""


def first_run(folder: Path, code: str) -> dict[str, str]:
    """Return an environment in which every process of Python runs this code first."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def settings(folder: Path, **more):
    config = kit.tiny_settings(folder, **kit.NO_MODELS | kit.NO_EVALUATION | more)
    return {key: value for key, value in config.items() if key not in {"folder", "name"}}


async def until(server, run, reached):
    async with asyncio.timeout(300):
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


async def posted(server, path, body=None):
    """Order something of a run, which is done; return the answer."""
    async with server._http.post(f"{server._url}/v1/runs/{path}", json=body) as answer:
        assert answer.status == 200
        return await answer.json()


async def rows_of(server, run, what):
    async with server._http.get(f"{server._url}/v1/runs/{run}/{what}") as answer:
        return (await answer.json())["rows"]


async def hear(daemon: Any, path: str, heard: list[tuple[int, str, bytes]]) -> None:
    """Read a stream to its end, over daemons that are killed; the connection is cut after each few events.

    As a browser does: what has not come whole is not heard, and the next connection goes on behind what was heard last.
    """
    for most in itertools.cycle((1, 3, 2)):
        token = (daemon.folder / "admin.token").read_text().strip()
        headers = {"Accept": "text/event-stream", "Authorization": f"Bearer {token}"}
        headers |= {"Last-Event-ID": str(heard[-1][0])} if heard else {}
        with contextlib.suppress(aiohttp.ClientError, FileNotFoundError):  # the daemon is away
            url = (daemon.folder / "server.url").read_text()
            async with aiohttp.ClientSession() as http, http.get(url + path, headers=headers) as answer:
                assert answer.status == 200
                part, left = b"", most
                async for piece in answer.content.iter_any():
                    *whole, part = (part + piece).split(b"\n\n")
                    whole = [event for event in whole if not event.startswith(b":")]  # a comment, after a silence
                    for event in whole[:left]:
                        number, kind, row = (line.partition(b": ")[2] for line in event.split(b"\n"))
                        heard.append((int(number), kind.decode(), row))
                    left -= len(whole)
                    if left <= 0:
                        break
                else:
                    return
        if daemon.process.returncode == 0:  # the last one
            return
        await asyncio.sleep(0.02)


def give_away_pids(folder: Path, pid: int) -> None:
    """Have a run's files name another process: after a restart of the machine pids are given anew."""
    for name in ("api.json", "pids.jsonl"):
        (folder / name).write_bytes(re.sub(rb'"pid":\d+', b'"pid":%d' % pid, (folder / name).read_bytes()))


async def test_three_runs_outlive_a_daemon_are_resumed_where_all_died_and_streams_go_on_over_it(daemon, tmp_path, beside):
    """First the daemon is killed alone. Then with it a controller, all of a run, and all of a run whose pids another one gets."""
    names, environment = ("a", "b", "c"), first_run(tmp_path / "first", EIGHT_CORES)
    folders = {name: daemon.folder / "runs" / name for name in names}
    paths = ["/v1/events", *(f"/v1/runs/a/{what}" for what in ("steps", "events"))]
    heard = {path: [] for path in paths}
    stranger = beside("sleep", 1000)
    async with asyncio.TaskGroup() as readers:
        async with await daemon.start(**environment) as server:
            for name in names:
                often = {"checkpoint__every_steps": 1000 if name == "a" else 2}
                await server.submit(settings(tmp_path, num_steps=1000, generate__engine=SLOW, **often), name=name)
            reading = [readers.create_task(hear(daemon, path, heard[path])) for path in paths]
            for name in names:
                await until(server, name, lambda record: record.version >= 1)
            await daemon.kill()
        pids = {name: read_endpoint(folder).pid for name, folder in folders.items()}
        async with await daemon.start(**environment) as server:
            for name in names:
                reached = len(read_steps(folders[name]))
                adopted = await until(server, name, lambda record: record.state == "live" and record.version > reached)  # noqa: B023 - awaited at once
                assert (adopted.attempts, read_endpoint(folders[name]).pid) == (1, pids[name])
            async with server.connect("a") as client:
                assert client.run_folder == folders["a"]
                assert (await client.status()).name == "a"
                with pytest.raises(asyncrl.RunError, match="reward functions of its own"):
                    await client.score(lambda _prompt, _text: 0.0)
                async for event in client.events("phase", after=1):
                    assert event.seq > 1
                    if event.subject == "running":
                        break
            checkpoint = Path(await posted(server, "a/checkpoint"))
            assert checkpoint.parent == folders["a"] / "checkpoints"
            assert (checkpoint / "trainer" / "manifest.json").exists()
            made = [event.subject for event in read_events(folders["a"]) if event.kind == "checkpoint"]
            assert made == [f"checkpoints/{checkpoint.name}"]
            await daemon.kill()
        os.kill(pids["a"], signal.SIGKILL)
        kit.kill_all(folders["b"])
        kit.kill_all(folders["c"])
        for folder in folders.values():
            assert await until_gone(folder, 60)
        give_away_pids(folders["c"], stranger.pid)
        before = seconds_of(folders["a"])
        with (folders["a"] / SECONDS_FILE).open("ab") as file:
            file.write(b'{"time_s":1.5,"val')  # torn, as where the disk was full
        async with await daemon.start(**environment) as server:
            for name in names:
                reached = len(read_steps(folders[name]))
                await until(server, name, lambda record: record.attempts == 2 and record.version > reached)  # noqa: B023 - as above
                async with server.connect(name) as client:
                    await client.drain()
            async for ended in server.ended(names):
                assert (ended.outcome, ended.attempts) == ("stopped", 2), ended.reason
                kit.assert_every_step_once(folders[ended.id], ended.version)
            told = [row["time_s"] for row in await rows_of(server, "a", "seconds")]
            await asyncio.wait(reading[1:])
            async with asyncio.timeout(60):
                while sum(kind == "ended" for _, kind, _ in heard["/v1/events"]) < len(names):
                    await asyncio.sleep(0.05)
        assert await daemon.end() == 0
    assert stranger.poll() is None
    after = seconds_of(folders["a"])
    assert after[: len(before)] == before != after
    assert told == after == sorted(set(after))
    for name, number in (("steps", "step"), ("events", "seq")):
        lines = (folders["a"] / f"{name}.jsonl").read_bytes().splitlines()
        kept = [(msgspec.json.decode(line)[number], name.removesuffix("s"), line) for line in lines]
        assert heard[f"/v1/runs/a/{name}"] == kept
    with contextlib.closing(Records(daemon.folder)) as records:
        kept = records.events(0)
    assert heard["/v1/events"] == [(event.seq, event.kind, msgspec.json.encode(event)) for event in kept]
    for name in names:  # what a run told of itself while there was no daemon is among the daemon's events too
        own = [(one.kind, f"{one.subject} {one.text}".strip()) for one in read_events(folders[name]) if one.kind != "swap"]
        assert [(one.kind, one.text) for one in kept if one.run == name and one.kind in get_args(EventKind)] == own
        found = [one.kind for one in kept if one.run == name and one.kind in {"started", "adopted", "resumed", "ended"}]
        assert found == ["started", "adopted", "resumed", "ended"]


UNHURRIED = """
import os, time

def score(prompt, text):
    if os.path.exists({from_here!r}) and not os.path.exists({to_here!r}):
        time.sleep(0.2)
    return float(len(text) % 3)
"""
"""From when there is the one file until there is the other; so a run is far from its end when it is killed."""


async def test_a_run_that_dies_whole_is_read_where_it_is_moved_to_and_ends_with_the_weights_of_a_plain_loop(daemon, tmp_path):
    """At max_staleness 0, where weights depend on nothing but the seed."""
    often = {"num_steps": 12, "checkpoint__every_steps": 4, **kit.NO_EVALUATION}
    config = kit.tiny_settings(tmp_path, buffer__max_staleness=0, **often)
    folder, killed = daemon.folder / "runs" / "tiny", tmp_path / "killed"
    unhurried = UNHURRIED.format(from_here=str(folder / "checkpoints" / "step-000004"), to_here=str(killed))
    config["reward"]["functions"] = kit.python_reward(tmp_path, unhurried)
    async with await daemon.start("--code-root", str(tmp_path)) as server:
        await server.submit(config)
        await until(server, "tiny", lambda record: record.version >= 5)
        await daemon.kill()
    kit.kill_all(folder)
    killed.touch()
    told = all_that_is_read(folder)
    moved = folder.rename(tmp_path / "moved")
    assert all_that_is_read(moved) == told
    await view(moved, told[0].step)
    moved.rename(folder)
    async with await daemon.start("--code-root", str(tmp_path)) as server:
        await ended_as(server, "tiny", "done", 2, version=12)
        forked = await server.fork("tiny", "child", set={"num_steps": 2})
        checkpoints = (folder / "checkpoints").rename(tmp_path / "gone")  # as of a run that goes on while its fork waits
        assert forked.parent == "tiny/checkpoints/step-000012"
        await ended_as(server, "child", "done", 1, version=2)
    kit.assert_every_step_once(folder, 12)
    trained = load_file(checkpoints / "step-000012" / "model.safetensors")
    expected = await plain_loop(parse_config(config), folder / "model", lambda _, text: float(len(text) % 3))
    assert trained
    assert [name for name, tensor in trained.items() if not torch.equal(tensor, expected[name])] == []


def all_that_is_read(folder: Path) -> tuple[object, ...]:
    """Return what readers say of a run's newest step, down to each token as it was sampled and as the learner saw it."""
    newest, ledger = read_steps(folder)[-1], LedgerReader(folder)
    (step,) = [row for row in ledger.steps(last=10) if row.step == newest.step]
    stories = [ledger.sample(group_id, index) for group_id in step.group_ids for index in range(4)]
    for story in stories:
        assert len(ids_from_bytes(story.sample.token_ids)) == story.row.num_tokens > 0
    name = f"g{stories[0].row.group_id}.0"
    text = inspect_run(folder, sample=name)
    assert "logprob" in text.split("completion:")[1]
    tokens = read_tokens(folder, newest.step)
    assert tokens.keys() <= {(story.row.group_id, story.row.index) for story in stories}
    samples = [row for row in read_samples(folder) if row.step == newest.step]
    assert {(row.group_id, row.index) for row in samples} <= tokens.keys() != set()
    return newest, step, stories, text, tokens, samples, list(read_events(folder))


async def view(folder: Path, step: int) -> None:
    """Look at a run with `asyncrl view`: the samples of a step, and one token by token."""
    said: asyncio.Queue[str] = asyncio.Queue()
    async with asyncio.TaskGroup() as group:
        viewing = group.create_task(view_runs([folder], 0, said.put_nowait))
        url, _, token = (await said.get()).partition("/#token=")
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as http:
            run = f"{url}/v1/runs/{folder.name}"
            rows = (await (await http.get(f"{run}/samples", params={"step": step})).json())["rows"]
            assert len(rows) == 16
            one = rows[0]
            place = {"step": one["step"], "group": one["group_id"], "index": one["index"]}
            seen = await (await http.get(f"{run}/tokens", params=place)).json()
            sampled = LedgerReader(folder).sample(one["group_id"], one["index"]).sample
            assert seen["token"] == ids_from_bytes(sampled.token_ids).tolist()
            assert len(seen["text"]) == one["num_tokens"]
        viewing.cancel()


OLDER = {
    "__init__.py": {'__version__ = "': '__version__ = "0.0.1+'},
    "schema/status.py": {
        "    guests: dict[str, int] = {}\n": '    mood: str = "calm"\n',
        '    """Of the controller."""\n': '    dialect: str = "old"\n',
    },
    "control/api.py": {"            guests=run.membership.counts(),\n": ""},
    "observe/steps.py": {
        "    dropped: dict[": '    mood: str = "calm"\n    dropped: dict[',
        '    "phase", "death"': '    "mood", "phase", "death"',
    },
    "control/reporter.py": {
        "self._steps_file.write(report)": 'self._steps_file.write(report), self.note_event("mood", "calm")',
    },
}
"""What another version differs in: a field that has come since is missing in the status of its runs; fields that have gone since
are there, in api.json and steps.jsonl too, and so is a kind of event."""


def older_version(folder: Path) -> Path:
    """Make a version of this package as it was before; return the folder that it lies in."""
    package = Path(asyncrl.__file__).parent
    shutil.copytree(package, folder / package.name)  # with what is compiled: only what is changed is compiled anew
    for name, changes in OLDER.items():
        text = (package / name).read_text()
        for now, before in changes.items():
            assert text.count(now) == 1, (name, now)
            text = text.replace(now, before)
        (folder / package.name / name).write_text(text)
    return folder


async def test_a_run_of_an_older_version_is_adopted_followed_and_drained_by_a_newer_daemon(daemon, tmp_path):
    older = older_version(tmp_path / "older")
    async with await daemon.start(PYTHONPATH=str(older), PYTHONSAFEPATH="1") as server:
        assert await version_of(daemon) == f"0.0.1+{asyncrl.__version__}"
        await server.submit(settings(tmp_path, num_steps=1000, generate__engine=SLOW), name="one")
        await until(server, "one", lambda record: record.version >= 1)
        await daemon.kill()
    folder = daemon.folder / "runs" / "one"
    pid, endpoint = read_endpoint(folder).pid, msgspec.json.decode((folder / "api.json").read_bytes())
    assert (endpoint["dialect"], psutil.Process(pid).environ()["PYTHONPATH"]) == ("old", str(older))
    async with await daemon.start() as server:
        assert await version_of(daemon) == asyncrl.__version__
        adopted = await until(server, "one", lambda record: record.state == "live" and record.version >= 3)
        assert (adopted.attempts, read_endpoint(folder).pid, [run.id for run in await server.runs()]) == (1, pid, ["one"])
        async with asyncrl.connect(folder) as client:
            status = await client._call("GET", "status", dict)
        assert (status["mood"], "guests" in status) == ("calm", False)
        async with server.connect("one") as client:
            assert (await client.status()).guests == {}
            seen = []
            async for report in client.steps():
                seen.append(report.step)
                if len(seen) == 5:
                    await client.drain()
        ended = await until(server, "one", lambda record: record.state == "ended")
        assert (seen, ended.outcome) == (list(range(ended.version)), "stopped")
        kit.assert_every_step_once(folder, ended.version)
        await posted(server, "one/resume")
        async for refused in server.ended(["one"]):  # a run that this version cannot read whole is not guessed at
            assert (refused.outcome, "events.jsonl" in refused.reason, "mood" in refused.reason) == ("failed", True, True)


async def version_of(daemon) -> str:
    async with aiohttp.ClientSession() as http, http.get((daemon.folder / "server.url").read_text() + "/version") as answer:
        return (await answer.json())["version"]


async def test_queued_runs_keep_their_order_over_two_killed_daemons_and_one_that_ended_goes_on(daemon, tmp_path):
    """On a machine that fits one at a time."""
    everything = {"learner__num_threads": os.cpu_count() or 1}
    others = ["second", "third", "urgent"]
    async with await daemon.start() as server:
        first = await server.submit(settings(tmp_path, num_steps=100_000, **everything), name="first", tags=["t"])
        for name in others:
            await server.submit(settings(tmp_path, num_steps=2, **everything), name=name, priority=int(name == "urgent"))
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
            changes = {"learner.learning_rate": 1e-4, "num_steps": 99_999}
            assert (await client.change(changes, who="somebody else")).revision == 1
        assert "revision 1 by " in (daemon.folder / "runs" / "first" / "config.toml").read_text()
        await daemon.kill()
    async with await daemon.start() as server:
        assert (await server.show("first")).attempts == 1
        async with server.connect("first") as client:
            status = await client.drain()
        assert status.phase == "stopped"
        await ended_as(server, "first", "stopped", 1)
        assert (await server.show("first")).num_steps == 99_999
        await until(server, "second", lambda record: record.state != "queued")
        await daemon.kill()
    others.remove("third")
    async with await daemon.start() as server:
        goal = {"num_steps": status.version + 2}
        await posted(server, "first/resume", goal)
        records = {ended.id: ended async for ended in server.ended(["first", *others])}
        kit.assert_every_step_once(daemon.folder / "runs" / "first", goal["num_steps"])
        assert (records.pop("first").attempts, (await server.show("third")).outcome) == (2, "cancelled")
        assert [(record.id, record.outcome, record.reason) for record in records.values() if record.outcome != "done"] == []
        order = ["urgent", *(name for name in others if name != "urgent")]
        assert sorted(records, key=lambda name: records[name].started_s) == order
        spans = sorted((record.started_s, record.ended_s) for record in records.values())
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans)), "two ran at once"
        for name in others:
            kit.assert_every_step_once(daemon.folder / "runs" / name, 2)
        assert [record.id for record in await server.runs(tag="t")] == ["first"]
    assert await daemon.end() == 0


async def test_a_program_elsewhere_judges_a_run_while_it_is_queued_lost_and_resumed_though_clocks_are_set_back(daemon, tmp_path):
    """Under the daemon and the run; then a generator and the controller begin anew, an hour before."""
    judged, back = [], tmp_path / "set_back"
    environment = first_run(tmp_path / "first", CLOCK_SET_BACK.format(flag=str(back)))

    async def reward(prompt: asyncrl.Prompt, text: str) -> float:
        judged.append(text)
        return float(len(judged) % 3)

    async with await daemon.start(**environment) as server:
        caller = {"reward": {"functions": [{"kind": "caller"}]}, "num_steps": 15, "generate__engine": SLOW}
        await server.submit(settings(tmp_path, **caller), name="one")
        folder = daemon.folder / "runs" / "one"
        async with server.connect("one") as client, asyncio.TaskGroup() as group:
            group.create_task(client.score(reward))
            await until(server, "one", lambda record: record.version >= 2)
            back.touch()
            kit.kill(folder, "generator-0")
            reached = (await server.show("one")).version + 3  # more than what was under way
            await until(server, "one", lambda record: record.version >= reached)
            newest = list(read_events(folder))[-1]
            os.kill(read_endpoint(folder).pid, signal.SIGKILL)
            await ended_as(server, "one", "done", 2)
        assert [row["time_s"] for row in await rows_of(server, "one", "seconds")] == seconds_of(folder)
    kit.assert_every_step_once(folder, 15)
    assert len(judged) >= 15 * 16
    events = list(read_events(folder))
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    times = [event.time_s for event in events]
    assert times[: newest.seq] == sorted(times[: newest.seq])
    assert "generator-0" in [event.subject for event in events[: newest.seq] if event.kind == "restart"]
    assert times[-1] < newest.time_s - 3000  # the new controller lives an hour before the one that it follows


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


async def test_killed_controllers_are_started_again_and_no_more_often_than_allowed(daemon, tmp_path):
    """One before it answers; one whose learner stands still, and is ended; one again and again. What cannot start says why."""
    flag = tmp_path / "goes_on"
    async with await daemon.start(**first_run(tmp_path / "first", HELD.format(flag=str(flag)) + JOINS_LATE)) as server:
        at_once = {"owner__absent": "stop", "owner__grace_s": 0.0}  # somebody holds the run from its first moment on
        await server.submit(settings(tmp_path, num_steps=3, **at_once), name="one")
        folder = daemon.folder / "runs" / "one"
        await builders.until(lambda: find_controllers(folder))
        kill_controllers(folder)
        flag.touch()
        await ended_as(server, "one", "done", 2)
        kit.assert_every_step_once(folder, 3)
        await server.submit(settings(tmp_path, num_steps=1000, generate__engine=SLOW), name="stopped")
        await until(server, "stopped", lambda record: record.version >= 1)
        folder = daemon.folder / "runs" / "stopped"
        learner = psutil.Process(kit.recorded_pids(folder)["learner"])
        learner.suspend()
        os.kill(read_endpoint(folder).pid, signal.SIGKILL)
        reached = len(read_steps(folder))
        await until(server, "stopped", lambda record: record.attempts == 2 and record.version > reached)
        assert not learner.is_running()
        async with server.connect("stopped") as client:
            await client.drain()
        await ended_as(server, "stopped", "stopped", 2)
        kit.assert_every_step_once(folder, (await server.show("stopped")).version)
        elsewhere = {"transport": {"kind": "tcp", "host": "203.0.113.1"}}
        await server.submit({**settings(tmp_path), **elsewhere}, name="elsewhere")
        async for ended in server.ended(["elsewhere"]):
            assert (ended.outcome, "203.0.113.1" in ended.reason) == ("failed", True)
        flag.unlink()  # none answers, however late it is killed
        await server.submit(settings(tmp_path, num_steps=3), name="two")
        async with asyncio.timeout(120):
            while (record := await server.show("two")).state != "ended":
                kill_controllers(daemon.folder / "runs" / "two")
                await asyncio.sleep(0.1)
        assert (record.outcome, record.attempts) == ("failed", 3)
        assert "3 times without a step" in record.reason


async def test_a_run_that_is_starting_can_be_told_to_end_and_is_adopted_where_its_daemon_is_killed(daemon, tmp_path):
    flag = tmp_path / "goes_on"

    async def let_go() -> None:
        await until(server, "told", lambda record: record.drains)
        flag.touch()

    async with await daemon.start(**first_run(tmp_path / "first", HELD.format(flag=str(flag)))) as server:
        await server.submit(settings(tmp_path, num_steps=1000), name="told")
        await builders.until(lambda: find_controllers(daemon.folder / "runs" / "told"))
        assert (await server.show("told")).state == "starting"
        async with asyncio.TaskGroup() as group:
            group.create_task(let_go())
            assert (await posted(server, "told/stop"))["phase"] == "stopped"
        await ended_as(server, "told", "stopped", 1)
        flag.unlink()
        await server.submit(settings(tmp_path, num_steps=3), name="adopted")
        folder = daemon.folder / "runs" / "adopted"
        await builders.until(lambda: find_controllers(folder))
        await daemon.kill()
    assert read_endpoint(folder) is None
    flag.touch()
    (daemon.folder / "server.sqlite").write_bytes(b"damaged" * 1000)  # the books with it: runs are found from their folders
    async with await daemon.start() as server:
        await ended_as(server, "adopted", "done", 1)
    kit.assert_every_step_once(folder, 3)
