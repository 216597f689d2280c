"""vLLM as an engine, embedded (embedded.py) or on a server (server.py): requests, new weights, pause, sleep and the probe.

generate/engine.py has the contract. New weights are checked and described in load_request.py, and loaded inside vLLM's workers
by worker_extension.py.

A request is one task, from `submit` to its last token. Only as many requests as there are seats are handed to vLLM. The others
wait here, so that they begin with the newest weights.

The version of a token: a paused backend has yielded every token sampled before, so the version at a token's arrival is the one
that sampled it. A server yields a completion at its end, with vLLM's report of which weights sampled which tokens (spans). If
vLLM sends spans, they are compared with the versions of the streamed tokens.

Invariants:
- At most one of pause, resume, load, sleep, wake and score runs at a time.
- Weights change only while vLLM is paused. Requests begin only while it is not, each with the cache salt of the last load.
- After a load that failed half-way vLLM stays paused until a load succeeds.
- vLLM resumes by itself once all its memory is back after a sleep, so the KV cache's memory is allocated last, when sampling is
  allowed.
- While paused, tokens may arrive during `score`: vLLM pauses all requests or none.
- Versions never decrease within a request. If spans contradict the streamed versions, the request fails.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec

from asyncrl.config.generate import LOWEST_VLLM_TEMPERATURE
from asyncrl.config.learner import LoRAConfig
from asyncrl.errors import BroadcastError, EngineDied, GenerationError
from asyncrl.generate.engine import EngineRequest, KVPolicy, KVRoom, Piece, RequestRules, TokenChunk, TokenStream, check_awake
from asyncrl.generate.vllm.checkpoint import read_folder
from asyncrl.generate.vllm.load_request import FileSource, LoadReply, load_request_on_thread
from asyncrl.schema.samples import FinishReason
from asyncrl.weights.tensors import MappedTensors

if TYPE_CHECKING:
    import torch

    from asyncrl.generate.vllm.embedded import EmbeddedVLLM
    from asyncrl.generate.vllm.server import VLLMServer

_REASONS: dict[str | None, FinishReason | None] = {None: None, "stop": "stop", "length": "length"}


@dataclass(slots=True, eq=False)
class _Running:
    request: EngineRequest
    stream: TokenStream
    task: asyncio.Task[None] | None = None
    versions: list[int] = field(default_factory=list)
    """The versions of the streamed tokens."""


class VLLMEngine:
    """See `asyncrl.generate.engine.Engine`.

    Example:
        >>> engine = VLLMEngine(EmbeddedVLLM(config), Path("model"))  # doctest: +SKIP
        >>> await engine.start()                                      # doctest: +SKIP
        >>> async for chunk in engine.submit(request): ...            # doctest: +SKIP
    """

    def __init__(
        self,
        backend: EmbeddedVLLM | VLLMServer,
        model_folder: Path,
        *,
        trust_remote_code: bool = False,
        lora: LoRAConfig | None = None,
    ) -> None:
        """Store what `start` will start; vLLM is not imported before `start`."""
        self.backend = backend
        self.version = -1
        self._config = backend.config
        self._path, self._trust_remote_code, self._lora = model_folder, trust_remote_code, lora
        self._lock = asyncio.Lock()
        self._room = KVRoom(self._config.num_slots, 1, self._config.max_sequence_tokens)
        self._running: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._gate = asyncio.Event()
        """Set while requests may begin."""
        self._mark = f"asyncrl-{secrets.token_hex(4)}"
        """Prefix of the labels of our weights; weights that others loaded have other labels."""
        self._num_loads = 0
        self._met_non_finite = False
        """Logits were not finite since the last load, so keys and values may not be finite either."""
        self._is_paused = False
        self._is_torn = False
        """The weights are incomplete or missing until a load succeeds."""
        self._is_asleep = False
        self._has_kv = True
        self._is_closed = False

    @property
    def has_weights(self) -> bool:
        """Whether the weights are complete; see `Engine.has_weights`."""
        return not self._is_torn

    @property
    def num_slots(self) -> int:
        """Maximum number of requests that run at once, by the free KV blocks. Raises EngineDied once vLLM is dead."""
        self._check_alive()
        return self._room.num_slots

    @property
    def num_running(self) -> int:
        """Number of submitted and unfinished requests."""
        return len(self._running)

    async def start(self) -> None:
        """Start vLLM, or connect to the server; see `Engine.start`."""
        backend, limit = self.backend, self._config.max_sequence_tokens
        self._folder = await asyncio.to_thread(read_folder, self._path, trust_remote_code=self._trust_remote_code)
        self._rules = RequestRules(self._folder.vocabulary_size, limit, self._folder.end_ids)
        try:
            await backend.start(self._folder, lambda free, running: self._room.update(free, running), self._fail_all)
            self._room = KVRoom(backend.num_slots, backend.block_tokens or 1, limit)
            # One more than the slots: when a request ends, its follower is already in vLLM.
            self._seats = asyncio.Semaphore(backend.num_slots + 1)
            await backend.name_weights(f"{self._mark}.{self.version}")
        except BaseException:
            await self.close()
            raise
        self._gate.set()

    def submit(self, request: EngineRequest, news: asyncio.Event | None = None) -> TokenStream:
        """Start a request; see `Engine.submit`."""
        self._check_alive()
        self._rules.check(request, self._running)
        request_id = request.request_id
        if 0 < request.sampling.temperature < LOWEST_VLLM_TEMPERATURE:
            raise GenerationError(
                f"request {request_id}: temperature {request.sampling.temperature} is not 0 (greedy) and below "
                f"{LOWEST_VLLM_TEMPERATURE}, the lowest that vLLM samples at"
            )
        stream = TokenStream(lambda: self.abort(request_id), news)
        running = self._running[request_id] = _Running(request, stream)
        running.task = asyncio.get_running_loop().create_task(self._serve(running), name=f"vllm-{request_id}")
        self._tasks.add(running.task)
        running.task.add_done_callback(self._tasks.discard)
        return stream

    def abort(self, request_id: str) -> None:
        """End a request; see `Engine.abort`."""
        if (running := self._running.get(request_id)) is not None:
            self._end(running, TokenChunk((), (), (), "abort"))

    async def _serve(self, running: _Running) -> None:
        """Serve one request from its seat to its last token."""
        request = running.request
        try:
            async with self._seats:
                await self._gate.wait()
                salt = f"{self._mark}-{self._num_loads}"
                async with aclosing(self.backend.stream(request, self._rules, salt)) as pieces:
                    async for piece in pieces:
                        self._take(running, piece)
        except GenerationError as error:
            await self.backend.look()  # if vLLM has died, that is the reason of the failure
            fault = self.backend.fault
            self._end(running, EngineDied(fault) if fault else GenerationError(f"request {request.request_id}: {error}"))
        finally:
            self._end(running, GenerationError(f"request {request.request_id}: vLLM's stream ended without a reason"))

    def _take(self, running: _Running, piece: Piece) -> None:
        """Pass a piece to its stream; the last piece ends the request."""
        request, num_tokens = running.request, len(running.versions)
        if self._running.get(request.request_id) is not running:
            return
        if piece.finish_reason not in _REASONS:
            raise GenerationError(f"vLLM ended it with {piece.finish_reason!r} after {num_tokens} tokens")
        logprobs = [0.0] * len(piece.token_ids) if request.sampling.temperature == 0 else piece.logprobs
        if not all(map(math.isfinite, logprobs)):
            self._met_non_finite = True
            raise GenerationError(f"the model gave non-finite logits under version {self.version}, after {num_tokens} tokens")
        versions = [self.version] * len(piece.token_ids)
        if piece.spans is not None:
            whole: list[int] = []
            for label, num in piece.spans:
                mark, _, number = label.rpartition(".")
                if mark != self._mark:
                    raise GenerationError(
                        f"vLLM sampled with weights labelled {label!r}, which this generator did not load: it was restarted, or "
                        "another generator or program drives it too (give each generator a server of its own)"
                    )
                whole += [int(number)] * num
            versions = whole[num_tokens:]
            if whole != sorted(whole) or whole[:num_tokens] != running.versions or len(versions) != len(piece.token_ids):
                raise GenerationError(
                    f"vLLM's account of which weights sampled which token, {list(piece.spans)}, contradicts the "
                    f"{num_tokens} + {len(piece.token_ids)} tokens that came, of versions {sorted(set(running.versions))}"
                )
        running.versions += versions
        chunk = TokenChunk(tuple(piece.token_ids), tuple(logprobs), tuple(versions), _REASONS[piece.finish_reason])
        if chunk.finish_reason is not None:
            self._room.note_finished(len(request.prompt_ids) + len(running.versions))
            self._end(running, chunk)
        elif chunk.token_ids:
            running.stream.put(chunk)

    def _end(self, running: _Running, news: TokenChunk | GenerationError) -> None:
        if self._running.get(running.request.request_id) is not running:
            return
        del self._running[running.request.request_id]
        running.stream.put(news)
        if running.task is not None and running.task is not asyncio.current_task():
            running.task.cancel()

    async def pause(self) -> None:
        """Stop at a token boundary; see `Engine.pause`."""
        async with self._alone():
            self._is_paused = True
            await self._stop(clear_cache=False)

    async def resume(self) -> None:
        """Go on after `pause`."""
        async with self._alone():
            self._is_paused = False
            await self._go_on()

    async def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor], kv: KVPolicy) -> float:
        """Replace the weights between two tokens; see `Engine.load_weights`."""
        async with self._alone():
            check_awake("load weights", is_asleep=self._is_asleep)
            backend = self.backend
            async with load_request_on_thread(tensors, self._folder, self._lora, backend.shared_folder) as load:
                started_s = perf_counter()
                zero_kv = self._met_non_finite  # keys and values may be non-finite too: none of them may be used again
                await self._stop(clear_cache=zero_kv or kv == "recompute")
                was_torn, self._is_torn = self._is_torn, True
                try:
                    replies = await backend.load(msgspec.structs.replace(load, zero_kv=zero_kv and self._has_kv))
                    replies = replies or [LoadReply("generation", "no worker answered")]
                    if isinstance(tensors, MappedTensors):
                        tensors.check()
                    if faulty := next((reply for reply in replies if reply.fault), None):
                        self._is_torn = was_torn or not all(reply.is_untouched for reply in replies)
                        hint = backend.load_hint if isinstance(load.source, FileSource) else ""
                        kind = BroadcastError if faulty.fault == "broadcast" and not hint else GenerationError
                        raise kind(f"the weights were not loaded: {faulty.message}{hint}")
                    await backend.name_weights(f"{self._mark}.{version}")
                    self.version = version
                    self._num_loads += 1
                    self._is_torn = self._met_non_finite = False
                finally:
                    await self._go_on()
                return (perf_counter() - started_s) * 1000

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the probe's logprobs; see `Engine.score`. While paused, vLLM runs for as long as it takes."""
        self._check_alive()
        async with self._alone():
            check_awake("score", is_asleep=self._is_asleep)
            if self._is_torn:
                raise GenerationError(
                    "cannot score: the last weights came only in part, or sleep freed them, so they are of no version; "
                    "load others first"
                )
            salt = f"{self._mark}-{self._num_loads}"
            try:
                if self._is_paused:
                    await self._run()
                return await self.backend.score(token_ids, salt)
            finally:
                if self._is_paused:
                    await self._stop(clear_cache=False)

    async def sleep(self, kv: KVPolicy = "recompute") -> None:
        """Free memory; see `Engine.sleep`. Keys and values are computed again."""
        del kv
        async with self._alone():
            if self._is_asleep:
                return
            await self._stop(clear_cache=True)
            if not self._has_kv:  # vLLM can sleep only when it has all of its memory
                if self._is_torn:  # with all of its memory vLLM would sample
                    raise EngineDied("vLLM was woken, no whole version came, and so it cannot sleep again; a restarted one can")
                await self.backend.wake_up("kv_cache")
            await self.backend.sleep()
            self._is_asleep = self._is_torn = True
            self._has_kv = False

    async def wake(self) -> None:
        """Allocate memory; see `Engine.wake`. The KV cache's memory is allocated when sampling is allowed again."""
        async with self._alone():
            if self._is_asleep:
                await self.backend.wake_up("weights")
                self._is_asleep = False

    async def close(self) -> None:
        """Abort all requests and end the started processes; a server keeps running. Safe to repeat."""
        if self._is_closed:
            return
        self._is_closed = True
        for request_id in list(self._running):
            self.abort(request_id)
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.backend.close()

    async def _stop(self, *, clear_cache: bool) -> None:
        """Stop vLLM at a token boundary; no request begins until `_go_on`."""
        self._gate.clear()
        await self.backend.pause(clear_cache=clear_cache)

    async def _go_on(self) -> None:
        """Let vLLM sample again, unless something forbids it."""
        if not (self._is_paused or self._is_torn):
            await self._run()
            self._gate.set()

    async def _run(self) -> None:
        await (self.backend.resume() if self._has_kv else self.backend.wake_up("kv_cache"))
        self._has_kv = True

    def _check_alive(self) -> None:
        """Raise the error that ended the engine."""
        if self._is_closed:
            raise GenerationError("the engine is closed")
        if self.backend.fault:
            self._fail_all()
            raise EngineDied(self.backend.fault)

    def _fail_all(self) -> None:
        for running in list(self._running.values()):
            self._end(running, EngineDied(self.backend.fault))

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Run one operation on vLLM at a time; if a failure shows that vLLM is dead, end all streams."""
        self._check_alive()
        async with self._lock:
            try:
                self._check_alive()
                yield
            except GenerationError:
                await self.backend.look()
                self._check_alive()
                raise
