"""Requests that a vLLM works on, embedded or behind HTTP: one task each, from `submit` to the last token.

At most as many as have seats are handed to vLLM. The others wait here, so that they meet the newest weights when they begin.

Which version sampled a token: until the weights first change under a request, its tokens are of the version it began with and
are handed on as they come. An embedded vLLM that is paused has its outputs in this process: they are all taken before the
version changes, so the version in force at arrival is theirs. From a server tokens may come later: they are held until it says,
at the end, which weights sampled which tokens (spans, 0.32 and later). Spans are compared with what was handed on, wherever
vLLM sends them.

Invariants:
- While the gate is shut no request begins. Those without a token when the weights change begin anew after it opens, under another
  cache salt: they never meet keys and values that others computed under older weights.
- Versions never decrease within a request; what was handed on is never contradicted, or the request fails.
- A stream ends with its last chunk, with an abort or with GenerationError (EngineDied where vLLM is dead).
"""

from __future__ import annotations

import asyncio
import math
import secrets
import weakref
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from asyncrl.errors import EngineDied, GenerationError
from asyncrl.generate.engine import EngineRequest, KVRoom, RequestRules, TokenChunk, TokenStream
from asyncrl.generate.vllm.backend import Backend, Piece
from asyncrl.schema.samples import FinishReason

