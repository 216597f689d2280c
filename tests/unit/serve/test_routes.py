"""Every route, by the table: who may ask, from where; and nothing but 4xx for what makes no sense."""

import asyncio
import contextlib
import functools
import hashlib
import io
import json
import os
import random
import re
import resource
import shutil
import sqlite3
import tarfile
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import AsyncMock, Mock
from urllib.parse import quote

import msgspec
import pytest
from aiohttp import ClientPayloadError, web
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request
from yarl import URL

from asyncrl.clock import SystemClock
from asyncrl.config.load import dump_config, resolve_config
from asyncrl.control.lifecycle.state import GOAL_REACHED
from asyncrl.errors import ConfigError, LaunchError, RunError
from asyncrl.observe.metrics import METRICS
from asyncrl.observe.sinks import MetricsRow
from asyncrl.observe.steps import (
    EVAL_FILE,
    EVENTS_FILE,
    MOST_READ_BYTES,
    SECONDS_FILE,
    STEPS_FILE,
    EvalReport,
    JsonLines,
    RunEvent,
    SecondReport,
    StepReport,
    set_behind,
)
from asyncrl.serve.client import Server
from asyncrl.serve.keeper import Keeper
from asyncrl.serve.machine import Machine
from asyncrl.serve.reading import MOST_CHUNK_BYTES, MOST_SERIES, SUMS_FILE, json_response, stream
from asyncrl.serve.records import DATABASE, OPEN, ROLES, SESSION_S, ForbiddenError, Guard, Records, RunRecord, new_token
from asyncrl.serve.routes import PROBE_S, Service
from tests.builders import write_rows
from tests.virtual_clock import VirtualClock


@pytest.fixture
async def service(tmp_path):
    records, clock = Records(tmp_path), SystemClock()
    keeper = Keeper(records, Machine(cores=2, memory_bytes=1 << 40), clock)
    keeper.settled.set()
    one = Service(records, keeper, Guard(records, {"127.0.0.1"}), clock)
    records.put_run(RunRecord(id="r", number=1, state="ended", outcome="done", project='a"b'))
    yield one
    records.close()


@pytest.fixture
async def client(service):
    """Whatever is answered in a test has a status that the table says."""
    app, said, unsaid = service.app(), service.openapi(None)["paths"], []

    async def compare(request, response):
        resource, status = request.match_info.route.resource, str(response.status)
        known = {status, f"{status[0]}XX"} if resource is None else said[resource.canonical][request.method.lower()]["responses"]
        if not {status, f"{status[0]}XX"} & set(known):
            unsaid.append((request.method, request.path, status))

    app.on_response_prepare.append(compare)
    server = TestServer(app)
    await server.start_server(shutdown_timeout=0.5)
    async with TestClient(server) as client:
        yield client
    assert unsaid == []


@pytest.fixture
def tokens(service):
    return {role: new_token(service.records, role, role, SystemClock()) for role in ROLES}


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


HOLES = {"{run}": "r", "{path:.*}": "served.json", "{name}": "viewer", "{name:.*}": "viewer", "{file:.*}": "page.js"}


def filled(path, pick=HOLES.__getitem__):
    return functools.reduce(lambda text, hole: text.replace(hole, pick(hole)), HOLES, path)


async def test_every_route_refuses_whoever_may_not_ask(service, client, tokens):
    for route in service.routes():
        path = filled(route.path)
        foreign = await client.request(route.method, path, headers={**bearer(tokens["admin"]), "Host": "evil.example"})
        assert foreign.status == 403, route
        page = {**bearer(tokens["admin"]), "Origin": "http://evil.example"}
        assert (await client.request(route.method, path, headers=page)).status == 403, route
        if route.least == OPEN:
            expected = {400} if path == "/v1/login" else {200, 503}
            assert (await client.request(route.method, path)).status in expected, route
            continue
        for headers in ({}, bearer("wrong"), bearer("\udcff\udcfe"), {"Authorization": tokens["admin"]}):
            answer = await client.request(route.method, path, headers=headers)
            assert answer.status == 401, (route, headers)
        for role in ROLES[: ROLES.index(route.least)]:
            assert (await client.request(route.method, path, headers=bearer(tokens[role]))).status == 403, (route, role)


async def test_what_a_route_does_not_take_is_a_4xx_and_starts_nothing(service, client, tokens, tmp_path):
    source = random.Random(0)
    odd = ["", "x", "../..", "%00", "r", "-1", "9" * 40, "runs", "\u2603", "a b", "r/keys", "..%2f..", "api.json"]
    bodies = [b"", b'{"confg": {}}', b"[]", b"\xff", b'{"config": 5}', b'{"name": "../../x"}', b"x" * 2000]
    bodies += [b'{"set": {"num_steps": 1e999}}', b'{"token": "none"}']
    own = f"127.0.0.1:{client.port}"
    hosts = [own] * 8 + ["127.0.0.1", "evil.example", "127.0.0.1.evil.example", "localhost", f"[::1]:{client.port}", "", "a:b:c"]
    origins = [""] * 8 + [f"http://{own}", "http://evil.example", "null", "http://127.0.0.1:1", "x", f"http://{own}.evil.example"]
    routes = service.routes()
    service.records.put_run(RunRecord(id="r", number=1, state="ended", outcome="done", version=5, num_steps=5))
    runs, known = dict(service.records.runs), dict(service.records.tokens)

    async def ask_one() -> None:
        route = source.choice(routes)
        path = filled(route.path, lambda _: source.choice(odd))
        method = source.choice([route.method, "GET", "POST", "DELETE", "PUT", "PATCH"])
        token = source.choice([*tokens.values(), "none"])
        query = source.choice(["", "?limit=-1", "?after=x", "?first=1.5", "?runs=r,x", "?limit=" + "9" * 30, "?before=z"])
        host, origin = source.choice(hosts), source.choice(origins)
        headers = {**bearer(token), "Host": host} | ({"Origin": origin} if origin else {})
        answer = await client.request(method, path + query, headers=headers, data=source.choice(bodies))
        statuses.add(answer.status)
        asked = (method, path, query, headers, answer.status)
        assert 200 <= answer.status < 300 or 400 <= answer.status < 500, asked
        assert method == "GET" or answer.status >= 400 or path == "/v1/logout", asked  # which takes a cookie from a browser
        foreign = host not in {own, "127.0.0.1"} or origin not in {"", f"http://{host}"}
        assert answer.status in {400, 403} if foreign else True, asked
        answer.close()  # a stream of events has no end

    statuses = set()
    async with asyncio.TaskGroup() as keeping:
        keeper = keeping.create_task(service.keeper.run())
        for _ in range(250):
            async with asyncio.TaskGroup() as group:
                for _ in range(20):
                    group.create_task(ask_one())
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("run-")]
        keeper.cancel()
    assert {200, 400, 401, 403, 404, 405, 409} <= statuses
    assert (service.records.runs, service.records.tokens, service.keeper.statuses) == (runs, known, {})
    assert service.records.events(0) == []
    assert os.listdir(tmp_path / "runs") == ["r"]


