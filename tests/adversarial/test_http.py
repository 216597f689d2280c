"""The run's HTTP interface against requests that are wrong: each is answered, none reaches the run, memory stays bounded."""

import asyncio
import io
import os
import resource
import socket
import zlib
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest

from asyncrl.client import connect
from asyncrl.control.api import MOST_BODY_BYTES, serve_api
from asyncrl.control.launch.processes import is_live
from asyncrl.errors import LaunchError, RunError, RunLostError
from asyncrl.schema.status import ApiEndpoint, RunStatus


class Control:
    """A run that notes what reaches it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name):
        async def note(*_):
            self.asked.append(name)

        return note

    def status(self) -> RunStatus:
        return RunStatus(name="r", run_folder="r", phase="running")

    async def rows_of(self, file: str, number: str, after: int):
        self.asked.append(f"{file} behind {after}")
        return
        yield


@pytest.fixture
async def endpoint(tmp_path, request):
    """Where a run answers, with limits of its interface; nothing that a test asks may reach the run."""
    control = Control()
    async with serve_api(control, tmp_path, **getattr(request, "param", {})) as one:
        yield one
    assert control.asked == []


@pytest.fixture
async def session(endpoint):
    async with aiohttp.ClientSession(endpoint.url, headers={"Authorization": f"Bearer {endpoint.token}"}) as one:
        yield one


async def said(endpoint, request: bytes, timeout_s: float = 30.0) -> bytes:
    """What the server says to these bytes, up to the end of the connection."""
    parts = urlsplit(endpoint.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(request)
        await writer.drain()
        async with asyncio.timeout(timeout_s):
            return await reader.read()
    finally:
        writer.close()


def raw(endpoint, line: str, *headers: bytes, body: bytes = b"") -> bytes:
    lines = [line.encode() + b" HTTP/1.1", b"Host: here", b"Connection: close", *headers]
    if body:
        lines.append(b"Content-Length: " + str(len(body)).encode())
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def bearer(endpoint) -> bytes:
    return f"Authorization: Bearer {endpoint.token}".encode()


TOKENS = [
    b"", b"Bearer", b"Bearer \xff\xfe", b"\x80\x81\x82", b"Bearer \xf0\x9f\x98\x80", b"Basic QQ==", b"Bearer " + b"a" * 4000,
]  # fmt: skip
FIRST = ["abc", "1.5", "", "0x10", "%00", "nan", "1e3"]
ROUTES = ["GET /", "GET /../api.json", "POST /status", "GET /stop", "DELETE /steps", "POST /nothing"]
BODIES = [b"", b"\xc1", b"abc", msgspec.msgpack.encode({"step": "x"}), msgspec.msgpack.encode([1])]
WRONG = [
    *(("POST /stop", token, b"", {b"401"}) for token in TOKENS),
    *((f"GET /steps?first={first}", None, b"", {b"400"}) for first in FIRST),
    *((line, None, b"", {b"404", b"405"}) for line in ROUTES),
    *(("POST /trained", None, body, {b"400"}) for body in BODIES),
]


@pytest.mark.parametrize(("line", "token", "body", "statuses"), WRONG, ids=range(len(WRONG)))
async def test_a_wrong_token_step_route_or_body_is_answered_and_does_nothing(endpoint, line, token, body, statuses):
    given = bearer(endpoint) if token is None else b"Authorization: " + token
    answer = await said(endpoint, raw(endpoint, line, given, body=body))
    assert answer[9:12] in statuses


@pytest.mark.parametrize("packing", [{}, {"Content-Encoding": "gzip"}, {"Content-Encoding": "deflate"}])
async def test_a_body_that_cannot_be_unpacked_or_is_nested_without_end_is_400(session, packing):
    body = b"\x81\xa6values\x81\xa1a" + b"\x91" * 100_000 + b"\x01"
    async with session.post("/change", data=body, headers=packing) as answer:
        assert answer.status == 400


@pytest.mark.parametrize("packed", [False, True])
async def test_a_body_over_a_mebibyte_is_413_packed_or_not(session, packed):
    body = msgspec.msgpack.encode({"step": 1, "metrics": {"x" * (MOST_BODY_BYTES + 1): 1.0}})
    headers = {"Content-Encoding": "deflate"} if packed else {}
    sent = io.BytesIO(zlib.compress(body) if packed else body)
    async with session.post("/trained", data=sent, headers=headers) as answer:
        assert answer.status == 413


async def test_a_packed_body_that_unpacks_to_a_quarter_of_a_gibibyte_is_not_unpacked(session):
    packer, bomb = zlib.compressobj(9), bytearray()
    for _ in range(256):
        bomb += packer.compress(bytes(1 << 20))
    bomb += packer.flush()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with session.post("/trained", data=io.BytesIO(bomb), headers={"Content-Encoding": "deflate"}) as answer:
        assert answer.status == 413
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10, "in KiB"


@pytest.mark.parametrize("endpoint", [{"read_timeout_s": 0.2}], indirect=True)
async def test_a_body_that_never_comes_is_given_up_and_a_head_too_on_a_new_connection_and_on_a_used_one(endpoint):
    request = raw(endpoint, "POST /trained", bearer(endpoint), b"Content-Length: 100") + b"\x81"
    assert (await said(endpoint, request)).startswith(b"HTTP/1.1 408 ")
    assert await said(endpoint, b"GET /status HTTP/1.1\r\nHost: a\r\nX-A: ") == b""
    begun = b"GET /nothing HTTP/1.1\r\nHost: a\r\n\r\nGET /status HTT"
    assert (await said(endpoint, begun)).startswith(b"HTTP/1.1 401 ")


async def test_bytes_that_are_no_http_leave_the_server_as_it_is(endpoint):
    parts = urlsplit(endpoint.url)
    for junk in (b"\x00" * 100, b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", b"\x16\x03\x01"):
        with socket.create_connection((parts.hostname, parts.port), timeout=5) as line:
            line.sendall(junk)
    answer = await said(endpoint, raw(endpoint, "GET /status", bearer(endpoint)))
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_an_endpoint_that_cannot_be_read_does_not_mean_that_its_controller_is_gone(tmp_path):
    """As where no descriptor is free: a daemon that took it so would end what the run still uses."""
    assert not is_live(tmp_path)
    (tmp_path / "api.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        is_live(tmp_path)


async def test_a_controller_that_is_gone_in_the_middle_of_an_answer_is_told_in_words(tmp_path):
    """As one that was killed; the connection's own error says nothing to a user."""
    status = msgspec.msgpack.encode(RunStatus(name="r", run_folder="r", phase="running"))

    async def answer(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/status" in head:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(status), status))
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n{half a step")
        await writer.drain()
        writer.close()

    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "controller.log").write_text("2026-01-01 12:00:00 CRITICAL controller asyncrl | the disk is gone\n")
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        endpoint = ApiEndpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "token", os.getpid())
        (tmp_path / "api.json").write_bytes(msgspec.json.encode(endpoint))
        async with connect(tmp_path) as run:
            with pytest.raises(RunLostError, match=r"is lost, its controller has ended: the disk is gone; `asyncrl resume"):
                await anext(run.steps())
            with pytest.raises(RunLostError, match="the disk is gone"):
                await run.evaluations()


async def test_a_daemon_that_ends_before_its_run_and_what_it_refuses_are_told_in_words():
    status = msgspec.msgpack.encode(RunStatus(name="r", run_folder="r", phase="running"))
    refusal = msgspec.json.encode({"error": "a bearer token is needed"})
    answers = {b"/status": (b"200 OK", status), b"/evaluations": (b"401 Unauthorized", refusal)}

    async def answer(reader, writer):
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].partition(b"?")[0]
        line, body = answers.get(path, (b"200 OK", b""))  # a stream that has ended
        writer.write(b"HTTP/1.1 %b\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (line, len(body), body))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with connect(url, "token") as run:
            for stream in (run.steps(), run.events()):
                with pytest.raises(RunLostError, match=rf"the daemon at {url} ends, and its run is running"):
                    await anext(stream)
            with pytest.raises(RunError, match=r"^a bearer token is needed$"):
                await run.evaluations()
        answers[b"/status"] = answers[b"/evaluations"]
        with pytest.raises(LaunchError, match=r"refuses \(a bearer token is needed"):
            await connect(url, "old").__aenter__()
