"""vLLM behind the engine contract: its AsyncLLM in this event loop, its engine core and workers in processes of their own.

What the engine promises stands in generate/engine.py. How it keeps it: requests in generate/vllm_streams.py (streams, versions
counted at the pause), weights in generate/vllm_weights.py (checked, named in a file) and generate/vllm_worker.py (loaded inside
vLLM's workers), processes in generate/vllm_launch.py, what differs between vLLM's versions in generate/vllm_versions.py.

Invariants: at most one of pause, load, sleep, score is under way at a time; weights are touched only while vLLM is paused; after
a load that failed half-way vLLM stays paused until one succeeds. vLLM goes on by itself once all of its memory is back after a
sleep, so the KV cache's is taken last, when nothing forbids sampling. Called by generate/rollout.py and generate/worker.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import psutil

from asyncrl.config.generate import VLLMEngineConfig
from asyncrl.config.learner import LoRAConfig
from asyncrl.errors import BroadcastError, EngineDied, GenerationError
from asyncrl.folders import OwnedFolder
from asyncrl.generate.engine import EngineRequest, KVPolicy, SleepLevel
from asyncrl.generate.kv_room import KVRoom
from asyncrl.generate.request_rules import RequestRules
from asyncrl.generate.token_stream import TokenStream
from asyncrl.generate.vllm_folder import read_folder
from asyncrl.generate.vllm_launch import core_pids, is_on_cpu, launch, processes_of, shut_down
from asyncrl.generate.vllm_orders import LoadOrder, LoadReply, fault_of
from asyncrl.generate.vllm_requests import check_request
from asyncrl.generate.vllm_sockets import socket_folder
from asyncrl.generate.vllm_streams import DEATH, Flights
from asyncrl.generate.vllm_versions import installed_version
from asyncrl.generate.vllm_weights import load_order_on_thread
from asyncrl.models.mapped import MappedTensors

if TYPE_CHECKING:
    import torch

_DEATH_CHECK_S = 0.5

T = TypeVar("T")


class VLLMEngine:
    """See `asyncrl.generate.engine.Engine`.

    Example:
        >>> engine = VLLMEngine(VLLMEngineConfig(), Path("model"))  # doctest: +SKIP
        >>> await engine.start()                                    # doctest: +SKIP
        >>> async for chunk in engine.submit(request): ...          # doctest: +SKIP
    """

    def __init__(
        self,
        config: VLLMEngineConfig,
        model_folder: Path,
        *,
        trust_remote_code: bool = False,
        fp32_head: bool = False,
        lora: LoRAConfig | None = None,
    ) -> None:
        """Note what `start` will load; nothing of vLLM is imported before."""
        self._lora = lora
        self._config = config
        self._model_folder = model_folder
        self._trust_remote_code = trust_remote_code
        self._fp32_head = fp32_head
        self._room = KVRoom(config.num_slots, 16, config.max_sequence_tokens)
        self._fullness: dict[int, tuple[float, int]] = {}
        self._turn = asyncio.Lock()
        self._is_paused = False
        self._is_torn = False
        self._sleep_level = 0
        self._has_kv = True
        self._is_closed = False
        self._llm: Any = None
        self._processes: set[psutil.Process] = set()
        self._sockets: OwnedFolder | None = None
        self._flights: Flights | None = None

    @property
    def version(self) -> int:
        """Version of the weights that sample now; -1 before the first `load_weights`."""
        return self._flights.version if self._flights is not None else -1

    @property
    def num_slots(self) -> int:
        """Most requests that run at once, by the KV blocks that are free now. Raises EngineDied once vLLM is dead."""
        if self._flights is not None and not self._is_closed:
            self._alive()
        return self._room.num_slots

    @property
    def num_running(self) -> int:
        """Requests submitted and not finished."""
        return self._flights.num_running if self._flights is not None else 0

    async def start(self) -> None:
        """Start vLLM and load the model; see `Engine.start`."""
        self._vllm = installed_version()
        self._folder = await asyncio.to_thread(read_folder, self._model_folder, trust_remote_code=self._trust_remote_code)
        self._rules = RequestRules(self._folder.vocabulary_size, self._config.max_sequence_tokens, self._folder.end_ids)
        self._sockets = socket_folder(os.environ)
        try:
            self._llm = await _on_thread(self._launch)
            self._processes = processes_of(self._llm)
            self._room = self._make_room()
            self._flights = Flights(
                self._llm,
                self._rules,
                self._room,
                seeds_greedy=is_on_cpu(self._config) and not self._vllm.keeps_seeds_beside_greedy,
            )
            await self._flights.open()
            following = (os.getpid(), core_pids(self._llm), str(self._sockets.path))
            await self._call(self._in_every_worker("asyncrl_follow", *following))
            await self._label(-1)
        except BaseException:
            await self.close()
            raise

    def _launch(self) -> Any:  # noqa: ANN401 - vLLM's AsyncLLM
        assert self._sockets is not None
        trust, fp32_head = self._trust_remote_code, self._fp32_head
        return launch(self._config, self._folder, self._watch, self._sockets.path, trust_remote_code=trust, fp32_head=fp32_head)

    def submit(self, request: EngineRequest) -> TokenStream:
        """Start a request; see `Engine.submit`."""
        flights = self._alive()
        check_request(request, self._rules, flights)
        return flights.submit(request)

    def abort(self, request_id: str) -> None:
        """End a request; see `Engine.abort`."""
        if self._flights is not None:
            self._flights.abort(request_id)

    async def pause(self) -> None:
        """Stop at a token boundary; see `Engine.pause`."""
        async with self._turn:
            self._is_paused = True
            await self._stand_still(clear_cache=False)

    async def resume(self) -> None:
        """Go on after `pause`."""
        async with self._turn:
            self._is_paused = False
            await self._go_on()

    async def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor], kv: KVPolicy) -> float:
        """Replace the weights between two tokens; see `Engine.load_weights`."""
        async with self._turn:
            flights = self._awake("load weights")
            async with load_order_on_thread(tensors, self._folder, self._lora) as order:
                started_s = perf_counter()
                await self._stand_still(clear_cache=kv == "recompute")
                if flights.met_non_finite:  # its keys and values may be too: none of them may be met again
                    await self._stand_still(clear_cache=True)
                await self._replace(order, tensors)
                flights.version = version
                flights.epoch += 1
                await self._label(version)
                if kv == "keep" and self._config.prefix_caching:
                    await flights.renew()
                await self._go_on()
                return (perf_counter() - started_s) * 1000

    async def _replace(self, order: LoadOrder, tensors: Mapping[str, torch.Tensor]) -> None:
        """Have every worker load, and believe it only once the bytes have been checked."""
        assert self._flights is not None
        order = msgspec.structs.replace(order, zero_kv=self._flights.met_non_finite and self._has_kv)
        was_torn, self._is_torn = self._is_torn, True
        replies = await self._call(self._in_every_worker("asyncrl_load", msgspec.json.encode(order).decode()))
        fault = fault_of([msgspec.json.decode(text, type=LoadReply) for text in replies])
        if fault is not None:
            self._is_torn = was_torn or fault.is_touched
            await self._go_on()
            error = BroadcastError if fault.fault == "broadcast" else GenerationError
            raise error(f"the weights were not loaded: {fault.message}")
        self._flights.met_non_finite = False
        if isinstance(tensors, MappedTensors):
            tensors.check()
        self._is_torn = False

    async def _in_every_worker(self, method: str, *args: object) -> list[Any]:
        """Call a method of every worker's; by `collective_rpc` only those of the first data-parallel engine would answer."""
        client = self._llm.engine_core
        try:
            async with asyncio.TaskGroup() as tasks:
                calls = [
                    tasks.create_task(client._call_utility_async("collective_rpc", method, None, args, None, engine=engine))  # noqa: SLF001
                    for engine in client.core_engines
                ]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return [reply for call in calls for reply in call.result()]

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the probe's logprobs; see `Engine.score`. While paused, vLLM runs for as long as it takes."""
        self._alive()
        ids = self._rules.scorable(token_ids, self._llm.model_config.max_model_len - 1)
        async with self._turn:
            flights = self._awake("score")
            if self._is_torn:
                raise GenerationError("cannot score: the last weights came only in part, or went to sleep; load others first")
            if not self._is_paused:
                return await self._call(flights.score(ids))
            try:
                await self._run()
                return await self._call(flights.score(ids))
            finally:
                await self._stand_still(clear_cache=False)

    async def sleep(self, level: SleepLevel, kv: KVPolicy = "recompute") -> None:
        """Give memory back; see `Engine.sleep`. Keys and values are computed anew. Not run on a GPU."""
        del kv
        if not self._config.sleep:
            raise GenerationError("the engine cannot sleep: it was started without generate.engine.sleep = true (GPU only)")
        async with self._turn:
            if level <= self._sleep_level:
                return
            await self._stand_still(clear_cache=True)
            if not (self._has_kv or self._is_torn):  # vLLM sleeps no deeper than it does: it has to be up for a moment
                await self._call(self._llm.wake_up())
            try:
                await self._call(self._llm.sleep(level, mode="keep"))
            except GenerationError:
                await self._go_on()
                raise
            self._sleep_level, self._has_kv = level, False
            self._is_torn = self._is_torn or level == 2

    async def wake(self) -> None:
        """Take memory again; see `Engine.wake`. That of the KV cache comes with the next token. Not run on a GPU."""
        async with self._turn:
            self._alive()
            if self._sleep_level:
                await self._call(self._llm.wake_up(["weights"]))
                self._sleep_level = 0
            if not self._has_kv:
                await self._go_on()

    async def close(self) -> None:
        """Abort everything and end vLLM's processes. Safe to repeat."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._flights is not None:
                await self._flights.close()
            if self._llm is not None:
                await asyncio.to_thread(shut_down, self._llm, self._processes | processes_of(self._llm))
                await asyncio.sleep(0)  # vLLM closes its sockets in a callback; only then does its context end
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.to_thread(self._llm.engine_core.resources.ctx.term), _DEATH_CHECK_S)
        finally:
            if self._sockets is not None:
                self._sockets.close()

    async def _stand_still(self, *, clear_cache: bool) -> None:
        """Stop vLLM at a token boundary and take everything it has sampled."""
        flights = self._alive()
        await self._call(self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache))
        await self._call(flights.take_all())

    async def _go_on(self) -> None:
        """Let vLLM sample again, unless something forbids it."""
        self._alive()
        if not (self._is_paused or self._is_torn or self._sleep_level):
            await self._run()

    async def _run(self) -> None:
        """Have vLLM sample. Whenever all of its memory is there it goes on by itself, so the last of it comes here."""
        await self._call(self._llm.resume_generation() if self._has_kv else self._llm.wake_up(["kv_cache"]))
        self._has_kv = True

    def _awake(self, what: str) -> Flights:
        """Return the flights, or raise what forbids `what`."""
        flights = self._alive()
        if self._sleep_level:
            raise GenerationError(f"cannot {what}: the engine is asleep; wake it first")
        return flights

    async def _label(self, version: int) -> None:
        if self._vllm.has_weight_versions:
            await self._call(self._llm.update_weight_version(str(version)))

    def _alive(self) -> Flights:
        """Return the flights, or raise what ended them."""
        if self._is_closed or self._flights is None:
            raise GenerationError("the engine is closed" if self._is_closed else "the engine is not started")
        if self._llm.errored:
            fault = EngineDied(DEATH)
            self._flights.fail_all(fault)
            raise fault
        return self._flights

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Await something of vLLM's, which never answers once its engine process is dead."""
        task = asyncio.get_running_loop().create_task(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_DEATH_CHECK_S)
                if not task.done():
                    self._alive()
            return task.result()
        except GenerationError:
            raise
        except Exception as error:
            self._alive()
            raise GenerationError(f"vLLM failed: {type(error).__name__}: {error}") from error
        finally:
            task.cancel()

    def _watch(self, config: Any, engine_index: int = 0) -> _Watch:  # noqa: ANN401 - vLLM's
        del config
        return _Watch(lambda free, running: self._hear(engine_index, free, running))

    def _hear(self, engine_index: int, free_share: float, running: int) -> None:
        """Take in how full one of the engines is after a step."""
        self._fullness[engine_index] = (free_share, running)
        free_blocks = sum(share for share, _ in self._fullness.values()) * self._blocks_each
        self._room.update(int(free_blocks), sum(number for _, number in self._fullness.values()))

    def _make_room(self) -> KVRoom:
        cache = self._llm.vllm_config.cache_config
        self._blocks_each = int(cache.num_gpu_blocks or 0) // self._config.data_parallel
        return KVRoom(
            self._config.num_slots * self._config.data_parallel, int(cache.block_size), self._config.max_sequence_tokens
        )


class _Watch:
    """What vLLM calls a stat logger: hears after every step how full the engine is."""

    def __init__(self, hear: Callable[[float, int], None]) -> None:
        self._hear = hear

    def record(self, scheduler_stats: Any = None, *_: object, **__: object) -> None:  # noqa: ANN401 - vLLM's
        """Pass on what there is."""
        if scheduler_stats is not None:
            self._hear(1.0 - scheduler_stats.kv_cache_usage, scheduler_stats.num_running_reqs)

    def log_engine_initialized(self) -> None:
        """Say nothing."""

    def log(self) -> None:
        """Say nothing."""

    def record_sleep_state(self, *_: object) -> None:
        """Take no note."""


async def _on_thread(start: Callable[[], Any]) -> Any:  # noqa: ANN401
    """Run `start` on a thread; where the caller is cancelled meanwhile, what it started is ended when it is there."""
    running = asyncio.get_running_loop().run_in_executor(None, start)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        started = (await asyncio.wait({running}))[0].pop()
        if started.exception() is None:
            await asyncio.to_thread(shut_down, started.result(), processes_of(started.result()))
        raise