async def test_what_a_body_says_wrong_is_named_and_hostile_ones_are_refused_in_words(service, client, tokens):
    submitter = {**bearer(tokens["submitter"]), "Content-Type": "application/json"}
    operator = bearer(tokens["operator"])
    answer = await client.post("/v1/runs", headers=submitter, json={"set": {"num_steps": "x", "seed": -1}})
    assert answer.status == 422
    assert {fault["field"] for fault in (await answer.json())["faults"]} == {"num_steps", "seed"}
    engine, code = {"kind": "transformers", "device": "cuda:7"}, {"kind": "python", "path": "os:getcwd"}
    everything = {
        "learner.compile": True, "learner.logprobs": "fused",
        "task": {"kind": "jsonl", "chat": False, "path": "/nowhere/train.jsonl"},
        "reward.functions": [code], "generate.engine": engine, "seed.x": 1,
    }  # fmt: skip
    asked = {"config": 'algorithm = {loss = "aipo"}', "set": everything, "presets": ["no_such"], "name": "a/b"}
    answer = await client.post("/v1/runs", headers=submitter, json=asked)
    assert answer.status == 422
    faults = {fault["field"]: fault for fault in (await answer.json())["faults"]}
    given = {field: fault["given"] for field, fault in faults.items()}
    machine = given.pop("machine")
    assert given == {
        "presets": "no_such", "learner.compile": True, "learner.logprobs": "fused", "name": "a/b",
        "functions": "os:getcwd", "task.path": "/nowhere/train.jsonl", "seed": {"x": 1}, "algorithm.loss": "aipo",
    }  # fmt: skip
    assert (machine["gpus"], faults["machine"]["allowed"]) == (8, "the run takes 8 GPUs and this machine has 0")
    assert all(fault["allowed"] for fault in faults.values())
    deep = b'{"a":' * 5000 + b"1" + b"}" * 5000
    bodies = [
        b'{"confg": 1}', b'{"config":' + deep + b"}", b'{"set": {"a' + b".a" * 5000 + b'": 1}}', b'{"config": "x\\u0000y"}',
        b'{"name": "x", "priority": 1' + b"0" * 30 + b"}", b'{"config": "' + b"x" * 5000 + b'"}',
        b'{"presets": ["' + b"x/" * 3000 + b'"]}', b'{"config": "a' + b".a" * 50000 + b'=1"}',
        b'{"tags": ["' + b"t" * 300 + b'"]}', b'{"set": {"launch.x": ' + b'{"a":' * 60 + b"1" + b"}" * 60 + b"}}",
    ]  # fmt: skip
    for body in bodies:
        answer = await client.post("/v1/runs", headers=submitter, data=body)
        assert answer.status in {400, 422}, body[:60]
        assert (await answer.json())["error"]
    packed, key = {"Content-Encoding": "gzip", "Connection": "close"}, {"Idempotency-Key": "k" * 201}
    for path, headers, body, status in (
        ("/v1/runs", submitter, io.BytesIO(b" " * (2 << 20)), 413),
        ("/v1/runs", submitter | packed, b"no gzip", 400),
        ("/v1/runs", submitter | key, b"{}", 400),
        ("/v1/runs/r/resume", operator, b'{"num_steps": 1' + b"0" * 30 + b"}", 400),
        ("/v1/runs/r/stop", operator, b"", 409),
    ):
        assert (await client.post(path, headers=headers, data=body)).status == status, (path, status)
    for name in ("{x}", "a b", "a?b", "a\nb", 'a"b', "-rf", ".hidden", "%2f", "e\u0301", "a,b"):
        answer = await client.post("/v1/runs", headers=submitter, json={"name": name})
        assert answer.status == 422, name
        assert "name" in {fault["field"] for fault in (await answer.json())["faults"]}, name
    assert set(service.records.runs) == {"r"}


async def test_repeats_with_one_key_are_one_run_also_at_once_and_keys_are_of_one_body_and_route(service, client, tokens):
    submitter = bearer(tokens["submitter"])
    keyed, body = {**submitter, "Idempotency-Key": "k"}, {"config": "quickstart", "name": "one"}
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(client.post("/v1/runs", headers=keyed, json=body)) for _ in range(4)]
    assert sorted(task.result().status for task in asked) == [200, 200, 200, 201]
    assert (await client.post("/v1/runs", headers=keyed, json=body)).status == 200
    for path, headers, given in (
        ("/v1/runs", keyed, {**body, "name": "two"}),
        ("/v1/runs/one/fork", keyed, {"name": "one"}),
        ("/v1/runs", submitter, body),  # the name is taken
    ):
        assert (await client.post(path, headers=headers, json=given)).status == 409, path
    assert set(service.records.runs) == {"r", "one"}
    cancelled = await client.post("/v1/runs/one/cancel", headers=bearer(tokens["operator"]))
    assert (await cancelled.json())["outcome"] == "cancelled"


@pytest.mark.parametrize(("reason", "newest", "at_end", "status"), [
    ("full", 50, "false", 200), ("full", 75, "true", 200), ("full", 75, "false", 409), (GOAL_REACHED, 50, "true", 409),
])  # fmt: skip
async def test_a_run_that_failed_over_its_last_checkpoint_or_evaluation_can_be_resumed(
    service, client, tokens, reason, newest, at_end, status
):
    service.records.put_run(RunRecord(id="r", number=1, state="ended", reason=reason, version=75, num_steps=75))
    (folder := service.records.run_folder("r")).joinpath("checkpoints", f"step-{newest:06}").mkdir(parents=True)
    (folder / "config.toml").write_text(f"eval.at_end = {at_end}")
    answer = await client.post("/v1/runs/r/resume", headers=bearer(tokens["operator"]))
    assert answer.status == status, await answer.text()


