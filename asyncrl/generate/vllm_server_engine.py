"""The engine for people who already run `vllm serve`: token ids in and out, pause, weights, all over HTTP.

Checks requests, and notices when the server is gone. Streams and their tasks are generate/vllm_server_flights.py, which version
sampled a token generate/vllm_server_tokens.py, pause and weights generate/vllm_server_control.py, what the server must offer
generate/vllm_server_checks.py.

Invariants besides those of generate/engine.py:
- A server that is gone, or was restarted, ends all streams with EngineDied, and from then on every call, `num_slots` included,
  raises it: the generator's process ends, its groups are handed out again, and its successor gives the server the newest weights.
- While it is paused, tokens may come during `score`: vLLM pauses all requests or none.

Imports no vllm. Called by generate/rollout.py and generate/worker.py where config says `kind = "vllm_server"`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from asyncrl.clock import Clock
from asyncrl.config.generate import VLLMServerEngineConfig
from asyncrl.errors import EngineDied, GenerationError
from asyncrl.generate.engine import EngineRequest, KVPolicy, SleepLevel
from asyncrl.generate.kv_room import KVRoom
from asyncrl.generate.request_rules import RequestRules
from asyncrl.generate.token_stream import TokenStream
from asyncrl.generate.vllm_folder import ModelFolder, read_folder
from asyncrl.generate.vllm_requests import check_request
from asyncrl.generate.vllm_server_checks import check_server
from asyncrl.generate.vllm_server_control import ServerControl
from asyncrl.generate.vllm_server_flights import Flights
from asyncrl.generate.vllm_server_gauges import ServerGauges, read_gauges
from asyncrl.generate.vllm_server_http import ServerClient, ServerLost, ServerRefused
from asyncrl.generate.vllm_server_tokens import VersionLabels

_T = TypeVar("_T")

LOOK_INTERVAL_S = 2.0
"""How often the server's gauges are read."""


@dataclass(frozen=True, slots=True)
class _Server:
    """What there is between `start` and `close`."""

    client: ServerClient
    rules: RequestRules
    flights: Flights
    control: ServerControl
    room: KVRoom
    started_s: float
    """When its process began, by its own account."""


