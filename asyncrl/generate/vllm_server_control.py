"""What is done to a vLLM server as a whole: pause, resume, new weights, sleep, wake, the probe. One thing at a time.

Owns what holds the server: `pause` (asked for) and `broken` (its weights are of no version, or not there, until a load succeeds);
and how deep it sleeps. It generates while nothing holds it and it is awake.

Invariants:
- Weights change only while the server is paused, and requests begin only while it is not.
- A load refused before the workers were asked leaves everything as it was; one that fails later leaves the server held.

Called by generate/vllm_server_engine.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import msgspec
import torch

from asyncrl.errors import BroadcastError, GenerationError
from asyncrl.generate.engine import KVPolicy, SleepLevel
from asyncrl.generate.vllm_folder import ModelFolder
from asyncrl.generate.vllm_orders import LoadOrder, LoadReply
from asyncrl.generate.vllm_server_checks import GENERATE, LOAD_METHOD, ServerFacts, set_label
from asyncrl.generate.vllm_server_flights import Flights
from asyncrl.generate.vllm_server_http import ServerClient, ServerRefused, decoded
from asyncrl.generate.vllm_server_wire import RPCBody, RPCReply, decode_reply, prompt_body, prompt_logprobs
from asyncrl.generate.vllm_weights import load_order_on_thread
from asyncrl.models.deferred import DeferredTensors
from asyncrl.models.mapped import MappedTensors

Hold = Literal["pause", "broken"]


@dataclass(slots=True)
class ServerControl:
    """The holds of one server, and what may be done under them."""

    client: ServerClient
    flights: Flights
    facts: ServerFacts
    folder: ModelFolder
    shared_folder: str
    _holds: set[Hold] = field(default_factory=set)
    _sleep_level: int = 0
    _has_kv: bool = True
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def pause(self) -> None:
        """See `Engine.pause`."""
        async with self._lock:
            self._holds.add("pause")
            await self._stop(clear_cache=False)

    async def resume(self) -> None:
        """See `Engine.resume`."""
        async with self._lock:
            self._holds.discard("pause")
            await self._go_on()

    async def load(self, version: int, tensors: Mapping[str, torch.Tensor], kv: KVPolicy) -> float:
        """See `Engine.load_weights`."""
        async with self._lock:
            self._refuse_asleep("load weights")
            async with load_order_on_thread(tensors, self.folder, shared_folder=self.shared_folder) as order:
                started_s = perf_counter()
                await self._stop(clear_cache=kv == "recompute")
                self._holds.add("broken")  # until all of what follows is done, nobody knows what the server has
                await self._load_in_workers(order, tensors)
                await self.flights.settle()
                if self.facts.has_spans:
                    await set_label(self.client, self.flights.labels.of(version))
                self.flights.note_update(version)
                self._holds.discard("broken")
                await self._go_on()
                return (perf_counter() - started_s) * 1000

    async def sleep(self, level: SleepLevel) -> None:
        """See `Engine.sleep`."""
        if not self.facts.can_sleep:
            raise GenerationError(f"the server at {self.client.url} cannot sleep: start it with --enable-sleep-mode (GPUs only)")
        async with self._lock:
            if level <= self._sleep_level:
                return
            self.flights.shut_gate()
            if not self._has_kv and "broken" not in self._holds:  # vLLM sleeps no deeper than it does: up for a moment
                await self.client.post("/wake_up")
            try:
                await self.client.post("/sleep", params={"level": str(level), "mode": "keep"})
            except ServerRefused:
                await self._go_on()
                raise
            self._sleep_level, self._has_kv = level, False
            if level == 2:
                self._holds.add("broken")

    async def wake(self) -> None:
        """See `Engine.wake`. The KV cache's memory comes when the server may go on, which it does as soon as all is there."""
        async with self._lock:
            if self._sleep_level:
                await self._wake_up("weights")
                self._sleep_level = 0
            if not self._has_kv:
                await self._go_on()

    async def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """See `Engine.score`. A paused server runs for as long as it takes: vLLM pauses all requests or none."""
        async with self._lock:
            self._refuse_asleep("score")
            if "broken" in self._holds:
                raise GenerationError("cannot score: the server's weights are of no version; load others first")
            body = prompt_body(token_ids, self.flights.labels.of(self.flights.version))
            if not self._holds:
                return prompt_logprobs(decode_reply(await self.client.post(GENERATE, body)), token_ids)
            try:
                await self._run()
                raw = await self.client.post(GENERATE, body)
            finally:
                await self._stop(clear_cache=False)
        return prompt_logprobs(decode_reply(raw), token_ids)

    async def _load_in_workers(self, order: LoadOrder, tensors: Mapping[str, torch.Tensor]) -> None:
        """Have every worker of the server load; returns once all have."""
        body = RPCBody(LOAD_METHOD, (msgspec.json.encode(order).decode(),))
        answers = decoded(await self.client.post("/collective_rpc", body), RPCReply, "/collective_rpc").results
        replies = [decoded((answer or "").encode(), LoadReply, LOAD_METHOD) for answer in answers]
        failed = [reply for reply in replies if reply.fault]
        if isinstance(tensors, MappedTensors):
            tensors.check()
        if failed and isinstance(tensors, DeferredTensors) and failed[0].fault == "broadcast":
            raise BroadcastError(failed[0].message)
        if failed or not replies:
            said = failed[0].message if failed else "no worker answered"
            raise GenerationError(
                f"{len(failed)} of {len(replies)} workers of the server at {self.client.url} could not load the weights: {said}. "
                "If it does not see this machine's files (another machine, a container), set generate.engine.shared_folder to a "
                "folder that both see under the same path"
            )

    async def _stop(self, *, clear_cache: bool) -> None:
        self.flights.shut_gate()
        await self.client.post("/pause", params={"mode": "keep", "clear_cache": "true" if clear_cache else "false"})

    async def _go_on(self) -> None:
        """Let the server generate unless something still holds it."""
        if not (self._holds or self._sleep_level):
            await self._run()
            self.flights.open_gate()

    async def _run(self) -> None:
        await (self.client.post("/resume") if self._has_kv else self._wake_up("kv_cache"))
        self._has_kv = True

    async def _wake_up(self, tag: str) -> None:
        try:
            await self.client.post("/wake_up", params={"tags": tag})
        except ServerRefused as error:
            raise GenerationError(f"the memory of the server at {self.client.url} did not come back: {error}") from error

    def _refuse_asleep(self, what: str) -> None:
        if self._sleep_level:
            raise GenerationError(f"cannot {what}: the engine is asleep; wake it first")