async def test_a_name_that_a_killed_daemon_left_half_made_is_free(service, client, tokens):
    folder = service.records.run_folder("one")
    folder.mkdir()
    (folder / "submitted.toml").write_text("half")
    assert (await client.post("/v1/runs", headers=bearer(tokens["submitter"]), json={"name": "one"})).status == 201
    full = service.records.run_folder("two")
    (full / "served.json.partial").mkdir(parents=True)  # cannot be written, as on a full disk
    for _ in range(2):
        answer = await client.post("/v1/runs", headers=bearer(tokens["submitter"]), json={"name": "two"})
        assert answer.status in {201, 507}
    assert answer.status == 201  # what was refused did not keep the name, nor was it queued
    assert set(service.records.runs) == {"r", "one", "two"}


async def test_files_of_a_run_are_served_its_secrets_are_not_and_odd_ones_are_no_error(service, client, tokens):
    folder, headers = service.records.run_folder("r"), bearer(tokens["operator"])
    (folder / "keys").mkdir()
    for name in ("keys/server.key", "api.json", "steps.jsonl"):
        (folder / name).write_text("0123456789")
    (folder.parent / "other").write_text("x")
    for link, target in (("link", folder.parent / "other"), ("broken", folder / "nothing"), ("loop", "loop")):
        (folder / link).symlink_to(target)
    os.mkfifo(folder / "fifo")
    part = await client.get("/v1/runs/r/files/steps.jsonl", headers={**headers, "Range": "bytes=2-4"})
    assert (part.status, await part.text()) == (206, "234")
    etag = part.headers["ETag"]
    assert re.fullmatch(r'"[0-9a-f-]+"', etag)
    for asked, expected in (
        ({"If-None-Match": etag}, (304, "")),
        ({"If-None-Match": '"other"'}, (200, "0123456789")),
        ({"Range": "bytes=2-4", "If-Range": etag}, (206, "234")),
        ({"Range": "bytes=2-4", "If-Range": '"other"'}, (200, "0123456789")),
        ({"Range": "bytes=2-4", "If-Range": f"W/{etag}"}, (200, "0123456789")),
        ({"If-Range": '"other"'}, (200, "0123456789")),
        ({"Range": "bytes=20-"}, (416, "")),
    ):
        answer = await client.get("/v1/runs/r/files/steps.jsonl", headers={**headers, **asked})
        assert (answer.status, await answer.text()) == expected, asked
    with (folder / "steps.jsonl").open("a") as file:
        file.write("+")
    changed = await client.get("/v1/runs/r/files/steps.jsonl", headers={**headers, "Range": "bytes=2-4", "If-Range": etag})
    assert (changed.status, await changed.text(), changed.headers["ETag"] != etag) == (200, "0123456789+", True)
    secret = ("keys/server.key", "keys", "api.json", "link", "..%2fother", "%2e%2e/other", "/etc/passwd")
    for path in (*secret, "none", "broken", "loop", "fifo", "x" * 300, "x/" * 2500, "%00"):
        assert (await client.get(f"/v1/runs/r/files/{path}", headers=headers)).status == 404, path
    listed = {row["name"] for row in await (await client.get("/v1/runs/r/files/", headers=headers)).json()}
    assert listed - {"link"} == {"served.json", "steps.jsonl", "fifo"}


async def test_lines_of_all_processes_come_by_time(service, client, tokens, tmp_path):
    logs, headers = service.records.run_folder("r") / "logs", bearer(tokens["operator"])
    logs.mkdir()
    (logs / "learner.log").write_text("2026-01-01 00:00:01.000 INFO a\n2026-01-01 00:00:03.000 ERROR died\n  Error: 7\n")
    (logs / "generator-0.log").write_bytes(b"2026-01-01 00:00:02.500 INFO b\n\xff error\n")
    (tmp_path / "secret.log").write_text("secret")
    (logs / "link.log").symlink_to(tmp_path / "secret.log")
    found = await (await client.get("/v1/runs/r/logs", headers=headers)).json()
    assert [(process, line[-7:]) for process, line in found] == [
        ("learner", " INFO a"), ("generator-0", " INFO b"), ("generator-0", "\ufffd error"), ("learner", "OR died"),
        ("learner", "rror: 7"),
    ]  # fmt: skip
    found = await (await client.get("/v1/runs/r/logs?q=eRRor", headers=headers)).json()
    assert [process for process, _ in found] == ["generator-0", "learner", "learner"]
    found = await (await client.get("/v1/runs/r/logs", headers=headers, params={"pattern": r"^\d.*(info [ab]|DIED)$"})).json()
    assert [process for process, _ in found] == ["learner", "generator-0", "learner"]
    wrong = await client.get("/v1/runs/r/logs", headers=headers, params={"pattern": "(a"})
    assert (wrong.status, "RE2" in (await wrong.json())["error"]) == (400, True)


async def test_a_checkpoint_comes_whole_or_not_at_all(service, client, tokens, tmp_path, monkeypatch):
    checkpoints, base = service.records.run_folder("r") / "checkpoints", tmp_path / "base.safetensors"
    base.write_bytes(os.urandom(MOST_CHUNK_BYTES + 700))
    for name in ("step-999950", "step-1000000", "step-odd", ".partial-step-1000001"):
        (checkpoints / name / "trainer").mkdir(parents=True)
        (checkpoints / name / "trainer" / "state.json").write_text(name)
        (checkpoints / name / "empty").touch()
        (checkpoints / name / "model.safetensors").symlink_to(base)
    async with Server(str(client.make_url("")), tokens["operator"]) as server:
        got = await server.download("r", tmp_path / "into")
        assert (got, (got / "trainer" / "state.json").read_text()) == (tmp_path / "into" / "step-1000000", "step-1000000")
        assert (got / "model.safetensors").read_bytes() == base.read_bytes()
        assert {line.partition("  ")[2] for line in (got / SUMS_FILE).read_text().splitlines()} == {
            "empty", "model.safetensors", "trainer/state.json"
        }  # fmt: skip
        with pytest.raises(RunError, match="already"):
            await server.download("r", tmp_path / "into")
        monkeypatch.chdir(tmp_path)
        (tmp_path / "other").mkdir()
        assert (await server.download("r", "other/../into", checkpoint="step-999950")).name == "step-999950"
        for name in ("step-000009", ".partial-step-1000001", "..", "%2e%2e%2fkeys"):
            with pytest.raises(RunError):
                await server.download("r", tmp_path / "other", checkpoint=name)
    assert not list((tmp_path / "other").iterdir())


