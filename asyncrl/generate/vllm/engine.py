"""vLLM behind the engine contract, wherever it runs (backend.py): requests, new weights, pause, sleep and the probe.

What the engine promises stands in generate/engine.py; requests and their versions are in requests.py, new weights in
load_request.py (checked, named in a file) and worker_extension.py (loaded inside vLLM's workers).

Invariants:
- At most one of pause, resume, load, sleep, wake and score is under way at a time.
- Weights change only while vLLM is paused, and requests begin only while it is not.
- After a load that failed half-way vLLM stays paused until one succeeds.
- vLLM goes on by itself once all of its memory is back after a sleep, so the KV cache's is taken last, when nothing forbids
  sampling.
- While paused, tokens may come during `score`: vLLM pauses all requests or none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec

from asyncrl.config.learner import LoRAConfig
from asyncrl.errors import BroadcastError, EngineDied, GenerationError
from asyncrl.generate.engine import EngineRequest, KVPolicy, KVRoom, RequestRules, SleepLevel, TokenStream
from asyncrl.generate.vllm.backend import Backend
from asyncrl.generate.vllm.checkpoint import read_folder
from asyncrl.generate.vllm.load_request import LoadRequest, ReceiverSource, fault_of, load_request_on_thread
from asyncrl.generate.vllm.requests import Requests
from asyncrl.generate.vllm.versions import until_all_arrived
from asyncrl.weights.tensors import MappedTensors

if TYPE_CHECKING:
    import torch

LOWEST_TEMPERATURE = 0.01
"""vLLM raises any lower one to this, 0 apart."""


class VLLMEngine:
    """See `asyncrl.generate.engine.Engine`.

    Example:
        >>> engine = VLLMEngine(EmbeddedVLLM(config), Path("model"))  # doctest: +SKIP
        >>> await engine.start()                                      # doctest: +SKIP
        >>> async for chunk in engine.submit(request): ...            # doctest: +SKIP
    """

    def __init__(
        self,
        backend: Backend,
        model_folder: Path,
        *,
        trust_remote_code: bool = False,
        lora: LoRAConfig | None = None,
    ) -> None:
        """Note what `start` will start; nothing of vLLM is imported before."""
        self.backend = backend
        self._config = backend.config
        self._path = model_folder
        self._trust_remote_code = trust_remote_code
        self._lora = lora
        self._lock = asyncio.Lock()
        self._requests: Requests | None = None
        self._room = KVRoom(self._config.num_slots, 1, self._config.max_sequence_tokens)
        self._is_paused = False
        self._is_torn = False
        """The weights are of no version, or not there, until a load succeeds."""
        self._sleep_level = 0
        self._has_kv = True
        self._is_closed = False

    @property
    def version(self) -> int:
        """Version of the weights that sample now; -1 before the first `load_weights`."""
        return self._requests.version if self._requests is not None else -1

    @property
    def num_slots(self) -> int:
        """Most requests that run at once, by the KV blocks that are free now. Raises EngineDied once vLLM is dead."""
        self._alive()
        return self._room.num_slots

    @property
    def num_running(self) -> int:
        """Requests submitted and not finished."""
        return len(self._requests) if self._requests is not None else 0

    async def start(self) -> None:
        """Start vLLM, or find the server; see `Engine.start`."""
        backend = self.backend
        self._folder = await asyncio.to_thread(read_folder, self._path, trust_remote_code=self._trust_remote_code)
        self._rules = RequestRules(self._folder.vocabulary_size, self._config.max_sequence_tokens, self._folder.end_ids)
        try:
            await backend.start(self._folder, self._note_room, self._note_death)
            facts = backend.facts
            self._room = KVRoom(facts.num_slots, facts.block_tokens or 1, self._config.max_sequence_tokens)
            self._requests = Requests(backend, self._rules, self._room)
            if facts.has_spans:
                await backend.name_weights(self._requests.label(-1))
        except BaseException:
            await self.close()
            raise

    def submit(self, request: EngineRequest) -> TokenStream:
        """Start a request; see `Engine.submit`."""
        requests = self._alive()
        self._rules.check(request, requests)
        if 0 < request.sampling.temperature < LOWEST_TEMPERATURE:
            raise GenerationError(
                f"request {request.request_id}: temperature {request.sampling.temperature} is not 0 (greedy) and below "
                f"{LOWEST_TEMPERATURE}, the lowest that vLLM samples at"
            )
        return requests.submit(request)

    def abort(self, request_id: str) -> None:
        """End a request; see `Engine.abort`."""
        if self._requests is not None:
            self._requests.abort(request_id)

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
        async with self._alone() as requests:
            self._refuse_asleep("load weights")
            folder = self.backend.shared_folder
            async with load_request_on_thread(tensors, self._folder, self._lora, folder) as load:
                started_s = perf_counter()
                await self._stop(clear_cache=kv == "recompute")
                if requests.met_non_finite:  # keys and values may be so too: none of them may be met again
                    await self._stop(clear_cache=True)
                try:
                    await self._replace(load, tensors)
                    if self.backend.facts.has_spans:
                        await self.backend.name_weights(requests.label(version))
                    requests.take_up(version)
                    self._is_torn = False
                finally:
                    await self._go_on()
                return (perf_counter() - started_s) * 1000

    async def _replace(self, load: LoadRequest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Have every worker load; leaves `_is_torn` set unless nothing was touched."""
        requests, backend = self._alive(), self.backend
        was_torn, self._is_torn = self._is_torn, True
        replies = await backend.load(msgspec.structs.replace(load, zero_kv=requests.met_non_finite and self._has_kv))
        fault = fault_of(replies)
        if fault is not None and not fault.is_touched:
            self._is_torn = was_torn
        if isinstance(tensors, MappedTensors):
            tensors.check()
        if fault is None:
            requests.met_non_finite = False
        elif fault.fault == "broadcast" and (isinstance(load.source, ReceiverSource) or not backend.facts.load_hint):
            raise BroadcastError(f"the weights were not loaded: {fault.message}")
        else:
            raise GenerationError(f"the weights were not loaded: {fault.message}{backend.facts.load_hint}")

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the probe's logprobs; see `Engine.score`. While paused, vLLM runs for as long as it takes."""
        requests = self._alive()
        ids = self._rules.scorable(token_ids, self.backend.facts.most_scored_tokens)
        async with self._alone():
            self._refuse_asleep("score")
            if self._is_torn:
                raise GenerationError(
                    "cannot score: the last weights came only in part, or went to sleep, so those there are of no version; "
                    "load others first"
                )
            if not self._is_paused:
                return await self.backend.score(ids, requests.salt)
            try:
                await self._run()
                return await self.backend.score(ids, requests.salt)
            finally:
                await self._stop(clear_cache=False)

    async def sleep(self, level: SleepLevel, kv: KVPolicy = "recompute") -> None:
        """Give memory back; see `Engine.sleep`. Keys and values are computed anew."""
        del kv
        self._alive()
        if self.backend.facts.why_no_sleep:
            raise GenerationError(self.backend.facts.why_no_sleep)
        async with self._alone():
            if level <= self._sleep_level:
                return
            await self._stop(clear_cache=True)
            if not (self._has_kv or self._is_torn):  # vLLM sleeps no deeper than it does: it has to be up for a moment
                await self.backend.wake_up()
            try:
                await self.backend.sleep(level)
            except GenerationError:
                await self._go_on()
                raise
            self._sleep_level, self._has_kv = level, False
            self._is_torn = self._is_torn or level == 2

    async def wake(self) -> None:
        """Take memory again; see `Engine.wake`. That of the KV cache comes with the next token."""
        async with self._alone():
            if self._sleep_level:
                await self.backend.wake_up("weights")
                self._sleep_level = 0
            if not self._has_kv:
                await self._go_on()

    async def close(self) -> None:
        """Abort everything and end what was started; a server runs on. Safe to repeat."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._requests is not None:
            await self._requests.close()
        await self.backend.close()

    async def _stop(self, *, clear_cache: bool) -> None:
        """Stop vLLM at a token boundary; no request begins until `_go_on`."""
        requests, backend = self._alive(), self.backend
        requests.shut_gate()
        await backend.pause(clear_cache=clear_cache)
        if not (backend.facts.has_spans and backend.facts.is_remote):
            await until_all_arrived(lambda: requests.num_tokens, is_remote=backend.facts.is_remote)

    async def _go_on(self) -> None:
        """Let vLLM sample again, unless something forbids it."""
        requests = self._alive()
        if not (self._is_paused or self._is_torn or self._sleep_level):
            await self._run()
            requests.open_gate()

    async def _run(self) -> None:
        await (self.backend.resume() if self._has_kv else self.backend.wake_up("kv_cache"))
        self._has_kv = True

    def _refuse_asleep(self, what: str) -> None:
        if self._sleep_level:
            raise GenerationError(f"cannot {what}: the engine is asleep; wake it first")

    def _alive(self) -> Requests:
        """Return the requests, or raise what ended them."""
        if self._is_closed or self._requests is None:
            raise GenerationError("the engine is closed" if self._is_closed else "the engine is not started")
        if self.backend.fault:
            self._requests.fail_all(self.backend.fault)
            raise EngineDied(self.backend.fault)
        return self._requests

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[Requests]:
        """Do one thing at a time to vLLM; a failure that shows that it is dead ends all streams."""
        self._alive()
        async with self._lock:
            try:
                yield self._alive()
            except GenerationError:
                await self.backend.look()
                self._alive()
                raise

    def _note_room(self, free_blocks: int, running: int) -> None:
        self._room.update(free_blocks, running)

    def _note_death(self) -> None:
        if self._requests is not None and not self._is_closed:
            self._requests.fail_all(self.backend.fault)
