"""One vLLM server over HTTP: the session, the bearer token, bounded retries, what is said and what an answer means.

A server that cannot be reached is `ServerLost`, one that says no is `ServerRefused`: the engine ends all streams for the first
and one request for the second. Fields of answers that we do not know are skipped, so versions may differ.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import aiohttp
import msgspec

from asyncrl.clock import Clock
from asyncrl.errors import GenerationError

Answer = TypeVar("Answer")

NUM_ATTEMPTS = 3
FIRST_DELAY_S = 0.2
"""Between the first attempt and the second; doubled each time."""
CLAMPED_LOGPROB = -9999.0
"""What the server sends for a logprob that is not a number."""
_JSON = {"Content-Type": "application/json"}
_LONGEST_EVENT = 16 << 20
_UNREACHABLE = (aiohttp.ClientError, TimeoutError)


class ServerLost(GenerationError):  # noqa: N818 - a state of the server, told to every stream
    """The server cannot be reached."""


class ServerRefused(GenerationError):  # noqa: N818 - an answer
    """The server answered that it will not, or that it failed."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerSampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """vLLM's SamplingParams, by their names there."""

    max_tokens: int
    temperature: float
    seed: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """0: of the sampled token alone."""
    prompt_logprobs: int | None = None
    detokenize: bool | None = None


class GenerateBody(msgspec.Struct, frozen=True):
    """Body of `POST /inference/v1/generate`."""

    request_id: str
    token_ids: Sequence[int]
    sampling_params: ServerSampling
    stream: bool
    cache_salt: str


class _Logprob(msgspec.Struct, frozen=True):
    logprob: float | None = None


class _Logprobs(msgspec.Struct, frozen=True):
    content: tuple[_Logprob, ...] | None = None


class _Span(msgspec.Struct, frozen=True):
    version: str
    start: int
    end: int


class Choice(msgspec.Struct, frozen=True):
    """A piece of a completion, or the whole."""

    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: tuple[_Span, ...] | None = None
    """On the last piece, over the whole output; 0.32 and later."""

    def sampled_logprobs(self) -> tuple[float, ...]:
        """Return the logprob of each token, -inf for one that is no number. Raises GenerationError where one is missing."""
        entries = (self.logprobs.content if self.logprobs is not None else None) or ()
        if len(entries) != len(self.token_ids or ()):
            raise GenerationError(f"the server sent {len(self.token_ids or ())} tokens with {len(entries)} logprobs")
        given = (CLAMPED_LOGPROB if entry.logprob is None else entry.logprob for entry in entries)
        return tuple(logprob if logprob > CLAMPED_LOGPROB else -float("inf") for logprob in given)


class _ErrorText(msgspec.Struct, frozen=True):
    message: str = ""


class GenerateReply(msgspec.Struct, frozen=True):
    """A stream's event, or the whole answer."""

    choices: tuple[Choice, ...] = ()
    prompt_logprobs: tuple[dict[str, _Logprob] | None, ...] | None = None
    error: _ErrorText | str | None = None
    message: str = ""

    def said(self) -> str:
        """Return what an answer says went wrong, in any of its shapes; empty: nothing."""
        return (self.error if isinstance(self.error, str) else self.error.message if self.error else "") or self.message


class ServerClient:
    """Requests to one server."""

    def __init__(self, url: str, api_key: str, timeout_s: float, clock: Clock) -> None:
        """Open the session, on the running event loop.

        Args:
            url: `http://host:port`.
            api_key: Sent as bearer token; empty: none.
            timeout_s: For an answer other than a stream's.
            clock: For back-off.
        """
        self.url = url.rstrip("/")
        self._clock = clock
        self._connect_s = min(10.0, timeout_s)
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._connect_s),
            read_bufsize=_LONGEST_EVENT,
        )

    async def close(self) -> None:
        """Close every connection. Safe to repeat."""
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
    async def stream(self, path: str, body: msgspec.Struct) -> AsyncIterator[aiohttp.ClientResponse]:
        """Post once and yield the response; leaving early closes the connection, which makes the server abort.

        Raises:
            ServerLost: The connection could not be made or broke.
            ServerRefused: It answered with another status than 200.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s)
        data = msgspec.json.encode(body)
        try:
            async with self._session.post(self.url + path, data=data, headers=_JSON, timeout=timeout) as response:
                try:
                    await self._check(response, path)
                    yield response
                finally:
                    response.close()
        except _UNREACHABLE as error:
            raise self._lost(error) from error

    async def _ask(self, method: str, path: str, body: msgspec.Struct | None, params: Mapping[str, str] | None) -> bytes:
        data, headers = (None, None) if body is None else (msgspec.json.encode(body), _JSON)
        for attempt in range(NUM_ATTEMPTS):
            try:
                async with self._session.request(method, self.url + path, data=data, params=params, headers=headers) as response:
                    await self._check(response, path)
                    return await response.read()
            except _UNREACHABLE as error:
                if attempt + 1 == NUM_ATTEMPTS or isinstance(error, TimeoutError):
                    raise self._lost(error) from error
            await self._clock.sleep(FIRST_DELAY_S * 2**attempt)
        raise AssertionError("not reached")

    async def _check(self, response: aiohttp.ClientResponse, path: str) -> None:
        if response.status != 200:
            raw = await response.read()
            try:
                said = msgspec.json.decode(raw, type=GenerateReply).said()
            except msgspec.MsgspecError:
                said = ""
            said = said or raw[:300].decode(errors="replace")
            raise ServerRefused(f"{self.url}{path} answered {response.status}: {said}", response.status)

    def _lost(self, error: BaseException) -> ServerLost:
        why = str(error) or type(error).__name__
        return ServerLost(
            f"the vLLM server at {self.url} (generate.engine.url) cannot be reached: {why}. See that it runs and that this "
            "machine can reach it; once it is healthy, a restarted generator gives it the newest weights"
        )


def decoded(raw: bytes, kind: type[Answer], what: str) -> Answer:
    """Return a JSON answer. Raises GenerationError where it is no such answer."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise GenerationError(f"the server's answer to {what} is not understood: {error}") from error


def decode_reply(raw: bytes) -> GenerateReply:
    """Return an event or answer of the generate route. Raises GenerationError where it says that it failed, or is none."""
    reply = decoded(raw, GenerateReply, "/inference/v1/generate")
    if reply.error is not None:
        raise GenerationError(f"the server could not serve the request: {reply.said()}")
    return reply


def prompt_logprobs(reply: GenerateReply, token_ids: Sequence[int]) -> list[float]:
    """Return the logprob of each token after the first. Raises GenerationError where one is missing."""
    rows = reply.prompt_logprobs or ()
    if len(rows) != len(token_ids):
        raise GenerationError(f"the server answered with the logprobs of {len(rows)} prompt tokens instead of {len(token_ids)}")
    found = [(row or {}).get(str(token), _Logprob()).logprob for row, token in zip(rows, token_ids, strict=True)][1:]
    scores = [logprob for logprob in found if logprob is not None]
    if len(scores) != len(found):
        raise GenerationError("the server left out the logprob of a prompt token")
    return scores