async def test_a_checkpoint_that_its_run_removes_is_sent_to_its_end_or_not_begun(service, client, tokens):
    folder = service.records.run_folder("r") / "checkpoints" / "step-000001"
    folder.mkdir(parents=True)
    parts = {f"model-{number}.safetensors": os.urandom(2 * MOST_CHUNK_BYTES) for number in range(3)}
    for name, content in parts.items():
        (folder / name).write_bytes(content)
    headers = bearer(tokens["operator"])
    sent = await client.get("/v1/runs/r/checkpoints/newest", headers=headers)
    shutil.rmtree(folder)
    with tarfile.open(fileobj=io.BytesIO(await sent.read())) as tar:
        read = {name.partition("/")[2]: tar.extractfile(name).read() for name in tar.getnames()}
    sums = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in parts.items())
    assert read == {**parts, SUMS_FILE: sums.encode()}
    folder.mkdir()  # removed after it was found, and before its files were
    gone = await client.get("/v1/runs/r/checkpoints/step-000001", headers=headers)
    assert (gone.status, "just been removed" in (await gone.json())["error"]) == (404, True)


async def test_seconds_are_told_once_each_where_their_file_is_full_and_begun_anew(service, client, tokens):
    service.records.put_run(RunRecord(id="live", number=2, state="live"))
    headers, path = bearer(tokens["viewer"]), service.records.run_folder("live") / SECONDS_FILE
    with contextlib.closing(JsonLines(path, most_bytes=300)) as seconds:
        seconds.write(*(SecondReport(float(number), {}) for number in range(5)))
        first = await (await client.get("/v1/runs/live/seconds", headers=headers)).json()
        told = [row["time_s"] for row in first["rows"]]
        stream = await client.get(f"/v1/runs/live/live?seconds={first['offset']}", headers=headers)
        async with asyncio.timeout(100):
            for begun in range(5, 35, 10):
                for number in range(begun, begun + 10):
                    seconds.write(SecondReport(float(number), {}))
                while told[-1] < begun + 9:
                    row = json.loads(await stream.content.readline())
                    told += [row["time_s"]] if "time_s" in row else []
        assert set_behind(path).exists()
        stream.close()
    assert told == [float(number) for number in range(35)]


async def test_a_series_has_the_staleness_bound_that_held_at_each_step(service, client, tokens):
    headers, folder = bearer(tokens["viewer"]), service.records.run_folder("r")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text("[buffer]\nmax_staleness = 2\n")

    async def told():
        series = await (await client.get("/v1/runs/r/series", headers=headers)).json()
        return series["bounds"], series["events"]

    def happens(seq, kind, subject, text, bound, version=-1):
        (folder / "config.toml").write_text(f"[buffer]\nmax_staleness = {bound}\n")
        write_rows(folder / EVENTS_FILE, RunEvent(seq=seq, time_s=0.0, kind=kind, subject=subject, text=text, version=version))

    assert await told() == ([[0, 2]], 0)
    happens(1, "change", "me", "from step 5 on: learner.learning_rate from 0.1 to 0.2", 2)
    assert await told() == ([[0, 2]], 1)
    happens(2, "change", "me", "from step 174 on: learner.learning_rate from 0.2 to 0.3, buffer.max_staleness from 2 to 1", 1)
    assert await told() == ([[0, 2], [174, 1]], 2)
    happens(3, "restart", "learner", "", 1, 180)
    happens(4, "restart", "run", "resumed at step 190 from step-000190", 3, 190)  # with `--set buffer.max_staleness=3`
    assert await told() == ([[0, 2], [174, 1], [190, 3]], 4)
    happens(5, "change", "me", "from step 200 on: buffer.max_staleness from 3 to 0, num_steps from 300 to 250", 0)
    assert await told() == ([[0, 2], [174, 1], [190, 3], [200, 0]], 5)


MODEL, SUMS = ("step-000001/model.safetensors", b"wrong"), ("step-000001/SHA256SUMS", b"0" * 64 + b"  model.safetensors\n")


@pytest.mark.parametrize(("sent", "said"), [
    ([MODEL, SUMS], r"damaged \(model.safetensors\)"), ([MODEL], r"damaged \(model.safetensors\)"),
    ([MODEL, ("../outside", b"wrong")], "'../outside' is no file of a checkpoint"),
    ([MODEL, ("/tmp/outside", b"wrong")], "is no file of a checkpoint"),
    ([MODEL, ("step-000001/link", None)], "is no file of a checkpoint"), ([], "came damaged"),
])  # fmt: skip
async def test_a_checkpoint_that_comes_damaged_or_has_odd_files_is_refused(tmp_path, sent, said):
    async def answer(request):
        return json_response({}) if request.path == "/v1/machine" else web.Response(body=archive.getvalue())

    app, archive = web.Application(), io.BytesIO()
    app.router.add_get("/{any:.*}", answer)
    with tarfile.open(fileobj=archive, mode="w") as opened:
        for name, content in sent:
            entry = tarfile.TarInfo(name)
            if content is None:
                entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
            entry.size = len(content or b"")
            opened.addfile(entry, io.BytesIO(content or b""))
    async with TestServer(app) as there, Server(str(there.make_url("")), "token") as server:
        with pytest.raises(RunError, match=said):
            await server.download("r", tmp_path / "into")
    assert not list((tmp_path / "into").iterdir())


