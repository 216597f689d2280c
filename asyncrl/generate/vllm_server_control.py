"""What is done to a vLLM server as a whole: pause, resume, new weights, sleep, wake, the probe. One thing at a time.

Owns what holds the server: `pause` (asked for), `sleep`, and `broken`: its weights are of no version, or not there, until a load
succeeds. It generates while nothing holds it.

Invariants:
- Weights change only while the server is paused, and requests begin only while it is not.
- A load that fails before the first byte was read leaves everything as it was; one that fails later leaves the server held.

Called by generate/vllm_server_engine.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import torch

from asyncrl.errors import BroadcastError, GenerationError
from asyncrl.generate.engine import KVPolicy, SleepLevel
from asyncrl.generate.vllm_folder import ModelFolder
from asyncrl.generate.vllm_orders import LoadOrder
from asyncrl.generate.vllm_server_checks import GENERATE, ServerFacts, set_label
from asyncrl.generate.vllm_server_flights import Flights
from asyncrl.generate.vllm_server_http import ServerClient, ServerRefused
from asyncrl.generate.vllm_server_weights import HalfLoaded, load_on_server, order_for_server
from asyncrl.generate.vllm_server_wire import decode_reply, prompt_body, prompt_logprobs

Hold = Literal["pause", "sleep", "broken"]


@dataclass(slots=True)
class ServerControl:
    """The holds of one server, and what may be done under them."""

    client: ServerClient
    flights: Flights
    facts: ServerFacts
    folder: ModelFolder
    shared_folder: str
    _holds: set[Hold] = field(default_factory=set)
    _kv_asleep: bool = False
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
            if "sleep" in self._holds:
                raise GenerationError(f"version {version} cannot be loaded while the engine sleeps: wake it first")
            async with order_for_server(tensors, self.folder, self.shared_folder) as order:
                started_s = perf_counter()
                await self._stop(clear_cache=kv == "recompute")
                await self._replace(order, tensors)
                await self.flights.settle()
                if self.facts.has_spans:
                    await set_label(self.client, self.flights.labels.of(version))
                self.flights.note_update(version)
                await self._go_on()
                return (perf_counter() - started_s) * 1000

    async def sleep(self, level: SleepLevel) -> None:
        """See `Engine.sleep`."""
        if not self.facts.can_sleep:
            raise GenerationError(f"the server at {self.client.url} cannot sleep: start it with --enable-sleep-mode (GPUs only)")
        async with self._lock:
            self.flights.shut_gate()
            await self.client.post("/sleep", params={"level": str(level), "mode": "keep"})
            self._holds.add("sleep")
            if level == 2:
                self._holds.add("broken")

    async def wake(self) -> None:
        """See `Engine.wake`. After level 2 the KV cache stays away until there are weights: its coming sets the server going."""
        async with self._lock:
            if "sleep" not in self._holds:
                return
            self._kv_asleep = "broken" in self._holds
            try:
                await self.client.post("/wake_up", params={"tags": "weights"} if self._kv_asleep else None)
            except ServerRefused as error:
                raise GenerationError(f"the memory of the server at {self.client.url} did not come back: {error}") from error
            self._holds.discard("sleep")
            if self._holds and not self._kv_asleep:
                await self._stop(clear_cache=False)
            await self._go_on()

    async def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """See `Engine.score`. A paused server runs for as long as it takes: vLLM pauses all requests or none."""
        async with self._lock:
            if self._holds - {"pause"}:
                raise GenerationError("the engine cannot score now: it sleeps, or its weights are of no version")
            if self._holds:
                await self.client.post("/resume")
            try:
                raw = await self.client.post(GENERATE, prompt_body(token_ids, self.flights.labels.of(self.flights.version)))
            finally:
                if self._holds:
                    await self._stop(clear_cache=False)
        return prompt_logprobs(decode_reply(raw), token_ids)

    async def _replace(self, order: LoadOrder, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load; on failure the server stays held, since nobody knows what it has now."""
        try:
            await load_on_server(self.client, order, tensors)
        except (BroadcastError, HalfLoaded, ServerRefused):
            self._holds.add("broken")
            raise
        self._holds.discard("broken")
        if self._kv_asleep:
            await self.client.post("/wake_up", params={"tags": "kv_cache"})
            await self.client.post("/pause", params=_pause_params(clear_cache=True))
            self._kv_asleep = False

    async def _stop(self, *, clear_cache: bool) -> None:
        self.flights.shut_gate()
        await self.client.post("/pause", params=_pause_params(clear_cache=clear_cache))

    async def _go_on(self) -> None:
        """Let the server generate unless something still holds it."""
        if not self._holds:
            await self.client.post("/resume")
            self.flights.open_gate()


def _pause_params(*, clear_cache: bool) -> dict[str, str]:
    return {"mode": "keep", "clear_cache": "true" if clear_cache else "false"}
