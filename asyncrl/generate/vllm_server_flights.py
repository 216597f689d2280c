"""Requests that a vLLM server works on: one task and one HTTP stream each, from `submit` to the last token.

Owns the tasks. At most `num_seats` streams are open; the others wait here, so that they meet the newest weights when they begin.

Invariants:
- While the gate is shut no request begins; those that have no token yet when the weights change begin anew after it opens, under
  another cache salt, so that they never meet keys and values of older weights that others left.
- A stream ends with its last chunk, with an abort, or with GenerationError (EngineDied where the server is gone); never silently.
- Closing a stream, `abort` and `close` close the HTTP connection, which makes the server abort.

Called by generate/vllm_server_engine.py, on its event loop.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from asyncrl.clock import Clock
from asyncrl.errors import EngineDied, GenerationError
from asyncrl.generate.engine import EngineRequest, TokenChunk
from asyncrl.generate.request_rules import RequestRules
from asyncrl.generate.token_stream import TokenStream
from asyncrl.generate.vllm_server_checks import GENERATE
from asyncrl.generate.vllm_server_http import ServerClient
from asyncrl.generate.vllm_server_tokens import VersionedTokens, VersionLabels
from asyncrl.generate.vllm_server_wire import completion_body, decode_reply

_QUIET_S = 0.05
"""Streams of a paused server that brought nothing for this long have brought everything."""


@dataclass(slots=True, eq=False)
class _Flight:
    request: EngineRequest
    stream: weakref.ref[TokenStream]
    task: asyncio.Task[None] | None = None
    tokens: VersionedTokens | None = None
    """None until it has begun."""
    scope: asyncio.Timeout | None = None
    """Around its stream; brought to an end to begin anew."""
    begins_anew: bool = False
    last_news_s: float = 0.0


@dataclass(slots=True)
class Flights:
    """All requests of one server."""

    client: ServerClient
    clock: Clock
    rules: RequestRules
    labels: VersionLabels
    has_spans: bool
    num_seats: int
    on_stream_lost: Callable[[], Awaitable[None]]
    """Asked to find out whether the server is gone when a stream broke or the server failed it."""
    on_finished: Callable[[int], None]
    """Told the length of each finished sequence, prompt and response."""
    version: int = -1
    _by_id: dict[str, _Flight] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _seats: asyncio.Semaphore = field(init=False)
    _gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._seats = asyncio.Semaphore(self.num_seats)
        self._gate.set()

    def __len__(self) -> int:
        """Return how many are not finished."""
        return len(self._by_id)

    def __contains__(self, request_id: object) -> bool:
        """Return whether a request is not finished."""
        return request_id in self._by_id

    def submit(self, request: EngineRequest) -> TokenStream:
        """Begin a request, or let it wait for a seat; see `Engine.submit`."""
        request_id = request.request_id
        stream = TokenStream(on_early_close=lambda: self.abort(request_id))
        flight = self._by_id[request_id] = _Flight(request, weakref.ref(stream))
        task = flight.task = asyncio.get_running_loop().create_task(self._serve(flight), name=f"vllm-server-{request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""
        if (flight := self._by_id.get(request_id)) is not None:
            self._end(flight, TokenChunk((), (), (), "abort"))

    def shut_gate(self) -> None:
        """Let no request begin until `open_gate`."""
        self._gate.clear()

    def open_gate(self) -> None:
        """Let requests begin."""
        now_s = self.clock.now()
        for flight in self._by_id.values():
            flight.last_news_s = now_s
        self._gate.set()

    async def settle(self) -> None:
        """Wait, while the server is paused, until the streams have brought all that was sampled; needless with spans."""
        if self.has_spans:
            return
        while True:
            before = self._num_tokens()
            await self.clock.sleep(_QUIET_S)
            if self._num_tokens() == before:
                return

    def note_update(self, version: int) -> None:
        """Take note that `version` samples from now on; call with the gate shut."""
        self.version = version
        for flight in self._by_id.values():
            if flight.tokens is not None and flight.tokens.num_tokens:
                flight.tokens.note_update(version)
            elif flight.scope is not None:
                flight.begins_anew = True
                _interrupt(flight)

    def fail_silent(self, limit_s: float) -> None:
        """Fail requests whose stream brought nothing for so long while the gate was open."""
        if not self._gate.is_set():
            return
        for flight in list(self._by_id.values()):
            silent_s = self.clock.now() - flight.last_news_s
            if flight.scope is not None and silent_s > limit_s:
                self._fail(
                    flight,
                    f"the server at {self.client.url} sent no token for {silent_s:.0f} s (generate.engine.request_timeout_s is "
                    f"{limit_s:g}): raise that, or look whether others keep the server busy",
                )

    def fail_all(self, fault: str) -> None:
        """End every request with EngineDied."""
        for flight in list(self._by_id.values()):
            self._end(flight, EngineDied(fault))

    async def close(self) -> None:
        """Abort everything and see the tasks end."""
        for request_id in list(self._by_id):
            self.abort(request_id)
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _num_tokens(self) -> int:
        return sum(flight.tokens.num_tokens for flight in self._by_id.values() if flight.tokens is not None)

    async def _serve(self, flight: _Flight) -> None:
        try:
            async with self._seats:
                while not await self._stream_once(flight):
                    flight.begins_anew = False
        except GenerationError as error:  # the server's end says so too, and then no request failed by itself
            await self.on_stream_lost()
            self._fail(flight, str(error))
        finally:
            self._fail(flight, "its task ended early: a bug in asyncrl")

    async def _stream_once(self, flight: _Flight) -> bool:
        """Stream the completion; return False where it is to begin anew."""
        await self._gate.wait()
        request, flight.last_news_s = flight.request, self.clock.now()
        labels = self.labels if self.has_spans else None
        tokens = flight.tokens = VersionedTokens(self.version, labels, is_greedy=request.sampling.temperature == 0)
        body = completion_body(request, self.rules, cache_salt=self.labels.of(self.version))
        try:
            async with asyncio.timeout(None) as flight.scope, self.client.stream(GENERATE, body) as events:
                await self._follow(flight, tokens, events)
        except TimeoutError:
            if not flight.begins_anew:
                raise
            return False
        finally:
            flight.scope = None
        return True

    async def _follow(self, flight: _Flight, tokens: VersionedTokens, events: AsyncIterator[bytes]) -> None:
        async for raw in events:
            flight.last_news_s = self.clock.now()
            for choice in decode_reply(raw).choices:
                await self._hear(flight, tokens.take(choice))
        await self._hear(flight, tokens.end())

    async def _hear(self, flight: _Flight, chunk: TokenChunk | None) -> None:
        """Take what the stream brought; an end that nobody asked for may be the server's own."""
        if chunk is not None and chunk.finish_reason == "abort" and self._is_under_way(flight):
            await self.on_stream_lost()
        self._tell(flight, chunk)

    def _is_under_way(self, flight: _Flight) -> bool:
        return self._by_id.get(flight.request.request_id) is flight

    def _tell(self, flight: _Flight, chunk: TokenChunk | None) -> None:
        """Hand a chunk to whoever reads; the last one ends the request, and what comes after it is not looked at."""
        if chunk is None or not self._is_under_way(flight):
            return
        if chunk.finish_reason is not None:
            del self._by_id[flight.request.request_id]
            self.on_finished(len(flight.request.prompt_ids) + (flight.tokens.num_tokens if flight.tokens is not None else 0))
        if (stream := flight.stream()) is not None:
            stream.put(chunk)

    def _fail(self, flight: _Flight, reason: str) -> None:
        self._end(flight, GenerationError(f"request {flight.request.request_id}: {reason}"))

    def _end(self, flight: _Flight, news: TokenChunk | GenerationError) -> None:
        """End a request from outside its stream."""
        if not self._is_under_way(flight):
            return
        del self._by_id[flight.request.request_id]
        if (stream := flight.stream()) is not None:
            stream.put(news)
        if flight.task is not None and flight.task is not asyncio.current_task():
            flight.task.cancel()


def _interrupt(flight: _Flight) -> None:
    if flight.scope is not None:
        flight.scope.reschedule(asyncio.get_running_loop().time())