async def test_what_is_said_of_the_interface_is_the_table_and_what_its_routes_read(service, tokens):
    """Statuses are compared by the fixture `client`, in every test that has it."""
    app, read = service.app(), set()

    class Noted(dict):
        def get(self, name, default=None):
            read.add(name)
            return default

        def __contains__(self, name):
            read.add(name)
            return False

    @web.middleware
    async def note(request, handler):
        request._cache["query"] = Noted()
        return await handler(request)

    app.middlewares.append(note)
    async with TestClient(TestServer(app)) as client:
        said = await (await client.get("/openapi.json")).json()
        for route in service.routes():
            (await client.request(route.method, filled(route.path), headers=bearer(tokens["admin"]))).close()
            operation = said["paths"][route.path.replace(":.*", "")][route.method.lower()]
            named = {place: {one["name"] for one in operation["parameters"] if one["in"] == place} for place in ("query", "path")}
            assert named == {"query": read, "path": set(re.findall(r"{(\w+)", route.path))}, route
            read.clear()
    told = {(method.upper(), path) for path, methods in said["paths"].items() for method in methods}
    assert told == {(route.method, route.path.replace(":.*", "")) for route in service.routes()}
    references = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(said)))
    assert {"Submission", "ConfigChange", "Refusal", "Fault"} <= references
    assert references <= set(said["components"]["schemas"])
    assert json.dumps(said).count("$ref") == json.dumps(said).count('"$ref": "#/components/schemas/')
    assert list(said["paths"]["/v1/runs"]["post"]["responses"]) == ["200", "201", "4XX", "5XX"]


async def test_runs_are_listed_by_state_project_and_tag_and_page_by_page(service, client, tokens):
    for number, (name, state, project) in enumerate((("a", "live", "p"), ("b", "ended", "p"), ("c", "queued", "q")), 2):
        service.records.put_run(RunRecord(id=name, number=number, state=state, project=project, tags=(name, "t")))

    async def listed(query):
        answer = await (await client.get(f"/v1/runs?{query}", headers=bearer(tokens["viewer"]))).json()
        return [run["id"] for run in answer["runs"]], answer["next"]

    for query, names, behind in (
        ("", ["c", "b", "a", "r"], None), ("state=live", ["a"], None), ("state=ended", ["b", "r"], None),
        ("project=p", ["b", "a"], None), ("project=p&state=ended", ["b"], None), ("tag=t", ["c", "b", "a"], None),
        ("tag=c&project=p", [], None), ("limit=2", ["c", "b"], 3), ("limit=2&before=3", ["a", "r"], None),
        ("before=3", ["a", "r"], None), ("project=p&limit=1", ["b"], 3), ("project=p&limit=1&before=3", ["a"], None),
    ):  # fmt: skip
        assert await listed(query) == (names, behind), query
    for query in ("limit=0", "limit=1001", "limit=x", "before=x", "state=no", "state="):
        answer = await client.get(f"/v1/runs?{query}", headers=bearer(tokens["viewer"]))
        assert answer.status == 400, query
        said = {"state": "is one of queued, starting, live, ended, got"}.get(query.partition("=")[0], "must be")
        assert f"{query.partition('=')[0]} {said}" in (await answer.json())["error"]


async def test_the_page_lists_the_newest_runs_all_that_have_not_ended_and_the_number_of_all(service, client, tokens, monkeypatch):
    monkeypatch.setattr("asyncrl.serve.pages.MOST_RUNS", 2)
    for number, state in enumerate(("live", "ended", "ended", "ended"), 2):
        service.records.put_run(RunRecord(id=f"r{number}", number=number, state=state))
    service.draining = True
    told = json.loads(await (await client.get("/v1/live", headers=bearer(tokens["viewer"]))).text())
    assert ([run["id"] for run in told["runs"]], told["total"]) == (["r5", "r4", "r2"], 5)


async def test_a_run_whose_folder_is_gone_is_compared_without_its_settings(service, client, tokens):
    for name in ("a", "b", "gone"):
        service.records.put_run(RunRecord(id=name, number=2, state="ended"))
        config = resolve_config("quickstart", overrides={"name": name})
        (service.records.run_folder(name) / "config.toml").write_text(dump_config(config))
    shutil.rmtree(service.records.run_folder("gone"))
    told = await (await client.get("/v1/compare?runs=a,b,gone", headers=bearer(tokens["viewer"]))).json()
    assert [row["config"] for row in told["runs"]] == [{"name": "a"}, {"name": "b"}, {}]
    assert (await client.get("/v1/runs/gone/alarms", headers=bearer(tokens["viewer"]))).status == 200


async def test_a_daemon_that_cannot_write_its_records_is_not_ready(service, client):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        answer = await client.get("/readyz")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (answer.status, (await answer.json())["reason"]) == (503, "the daemon cannot write its records: disk I/O error")
    service.clock = VirtualClock(service.clock.now() + PROBE_S)
    assert (await client.get("/readyz")).status == 200


async def test_a_program_resumes_and_forks_runs_and_is_told_of_a_wrong_token(service, client, tokens):
    records, url = service.records, f"http://127.0.0.1:{client.port}"
    records.put_run(RunRecord(id="r", number=1, state="ended", version=3, num_steps=3, reason=GOAL_REACHED))
    (records.run_folder("r") / "config.toml").write_text(dump_config(resolve_config("quickstart")))
    async with Server(url, token=tokens["submitter"]) as server:
        with pytest.raises(RunError, match="has done its 3 steps; give num_steps"):
            await server.resume("r")
        resumed = await server.resume("r", num_steps=5)
        assert (resumed.state, resumed.num_steps) == ("queued", 5)
        records.put_run(RunRecord(id="r", number=1, state="ended", version=3, num_steps=5))
        async with server.connect("r") as run:
            assert (await run.resume()).phase == "queued"
        with pytest.raises(RunError, match="r has no checkpoint 'x'"):
            await server.fork("r", "f", checkpoint="x", project="p", tags=["t"], priority=2)
    for token, said in (("wrong", "is no token of the daemon"), (" ", "is no token of the daemon")):
        with pytest.raises(LaunchError, match=rf"^{url} refuses: this {said}: .* POST /v1/tokens"):
            await Server(url, token=token).__aenter__()