_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass(slots=True, eq=False)
class _Running:
    request: EngineRequest
    stream: weakref.ref[TokenStream]
    task: asyncio.Task[None] | None = None
    scope: asyncio.Timeout | None = None
    """Around its stream, while it has one; brought to an end to begin anew."""
    begins_anew: bool = False
    has_seat: bool = False
    is_certain: bool = True
    """Only one version can have sampled what arrives."""
    versions: list[int] = field(default_factory=list)
    """Of the tokens handed on."""
    held_ids: list[int] = field(default_factory=list)
    held_logprobs: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that arrived."""
        return len(self.versions) + len(self.held_ids)


class Requests:
    """All requests of one engine."""

    def __init__(self, backend: Backend, rules: RequestRules, room: KVRoom) -> None:
        self.version = -1
        self.met_non_finite = False
        """Logits were not finite since the last load: keys and values may be too."""
        self._backend, self._rules, self._room = backend, rules, room
        self._mark = f"asyncrl-{secrets.token_hex(4)}"
        self._epoch = 0
        """Loads of weights; salts the prefix cache."""
        self._by_id: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._seats = asyncio.Semaphore(room.most)
        self._gate = asyncio.Event()
        self._gate.set()

    @property
    def salt(self) -> str:
        """Salt of the prefix cache, another one after each load."""
        return f"{self._mark}-{self._epoch}"

    @property
    def num_tokens(self) -> int:
        """Tokens that arrived of all requests that are not finished."""
        return sum(running.num_tokens for running in self._by_id.values())

    def label(self, version: int) -> str:
        """Return the name that vLLM is told for a version; weights that others loaded have other names."""
        return f"{self._mark}.{version}"

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def submit(self, request: EngineRequest) -> TokenStream:
        """Begin a request that was checked, or let it wait for a seat."""
        request_id = request.request_id
        stream = TokenStream(on_early_close=lambda: self.abort(request_id))
        running = self._by_id[request_id] = _Running(request, weakref.ref(stream))
        task = running.task = asyncio.get_running_loop().create_task(self._serve(running), name=f"vllm-{request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""
        if (running := self._by_id.get(request_id)) is not None:
            self._end(running, TokenChunk((), (), (), "abort"))

    def shut_gate(self) -> None:
        """Let no request begin until `open_gate`."""
        self._gate.clear()

    def open_gate(self) -> None:
        """Let requests begin."""
        self._gate.set()

    def take_up(self, version: int) -> None:
        """Note that `version` samples from now on; the gate is shut and vLLM paused."""
        self.version = version
        self._epoch += 1
        for running in self._by_id.values():
            if running.num_tokens:
                running.is_certain = not (self._backend.facts.has_spans and self._backend.facts.is_remote)
            elif running.scope is not None:
                running.begins_anew = True
                running.scope.reschedule(asyncio.get_running_loop().time())

    def fail_all(self, fault: str) -> None:
        """End every request with EngineDied."""
        for running in list(self._by_id.values()):
            self._end(running, EngineDied(fault))

    async def close(self) -> None:
        """Abort everything and see the tasks end."""
        for request_id in list(self._by_id):
            self.abort(request_id)
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _serve(self, running: _Running) -> None:
        try:
            await self._seats.acquire()
            running.has_seat = True
            while not await self._generate(running):
                running.begins_anew = False
        except GenerationError as error:
            await self._backend.look()  # vLLM's end says so too, and then no request failed by itself
            fault = self._backend.fault
            told = f"request {running.request.request_id}: {error}"
            self._end(running, EngineDied(fault) if fault else GenerationError(told))
        finally:
            self._give_up_seat(running)
            self._end(running, GenerationError(f"request {running.request.request_id}: its task ended early: a bug in asyncrl"))

    async def _generate(self, running: _Running) -> bool:
        """Stream the completion once; return False where it is to begin anew."""
        await self._gate.wait()
        running.is_certain = True
        try:
            async with (
                asyncio.timeout(None) as running.scope,
                aclosing(self._backend.stream(running.request, self._rules, self.salt)) as pieces,
            ):
                async for piece in pieces:
                    await self._take(running, piece)
        except TimeoutError:
            if not running.begins_anew:
                raise
            return False
        finally:
            running.scope = None
        if self._is_under_way(running):  # it stopped without a reason
            await self._take(running, Piece((), (), "abort"))
        return True

    async def _take(self, running: _Running, piece: Piece) -> None:
        """Hand on what a piece makes certain."""
        if running.begins_anew or not self._is_under_way(running):
            return
        request, reason = running.request, piece.finish_reason
        if reason is not None and reason not in _REASONS:
            raise GenerationError(f"vLLM ended the request with {reason!r} after {running.num_tokens} tokens")
        if reason == "abort":  # that nobody asked for: vLLM may be ending
            await self._backend.look()
            if self._backend.fault:
                raise EngineDied(self._backend.fault)
        logprobs = [0.0] * len(piece.token_ids) if request.sampling.temperature == 0 else piece.logprobs
        if not all(map(math.isfinite, logprobs)):
            self.met_non_finite = True
            raise GenerationError(
                f"the model gave non-finite logits under version {self.version}, after {running.num_tokens} tokens"
            )
        running.held_ids += piece.token_ids
        running.held_logprobs += logprobs
        if running.num_tokens == request.sampling.max_new_tokens - 1:
            self._give_up_seat(running)  # a step early: vLLM has one slot more than there are seats
        if reason is None and not (running.is_certain and running.held_ids):
            return
        if reason == "abort" and not running.is_certain and not piece.spans:
            running.held_ids, running.held_logprobs = [], []
        versions = self._held_versions(running, piece.spans)
        chunk = TokenChunk(tuple(running.held_ids), tuple(running.held_logprobs), tuple(versions), _REASONS.get(reason))
        running.versions += versions
        running.held_ids, running.held_logprobs = [], []
        if reason is not None:
            self._room.note_finished(len(request.prompt_ids) + running.num_tokens)
            self._end(running, chunk)
        elif (stream := running.stream()) is not None:
            stream.put(chunk)

    def _held_versions(self, running: _Running, spans: Sequence[tuple[str, int]] | None) -> list[int]:
        """Return the versions of the tokens held, by vLLM's account where there is one."""
        if spans is None:
            if not running.is_certain and running.held_ids:
                raise GenerationError(f"vLLM did not say which weights sampled {len(running.held_ids)} tokens")
            return [self.version] * len(running.held_ids)
        versions = [version for label, num_tokens in spans for version in [self._version_of(label)] * num_tokens]
        if len(versions) != running.num_tokens:
            raise GenerationError(f"vLLM named the weights of {len(versions)} of {running.num_tokens} tokens")
        num_given = len(running.versions)
        if versions[:num_given] != running.versions or versions != sorted(versions):
            raise GenerationError(
                f"vLLM's account of which weights sampled which token contradicts what was streamed: {list(spans)} (label, "
                f"tokens), streamed were tokens of {sorted(set(running.versions))}"
            )
        return versions[num_given:]

    def _version_of(self, label: str) -> int:
        number = label.removeprefix(f"{self._mark}.")
        if number == label:
            raise GenerationError(
                f"vLLM sampled with weights labelled {label!r}, which this generator did not load: it was restarted, or another "
                "generator or program drives it too (give each generator a server of its own)"
            )
        return int(number)

    def _is_under_way(self, running: _Running) -> bool:
        return self._by_id.get(running.request.request_id) is running

    def _end(self, running: _Running, news: TokenChunk | GenerationError) -> None:
        if not self._is_under_way(running):
            return
        del self._by_id[running.request.request_id]
        if (stream := running.stream()) is not None:
            stream.put(news)
        if running.task is not None and running.task is not asyncio.current_task():
            running.task.cancel()

    def _give_up_seat(self, running: _Running) -> None:
        if running.has_seat:
            running.has_seat = False
            self._seats.release()