class VLLMServerEngine:
    """See `asyncrl.generate.engine.Engine`.

    Example:
        >>> config = VLLMServerEngineConfig(url="http://127.0.0.1:8000", max_sequence_tokens=1024)
        >>> engine = VLLMServerEngine(config, Path("model"), SystemClock())  # doctest: +SKIP
        >>> await engine.start()                                             # doctest: +SKIP
    """

    def __init__(
        self, config: VLLMServerEngineConfig, model_folder: Path, clock: Clock, *, trust_remote_code: bool = False
    ) -> None:
        """Note what `start` will drive; of several urls, the first."""
        self._config = config
        self._path = model_folder
        self._clock = clock
        self._trust_remote_code = trust_remote_code
        self._server: _Server | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._looking = asyncio.Lock()
        self._fault = ""
        self._is_closed = False

    @property
    def version(self) -> int:
        """Version of the weights that sample now; -1 before the first `load_weights`."""
        return self._server.flights.version if self._server is not None else -1

    @property
    def num_slots(self) -> int:
        """Most requests that run at once, by the server's free KV cache. Raises EngineDied once the server is gone."""
        return self._up.room.num_slots

    @property
    def num_running(self) -> int:
        """Requests submitted and not finished."""
        return len(self._server.flights) if self._server is not None else 0

    async def start(self) -> None:
        """Check the server; see `Engine.start`."""
        folder = await asyncio.to_thread(read_folder, self._path, trust_remote_code=self._trust_remote_code)
        key = await asyncio.to_thread(read_api_key, self._config.api_key_file)
        client = ServerClient(self._config.urls[0], key, self._config.request_timeout_s, self._clock)
        client.open()
        try:
            self._server = await self._make_server(client, folder)
        except BaseException:
            await client.close()
            raise
        self._watcher = asyncio.get_running_loop().create_task(self._watch(), name="vllm-server-watch")

    def submit(self, request: EngineRequest) -> TokenStream:
        """Start a request; see `Engine.submit`."""
        server = self._up
        check_request(request, server.rules, server.flights)
        return server.flights.submit(request)

    def abort(self, request_id: str) -> None:
        """End a request; see `Engine.abort`."""
        if self._server is not None:
            self._server.flights.abort(request_id)

    async def pause(self) -> None:
        """Stop at a token boundary; see `Engine.pause`."""
        await self._steer(self._up.control.pause())

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._steer(self._up.control.resume())

    async def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor], kv: KVPolicy) -> float:
        """Replace the server's weights; see `Engine.load_weights`."""
        return await self._steer(self._up.control.load(version, tensors, kv))

    async def sleep(self, level: SleepLevel, kv: KVPolicy = "recompute") -> None:
        """Give device memory back; see `Engine.sleep`. Keys and values are computed anew."""
        del kv
        await self._steer(self._up.control.sleep(level))

    async def wake(self) -> None:
        """Take it again after `sleep`."""
        await self._steer(self._up.control.wake())

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the probe's logprobs; see `Engine.score`."""
        server = self._up
        return await self._steer(server.control.score(server.rules.scorable(token_ids)))

    async def close(self) -> None:
        """Abort everything and close the connections; the server runs on."""
        self._is_closed = True
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
        if self._server is not None:
            await self._server.flights.close()
            await self._server.client.close()

    async def _steer(self, doing: Awaitable[_T]) -> _T:
        """Do something to the server; if that shows that it is gone, all streams end."""
        try:
            return await doing
        except (ServerLost, ServerRefused):
            await self._look()
            _ = self._up
            raise

    @property
    def _up(self) -> _Server:
        """The server. Raises EngineDied once it is gone."""
        if self._fault:
            raise EngineDied(self._fault)
        if self._is_closed or self._server is None:
            raise GenerationError("the engine is closed" if self._is_closed else "the engine is not started")
        return self._server

    async def _make_server(self, client: ServerClient, folder: ModelFolder) -> _Server:
        config, labels = self._config, VersionLabels(f"asyncrl-{secrets.token_hex(4)}")
        facts = await check_server(client, config, self._path, labels.of(-1), self._clock)
        gauges = await _read(client)
        most = min(config.num_slots, max(1, facts.max_requests - 1) if facts.max_requests else config.num_slots)
        room = KVRoom(most, gauges.block_tokens or 1, config.max_sequence_tokens)
        rules = RequestRules(folder.vocabulary_size, config.max_sequence_tokens, folder.end_ids)
        flights = Flights(
            client=client,
            clock=self._clock,
            rules=rules,
            labels=labels,
            has_spans=facts.has_spans,
            num_seats=most,
            on_stream_lost=self._look,
            on_finished=room.note_finished,
        )
        control = ServerControl(client, flights, facts, folder, config.shared_folder)
        return _Server(client, rules, flights, control, room, gauges.started_s)

    async def _watch(self) -> None:
        """Read the gauges again and again, until the server is gone."""
        while not self._fault:
            await self._clock.sleep(LOOK_INTERVAL_S)
            await self._look()
            if self._server is not None:
                self._server.flights.fail_silent(self._config.request_timeout_s)

    async def _look(self) -> None:
        """Ask how it is and read the gauges; take note of the room there is, or that the server is gone."""
        server = self._server
        async with self._looking:
            if server is None or self._fault:
                return
            try:
                await server.client.get("/health")
                gauges = await _read(server.client)
            except ServerLost as error:
                self._lose(server, str(error))
                return
            except ServerRefused as error:
                self._lose(
                    server, f"the vLLM server at {server.client.url} answers, but its engine is dead: {error}; start it again"
                )
                return
            if gauges.started_s != server.started_s:
                self._lose(
                    server,
                    f"the vLLM server at {server.client.url} was restarted and has lost the weights it was given; a restarted "
                    "generator gives it the newest",
                )
            elif gauges.block_tokens:
                server.room.update(gauges.free_blocks, gauges.running)

    def _lose(self, server: _Server, fault: str) -> None:
        self._fault = fault
        server.flights.fail_all(fault)


def read_api_key(path: str) -> str:
    """Return the file's first line; empty where no file is named.

    Raises:
        GenerationError: It cannot be read, or its first line is empty.
    """
    if not path:
        return ""
    try:
        key = Path(path).read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise GenerationError(f"generate.engine.api_key_file {path!r} cannot be read: {error}") from error
    if not key:
        raise GenerationError(f"generate.engine.api_key_file {path!r}: its first line must be the key, and is empty")
    return key


async def _read(client: ServerClient) -> ServerGauges:
    return read_gauges((await client.get("/metrics")).decode(errors="replace"))