async def test_a_queued_run_has_its_rules_of_alarms_before_it_has_started(service, client, tokens):
    body = {"name": "one", "set": {"observe.alarms": {"off_policy.ess": "pause"}}}
    assert (await client.post("/v1/runs", headers=bearer(tokens["submitter"]), json=body)).status == 201
    answer = await client.get("/v1/runs/one/alarms", headers=bearer(tokens["viewer"]))
    assert answer.status == 200
    said = await answer.json()
    actions = {rule["name"]: rule["action"] for rule in said["rules"]}
    assert (said["alarms"], actions.pop("off_policy.ess"), set(actions.values())) == ([], "pause", {"warn"})


async def test_of_tokens_the_daemon_keeps_their_digests_alone(service, client, tokens, tmp_path):
    made = await client.post("/v1/tokens", headers=bearer(tokens["admin"]), json={"name": "new", "role": "viewer"})
    new = (await made.json())["token"]
    assert (await client.post("/v1/login", json={"token": new})).status == 200
    assert (await client.post("/v1/runs", headers=bearer(tokens["submitter"]), json={"name": "one"})).status == 201
    files = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    kept = b"".join(content for name, content in files.items() if name.startswith(DATABASE))
    for token in (*tokens.values(), new):
        assert hashlib.sha256(token.encode()).hexdigest().encode() in kept
        assert [name for name, content in files.items() if token.encode() in content] == []


UNITS = ("s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d")
LONG_UNITS = "minutes|hours|days|weeks|bits|(pico|nano|micro|milli|centi|kilo|kibi|mega|mebi|giga|gibi|tera|tebi)(seconds|bytes)"


def complaints(text):
    """What `promtool check metrics` says of families (client_golang, promlint), each with its name."""
    kinds, said = dict(re.findall("^# TYPE (\\S+) (.*)$", text, re.MULTILINE)), []
    helped = [name for name, _ in re.findall("^# HELP (\\S+) (\\S.*)$", text, re.MULTILINE)]
    for name, kind in kinds.items():
        wrong = {
            "no help text": helped.count(name) != 1,
            "counters end in _total, others do not": (kind == "counter") != name.endswith("_total"),
            "_count, _sum and _bucket are of histograms": name.endswith(("_count", "_sum", "_bucket")),
            "camelCase": re.search("[a-z][A-Z]", name),
            "its type in the name": re.search("_(gauge|counter|histogram|summary)(_|$)", name),
            "no base unit": any(re.fullmatch(LONG_UNITS, word) for word in name.split("_")),
            "an abbreviated unit": any(f"_{unit}_" in f"{name}_" for unit in UNITS),
        }
        said += [(name, complaint) for complaint, is_so in wrong.items() if is_so]
    return said


