"""One vLLM server over HTTP: the session, the bearer token, bounded retries, and what an answer other than 200 means.

Owns the one ClientSession. A server that cannot be reached is `ServerLost`, one that says no is `ServerRefused`: the engine ends
all streams for the first and one request for the second.

Called by generate/vllm_server_engine.py and generate/vllm_server_checks.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import aiohttp
import msgspec

from asyncrl.clock import Clock
from asyncrl.errors import GenerationError
from asyncrl.generate.vllm_server_wire import ErrorText, EventSplitter

Answer = TypeVar("Answer")

NUM_ATTEMPTS = 3
FIRST_DELAY_S = 0.2
"""Between the first attempt and the second; doubled each time."""
_END_OF_STREAM = b"[DONE]"
_UNREACHABLE = (aiohttp.ClientError, TimeoutError)


class ServerLost(GenerationError):  # noqa: N818 - a state of the server, told to every stream
    """The server cannot be reached."""


class ServerRefused(GenerationError):  # noqa: N818 - an answer
    """The server answered that it will not, or that it failed."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerClient:
    """Requests to one server."""

    def __init__(self, url: str, api_key: str, timeout_s: float, clock: Clock) -> None:
        """Note where the server is; opens nothing.

        Args:
            url: `http://host:port`.
            api_key: Sent as bearer token; empty: none.
            timeout_s: For an answer other than a stream's.
            clock: For back-off.
        """
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Open the session, on the running event loop."""
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=min(10.0, self._timeout_s)),
        )

    async def close(self) -> None:
        """Close every connection. Safe to repeat."""
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> bytes:
        """Return the answer; see `post`."""
        return await self._ask("GET", path, None, params)

    async def post(self, path: str, body: msgspec.Struct | None = None, params: Mapping[str, str] | None = None) -> bytes:
        """Return the answer to something that may be said twice: a lost connection is tried again, a few times.

        Raises:
            ServerLost: It cannot be reached.
            ServerRefused: It answered with another status than 200.
        """
        return await self._ask("POST", path, body, params)

    @asynccontextmanager
    async def stream(self, path: str, body: msgspec.Struct) -> AsyncIterator[AsyncIterator[bytes]]:
        """Post once and yield the events' data; leaving early closes the connection, which makes the server abort.

        Raises:
            ServerLost: The connection could not be made or broke.
            ServerRefused: It answered with another status than 200.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=min(10.0, self._timeout_s))
        try:
            async with self._opened.post(
                self.url + path, data=msgspec.json.encode(body), headers=_JSON, timeout=timeout
            ) as response:
                try:
                    await self._check(response, path)
                    yield _events(response)
                finally:
                    response.close()
        except _UNREACHABLE as error:
            raise self._lost(error) from error

    async def _ask(self, method: str, path: str, body: msgspec.Struct | None, params: Mapping[str, str] | None) -> bytes:
        for attempt in range(NUM_ATTEMPTS):
            try:
                return await self._ask_once(method, path, body, params)
            except _UNREACHABLE as error:
                if attempt + 1 == NUM_ATTEMPTS or isinstance(error, TimeoutError):
                    raise self._lost(error) from error
            await self._clock.sleep(FIRST_DELAY_S * 2**attempt)
        raise AssertionError("not reached")

    async def _ask_once(self, method: str, path: str, body: msgspec.Struct | None, params: Mapping[str, str] | None) -> bytes:
        encoded = msgspec.json.encode(body) if body is not None else None
        headers = _JSON if body is not None else None
        async with self._opened.request(method, self.url + path, data=encoded, params=params, headers=headers) as response:
            await self._check(response, path)
            return await response.read()

    @property
    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise GenerationError("the engine is not started")
        return self._session

    async def _check(self, response: aiohttp.ClientResponse, path: str) -> None:
        if response.status != 200:
            said = _error_text(await response.read())
            raise ServerRefused(f"{self.url}{path} answered {response.status}: {said}", response.status)

    def _lost(self, error: BaseException) -> ServerLost:
        why = str(error) or type(error).__name__
        return ServerLost(
            f"the vLLM server at {self.url} (generate.engine.url) cannot be reached: {why}. See that it runs and that this "
            "machine can reach it; once it is healthy, a restarted generator gives it the newest weights"
        )


_JSON = {"Content-Type": "application/json"}


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    splitter = EventSplitter()
    async for piece in response.content.iter_any():
        for event in splitter.feed(piece):
            if event == _END_OF_STREAM:
                return
            yield event


class _ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorText | str = ""
    message: str = ""


def _error_text(raw: bytes) -> str:
    """Return what a server's error body says, in any of its shapes."""
    try:
        body = msgspec.json.decode(raw, type=_ErrorBody)
    except msgspec.MsgspecError:
        return raw[:300].decode(errors="replace")
    said = body.error if isinstance(body.error, str) else body.error.message
    return said or body.message or raw[:300].decode(errors="replace")


def decoded(raw: bytes, kind: type[Answer], what: str) -> Answer:
    """Return a JSON answer. Raises GenerationError where it is no such answer."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise GenerationError(f"the server's answer to {what} is not understood: {error}") from error