async def test_metrics_can_be_read_by_prometheus(service, client, tokens):
    values = {"reward/mean": 0.5, "reward_mean": 2.0, 'a"b\nc{}': 1.0, "staleness/max": 1e300}
    torn = '{"metrics": {"reward/mean": null}}\n{"metrics": {"x": "y"}}\n\xff{'
    evaluated = '{"step": 5, "time_s": 1.0, "metrics": {"eval/accuracy": 0.25}}'
    before = {"reward/mean": 0.0, "staleness/max": 7.0, "staleness/histogram/7": 1.0, "eval/reward_mean": 0.125}
    for number, (run, last) in enumerate((("live", evaluated), ("torn", torn))):
        service.records.put_run(RunRecord(id=run, number=2 + number, state="live", project='a"b\\c', version=7))
        (service.records.run_folder(run) / "metrics.jsonl").write_text(
            "".join(json.dumps({"step": 6, "time_s": 1.0, "metrics": row}) + "\n" for row in (before, values)) + last + "\n"
        )
    service.records.put_run(RunRecord(id="wide", number=4, state="live", project="\x00\r\n<b>"))
    many = {f"m{number}": 0.0 for number in range(MOST_SERIES + 7)}
    write_rows(service.records.run_folder("wide") / "metrics.jsonl", MetricsRow(6, 1.0, many))
    service.records.put_run(RunRecord(id="all", number=5, state="live"))
    every = {name.replace("*", "x"): 1.0 for name in METRICS}
    assert len(every) < MOST_SERIES
    write_rows(service.records.run_folder("all") / "metrics.jsonl", MetricsRow(6, 1.0, every))
    write_rows(
        service.records.run_folder("wide") / EVAL_FILE, *(EvalReport(version=v, num_samples=8, accuracy=v / 8) for v in (1, 2))
    )
    text = await (await client.get("/metrics", headers=bearer(tokens["viewer"]))).text()
    assert 'asyncrl_eval_accuracy{run="wide",project="\x00\r\\n<b>"} 0.25' in text  # metrics.jsonl has it no more
    for name, value in (("reward_mean", 0.5), ("eval_accuracy", 0.25), ("eval_reward_mean", 0.125), ("staleness_max", 1e300)):
        assert f'asyncrl_{name}{{run="live",project="a\\"b\\\\c"}} {value}' in text
    assert not re.search('asyncrl_staleness_histogram{run="live"', text)  # of a step that is over
    assert 'asyncrl_serve_runs{state="live"} 4' in text
    assert 'asyncrl_serve_metrics_left_out{run="wide",project="\x00\r\\n<b>"} 9.0' in text
    families = [line.split()[2] for line in text.split("\n") if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    left = {complaint for name, complaint in complaints(text) if name != "asyncrl_staleness_histogram"}
    assert left == {"an abbreviated unit"}  # names are those of metrics.jsonl
    counters = set(re.findall(r"^# TYPE asyncrl_(\S+) counter$", text, re.MULTILINE))
    assert counters == {f"{name}_total" for name in ("serve_requests", "dropped", "failed", "deaths", "refused_samples")}
    assert 'asyncrl_dropped_total{run="all",project="",key="x"} 1.0' in text
    label = r'[a-z]+="(?:[^"\\\n]|\\[\\"n])*"'
    sample = re.compile(rf"([a-zA-Z_][a-zA-Z0-9_]*)(\{{{label}(?:,{label})*\}})? (?:[-+0-9.e]+|NaN|[+-]Inf)")
    series = [sample.fullmatch(line) for line in text.removesuffix("\n").split("\n") if not line.startswith("#")]
    assert all(series)
    assert len(series) == len({(one[1], one[2]) for one in series})
    assert {one[1] for one in series} <= set(families)


async def test_a_removed_token_is_refused_and_what_it_reads_ends_with_it_and_what_others_read_goes_on(service, client, tokens):
    service.records.put_run(RunRecord(id="live", number=2, state="live"))
    session = await client.post("/v1/login", json={"token": tokens["viewer"]})
    cookie = {"Cookie": f"{session.cookies.output(header='').split(';')[0].strip()}"}
    paths = ("/v1/events", "/v1/live", "/v1/runs/live/events", "/v1/runs/live/steps", "/v1/runs/live/live")
    cut = [await client.get(path, headers=headers) for path in paths for headers in (bearer(tokens["viewer"]), cookie)]
    others = await client.get("/v1/events", headers=bearer(tokens["operator"]))
    assert {answer.status for answer in [*cut, others]} == {200}
    headers = bearer(tokens["admin"])
    assert (await client.delete("/v1/tokens/viewer", headers=headers)).status == 200
    async with asyncio.timeout(100):
        for answer in cut:
            with pytest.raises(ClientPayloadError):
                await answer.read()
        assert b"viewer is removed" in await others.content.readline()
    assert (await client.get("/v1/runs", headers=bearer(tokens["viewer"]))).status == 401
    assert (await client.delete("/v1/tokens/admin", headers=headers)).status == 409
    made = await (await client.post("/v1/tokens", headers=headers, json={"name": "new", "role": "viewer"})).json()
    assert (await client.get("/v1/runs", headers=bearer(made["token"]))).status == 200
    assert (await client.post("/v1/tokens", headers=headers, json={"name": "x", "role": "king"})).status == 400
    for name in ("{x}", "a/b", "%41", "a b"):  # whatever it is called, it can be removed
        assert (await client.post("/v1/tokens", headers=headers, json={"name": name, "role": "viewer"})).status == 201
        gone = await client.delete(URL(f"/v1/tokens/{quote(name, safe='')}", encoded=True), headers=headers)
        assert gone.status == 200, name


async def test_a_token_has_so_many_requests_at_once_and_others_are_answered(service, client, tokens, monkeypatch):
    monkeypatch.setattr("asyncrl.serve.routes.MOST_AT_ONCE", 3)
    open_ = [await client.get("/v1/events", headers=bearer(tokens["viewer"])) for _ in range(3)]
    assert (await client.get("/v1/events", headers=bearer(tokens["viewer"]))).status == 429
    assert (await client.get("/v1/runs/r/evaluations", headers=bearer(tokens["operator"]))).status == 200
    open_.pop().close()
    async with asyncio.timeout(100):
        while (await client.get("/v1/runs/r/evaluations", headers=bearer(tokens["viewer"]))).status == 429:
            await asyncio.sleep(0.01)


async def test_values_that_no_config_can_hold_are_no_change(service, client, tokens):
    (service.records.run_folder("r") / "config.toml").write_text(dump_config(resolve_config("quickstart")))
    for value, status in ((msgspec.msgpack.Ext(5, b"x"), 400), ({None: 1}, 400), (b"\xff", 422), (float("nan"), 422)):
        body = msgspec.msgpack.encode({"values": {"learner.learning_rate": value}})
        answer = await client.post("/v1/runs/r/change", headers=bearer(tokens["operator"]), data=body)
        assert answer.status == status, value


async def test_ledgers_that_take_long_hold_up_nothing_else(service, client, tokens):
    folder = service.records.run_folder("r")
    (folder / "logs").mkdir()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    with contextlib.closing(sqlite3.connect(folder / "ledger.sqlite", isolation_level=None)) as ledger:
        for held in ("PRAGMA journal_mode = WAL", "PRAGMA locking_mode = EXCLUSIVE", "CREATE TABLE t (x)"):
            ledger.execute(held)  # whoever reads it waits
        headers = bearer(tokens["operator"])
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(client.get("/v1/runs/r/ledger", headers=headers)) for _ in range(3)]
            for _ in range(3):
                async with asyncio.timeout(20):
                    assert (await client.get("/v1/runs/r/logs", headers=headers)).status == 200
            assert not any(one.done() for one in asking)
            ledger.close()
    assert [one.result().status for one in asking] == [503, 503, 503]  # it is no ledger


async def test_a_page_has_a_cookie_that_is_no_token_and_names_its_origin(service, client, tokens):
    origin = {"Origin": f"http://127.0.0.1:{client.port}"}
    assert (await client.post("/v1/login", headers=origin, json={"token": "wrong"})).status == 401
    assert (await (await client.get("/v1/session")).json())["name"] == ""
    (cookie,) = (await client.post("/v1/login", headers=origin, json={"token": tokens["operator"]})).cookies.values()
    assert (cookie["httponly"], cookie["samesite"], cookie.key) == (True, "Strict", f"asyncrl-{client.port}")
    assert not cookie["secure"]
    assert (await client.get("/v1/runs")).status == 200
    assert (await (await client.get("/v1/session")).json())["role"] == "operator"
    assert (await client.get("/v1/tokens")).status == 403
    assert (await client.post("/v1/runs/r/stop")).status == 401  # whose page it comes from is not said
    assert (await client.post("/v1/runs/r/stop", headers=origin)).status == 409
    assert (await client.get("/v1/runs", headers={"Sec-Fetch-Site": "same-site"})).status == 401  # a page of another port
    assert (await client.get("/v1/runs", headers=bearer(cookie.value))).status == 401
    ends, _, signature = cookie.value.partition(".")
    client.session.cookie_jar.clear()
    for forged in ("", "x", f"{int(ends) + 1}.{signature}", f"{ends}.", f"{ends}.\u2603", "9" * 5000, f"\u0663.{signature}"):
        answer = await client.get("/v1/runs", headers={"Cookie": f"{cookie.key}={forged}"})
        assert answer.status == 401, forged
    good = {"Cookie": f"{cookie.key}={cookie.value}"}
    assert (await client.get("/v1/runs", headers=good)).status == 200
    service.records.forget_token("operator")
    assert (await client.get("/v1/runs", headers=good)).status == 401


async def test_behind_a_proxy_that_does_tls_the_cookie_is_secure(service, tokens):
    service.behind_proxy = True
    async with TestClient(TestServer(service.app())) as client:
        (cookie,) = (await client.post("/v1/login", json={"token": tokens["viewer"]})).cookies.values()
    assert cookie["secure"]


def test_a_page_is_logged_out_after_twelve_hours(service, tokens):
    clock = VirtualClock()
    guard = Guard(service.records, {"127.0.0.1"}, clock, b"key")
    cookie = guard.cookie(service.records.tokens["viewer"])
    request = make_mocked_request("GET", "/", headers={"Host": "127.0.0.1:7717", "Cookie": f"asyncrl-7717={cookie}"})
    assert guard.check(request, "viewer").name == "viewer"
    assert Guard(service.records, {"127.0.0.1"}, clock, b"key").check(request, "viewer")  # the next daemon, with the same key
    with pytest.raises(ForbiddenError):
        Guard(service.records, {"127.0.0.1"}, clock).check(request, "viewer")
    clock.advance(SESSION_S + 1)
    with pytest.raises(ForbiddenError):
        guard.check(request, "viewer")


async def test_series_are_those_of_the_file_where_it_is_torn_and_where_steps_are_repeated(service, client, tokens):
    line = b'{"step":%d,"version":1,"time_s":1.0,"reward_mean":%s,"metrics":{"ratio/ess":%s}}\n'
    lines = [line % (0, b"0.1", b"0.5"), line % (1, b"0.2", b"0.6"), b'{"st\n', line % (1, b"0.30000000000000004", b"1e-7")]
    whole = b"".join(lines)
    (service.records.run_folder("r") / "steps.jsonl").write_bytes(whole + lines[0][:20])
    answer = await client.get("/v1/runs/r/series?names=reward_mean,ratio/ess,__class__", headers=bearer(tokens["viewer"]))
    said = await answer.json()
    assert said["steps"] == [0, 1]
    assert said["columns"] == {"reward_mean": [0.1, 0.30000000000000004], "ratio/ess": [0.5, 1e-7], "__class__": [None, None]}
    assert (said["newest"]["reward_mean"], said["offset"]) == (0.30000000000000004, len(whole))


async def test_runs_are_compared_by_their_newest_steps_and_a_pause_does_not_make_them_slow(service, client, tokens):
    folder = service.records.run_folder("r")
    (folder / "config.toml").write_text(dump_config(resolve_config("quickstart")))
    ends = [StepReport(step=step, version=step + 1, time_s=float(step), reward_mean=step % 2) for step in (0, *range(40, 101))]
    again = StepReport(step=100, version=101, time_s=200.0, reward_mean=0.0)
    rows = [msgspec.json.encode(row) for row in (*ends, again)]
    (folder / STEPS_FILE).write_bytes(b"\n".join([rows[0], b'{"of": "another version"}', *rows[1:], b""]))
    (row,) = (await (await client.get("/v1/compare?runs=r", headers=bearer(tokens["viewer"]))).json())["runs"]
    assert (row["reward"], row["steps_per_s"]) == (0.5, 1.0)


async def test_arms_are_compared_over_runs_that_have_ended_and_by_what_differs(service, client, tokens):
    ends = [("live", ""), ("ended", "failed"), ("ended", "stopped"), ("ended", "done"), ("ended", "done"), ("ended", "done")]
    for number, (state, outcome) in enumerate(ends):
        eta, seed, name = int(number > 3), number % 4, f"run-{number}"
        service.records.put_run(RunRecord(id=name, number=number + 2, state=state, outcome=outcome, accuracy_after=0.5))
        overrides = {"seed": seed, "buffer.max_staleness": eta}
        folder = service.records.run_folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(dump_config(resolve_config("quickstart", overrides=overrides)))
        write_rows(folder / STEPS_FILE, StepReport(step=0, version=1, time_s=1.0, reward_mean=0.5))
    runs = [f"run-{number}" for number in range(len(ends))]
    async with Server(f"http://127.0.0.1:{client.port}", token=tokens["viewer"]) as server:
        for metric, nums in (("accuracy_after", [1, 2]), ("reward", [3, 2])):
            told = await server.compare(runs, by="buffer.max_staleness", metric=metric)
            assert [(each.arm, each.num) for each in told] == [("0", nums[0]), ("1", nums[1])]
        assert (await server.show(await server.show(runs[0]))).id == runs[0]
        with pytest.raises(ConfigError, match=r"metric must be one of accuracy_before, .*, got 'nope'"):
            await server.compare(runs, by="seed", metric="nope")
        with pytest.raises(ConfigError, match=r"these runs do not differ in 'buffer\.max_stale'"):
            await server.compare(runs, by="buffer.max_stale", metric="reward")


async def test_a_stream_goes_on_behind_lines_that_make_no_sense(service, client, tokens):
    odd = (b"x" * (2 * MOST_READ_BYTES), b'{"seq":"x"}', b'{"seq":[2]}', b"[]", b"\xff", b'{"seq":1e999}', b"[" * 9000)
    lines = [b'{"seq":1}', *odd, b'{"seq":2}', b'{"seq":3']
    (service.records.run_folder("r") / "events.jsonl").write_bytes(b"\n".join(lines))
    answer = await client.get("/v1/runs/r/events", headers=bearer(tokens["viewer"]))
    assert (await answer.text()).splitlines() == ['{"seq":1}', '{"seq":2}']


async def test_a_reader_that_has_gone_ends_its_stream():
    gone = Mock(write_headers=AsyncMock(side_effect=ConnectionResetError))

    async def rows():
        return [(1, "event", b"{}")]

    await asyncio.wait_for(stream(make_mocked_request("GET", "/v1/events", writer=gone), rows, lambda: False), 100)


async def test_samples_are_for_operators_unless_the_daemon_shows_them(service, client, tokens):
    assert (await client.get("/v1/runs/r/samples", headers=bearer(tokens["viewer"]))).status == 403
    service.show_samples = True
    async with TestClient(TestServer(service.app())) as shown:
        answer = await shown.get("/v1/runs/r/samples", headers=bearer(tokens["viewer"]))
        assert await answer.json() == {"steps": [], "rows": []}


async def test_what_is_only_looked_at_takes_no_orders(service, tokens):
    service.read_only = True
    assert {route.path for route in service.routes() if route.method != "GET"} == {"/v1/login", "/v1/logout"}
