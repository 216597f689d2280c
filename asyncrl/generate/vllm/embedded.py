"""vLLM's AsyncLLM in this event loop, with its engine core and workers in separate processes (launch.py).

Its engine core may die at any moment and then never answers. So every wait also checks for its death.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import psutil

from asyncrl.config.generate import VLLMEngineConfig
from asyncrl.errors import EngineDied, GenerationError
from asyncrl.folders import OwnedFolder
from asyncrl.generate.engine import EngineRequest, Piece, RequestRules
from asyncrl.generate.vllm.checkpoint import ModelFolder
from asyncrl.generate.vllm.launch import (
    installed_version,
    launch,
    processes_of,
    sampling_arguments,
    shut_down,
    socket_folder,
)
from asyncrl.generate.vllm.load_request import LoadReply, LoadRequest

DEATH = "vLLM's engine process died; its last output is in this process's log"
_DEATH_CHECK_S = 0.5
_QUIET_TURNS = 10
"""Event loop iterations after which a paused vLLM has no more output on the way."""

T = TypeVar("T")


class EmbeddedVLLM:
    """One vLLM. Methods raise only GenerationError; once `fault` has the cause of vLLM's death, all of them fail.

    All attributes except `config` and `shared_folder` are set by `start`.
    """

    shared_folder = ""
    """Folder for weights for workers on another machine; empty: this machine's memory is used."""
    load_hint = ""
    """Advice if its workers cannot read a weights file; empty: they are on this machine."""

    def __init__(self, config: VLLMEngineConfig, *, fp32_head: bool = False) -> None:
        """Store what `start` will start."""
        self.config, self._fp32_head = config, fp32_head
        self.num_slots, self.block_tokens = config.num_slots * config.data_parallel, 0
        """Maximum number of requests (vLLM accepts one more, for a score), and tokens of a KV block; 0: unknown."""
        self.fullness: dict[int, tuple[float, int]] = {}
        """For each replica: the free share of its KV cache, and the number of running requests."""
        self.llm: Any = None
        self.processes: set[psutil.Process] = set()
        self.sockets: OwnedFolder | None = None
        self._num_pieces = 0
        self._serial = itertools.count()

    @property
    def fault(self) -> str:
        """The cause of vLLM's death, if one was noticed."""
        return DEATH if self.llm is not None and self.llm.errored else ""

    async def start(self, folder: ModelFolder, on_room: Callable[[int, int], object], on_death: Callable[[], None]) -> None:
        """Start vLLM and load the model; on error or cancellation the caller closes.

        Args:
            folder: The model's folder.
            on_room: Called with the number of free KV blocks and of running requests.
            on_death: Called when a fault is found without a call (a server only). Here streams report it.
        """
        del on_death
        self._has_labels, self._on_room = installed_version().has_weight_versions, on_room
        self.sockets = socket_folder()
        path = self.sockets.path
        starting = asyncio.get_running_loop().run_in_executor(
            None, lambda: launch(self.config, folder, self._watch, path, fp32_head=self._fp32_head)
        )
        try:
            self.llm = await asyncio.shield(starting)
        except asyncio.CancelledError:  # the start completes in a moment, and `close` ends it
            await asyncio.wait({starting})
            self.llm = None if starting.exception() else starting.result()
            raise
        # With a stat logger, which `_watch` is, vLLM also counts every request's tokens: a sixth of the cost of a token here.
        self.llm.log_stats = self.llm.output_processor.log_stats = False
        self.processes = processes_of(path)
        cache = self.llm.vllm_config.cache_config
        self._blocks_each, self.block_tokens = int(cache.num_gpu_blocks or 0) // self.config.data_parallel, int(cache.block_size)
        self._params: Any = import_module("vllm.sampling_params")
        await self._in_every_worker("asyncrl_follow", os.getpid(), str(path))

    async def stream(self, request: EngineRequest, rules: RequestRules, salt: str) -> AsyncGenerator[Piece, None]:
        """Generate a completion, in pieces as vLLM makes them; closing it early aborts the request."""
        arguments, kind = sampling_arguments(request, rules), self._params.RequestOutputKind.DELTA
        params = self._params.SamplingParams(**arguments, flat_logprobs=True, output_kind=kind)
        prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids), "cache_salt": salt}
        vllm_id, is_finished = f"{request.request_id}.{next(self._serial)}", False
        try:
            async with contextlib.aclosing(self.llm.generate(prompt, params, vllm_id)) as outputs:
                async for output in outputs:
                    is_finished = output.finished
                    completion = output.outputs[0]
                    flat, spans = completion.logprobs, getattr(completion, "weight_versions", None)
                    self._num_pieces += 1
                    yield Piece(
                        completion.token_ids,
                        [flat.logprobs[start] for start in flat.start_indices] if completion.token_ids else (),
                        completion.finish_reason,
                        None if spans is None else [(span.version, span.end - span.start) for span in spans],
                    )
        except Exception as error:
            raise self._failure(error) from error
        finally:
            if not (is_finished or self.fault):  # vLLM itself aborts only after it has handed the request over
                await self.llm.abort(vllm_id)

    async def pause(self, *, clear_cache: bool) -> None:
        """Stop at a token boundary; requests stay. If the cache is cleared, their keys and values are computed again.

        When it returns, every token sampled before has been yielded, or will arrive with spans.
        """
        # AsyncLLM's own `pause_generation` does the same and then sleeps for 20 ms.
        await self._call(self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache))
        quiet = 0
        while quiet < _QUIET_TURNS:  # outputs are in this process by now, a few event loop iterations away
            before = self._num_pieces
            await asyncio.sleep(0)
            quiet = quiet + 1 if self._num_pieces == before else 0

    async def resume(self) -> None:
        """Continue after `pause`."""
        await self._call(self.llm.resume_generation())

    async def load(self, request: LoadRequest) -> list[LoadReply]:
        """Have every worker of every replica load; one reply a worker."""
        replies = await self._in_every_worker("asyncrl_load", msgspec.json.encode(request).decode())
        return [msgspec.json.decode(text, type=LoadReply) for text in replies]

    async def name_weights(self, label: str) -> None:
        """Set the label of the current weights for spans, if vLLM supports labels."""
        if self._has_labels:
            await self._call(self.llm.update_weight_version(label))

    async def score(self, token_ids: Sequence[int], salt: str) -> list[float]:
        """Return the logprob of each token after the first, temperature 1; not while paused.

        Prompt logprobs are taken before any temperature or filter, whatever `logprobs_mode` says, and never from cached prompts.
        """
        del salt
        params = self._params.SamplingParams(max_tokens=1, seed=0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        prompt = {"type": "token", "prompt_token_ids": list(token_ids)}

        async def score() -> list[Any]:
            return [output async for output in self.llm.generate(prompt, params, f"asyncrl-score-{next(self._serial)}")]

        logprobs = (await self._call(score()))[-1].prompt_logprobs
        return [position[token].logprob for position, token in zip(logprobs[1:], token_ids[1:], strict=True)]

    async def sleep(self) -> None:
        """Free the memory of weights and KV cache."""
        await self._call(self.llm.sleep(2, mode="keep"))

    async def wake_up(self, tag: str) -> None:
        """Allocate the memory of `weights` or `kv_cache`. When all memory is back, vLLM resumes by itself."""
        await self._call(self.llm.wake_up([tag]))

    async def look(self) -> None:
        """Check whether it is alive; `fault` has the result."""

    async def close(self) -> None:
        """End vLLM. Safe to repeat."""
        if self.sockets is None:
            return
        try:
            if (llm := self.llm) is not None:
                path = self.sockets.path
                # Shielded: a cancelled future that no thread has begun is never run, and vLLM's processes would stay.
                ending = asyncio.get_running_loop().run_in_executor(None, shut_down, llm, self.processes | processes_of(path))
                await asyncio.shield(ending)
                await asyncio.sleep(0)  # vLLM closes its sockets in a callback; only then does its context end
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.to_thread(llm.engine_core.resources.ctx.term), _DEATH_CHECK_S)
        finally:
            self.sockets.close()

    async def _in_every_worker(self, method: str, *args: object) -> list[Any]:
        """Call a method of every worker; with `collective_rpc` only workers of the first data-parallel engine would answer."""
        client, loop = self.llm.engine_core, asyncio.get_running_loop()
        calls = [
            client._call_utility_async("collective_rpc", method, None, args, None, engine=engine)  # noqa: SLF001
            for engine in client.core_engines
        ]
        tasks = [loop.create_task(self._call(call)) for call in calls]
        await asyncio.wait(tasks)
        return [reply for task in tasks for reply in task.result()]

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a call of vLLM and check for the death of its engine process, which would never answer."""
        task = asyncio.get_running_loop().create_task(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_DEATH_CHECK_S)
                if not task.done() and self.fault:
                    break
            return task.result()  # raises InvalidStateError if it is not done
        except Exception as error:
            raise self._failure(error) from error
        finally:
            task.cancel()

    def _failure(self, error: Exception) -> GenerationError:
        return EngineDied(self.fault) if self.fault else GenerationError(f"vLLM failed: {type(error).__name__}: {error}")

    def _watch(self, config: Any, engine_index: int = 0) -> SimpleNamespace:  # noqa: ANN401 - vLLM's
        """Return a vLLM stat logger: after every step it gets the load of one engine."""
        del config

        def record(scheduler_stats: Any = None, *_: object, **__: object) -> None:  # noqa: ANN401 - vLLM's
            if scheduler_stats is not None:
                self.fullness[engine_index] = (1.0 - scheduler_stats.kv_cache_usage, scheduler_stats.num_running_reqs)
                free_blocks = sum(share for share, _ in self.fullness.values()) * self._blocks_each
                self._on_room(int(free_blocks), sum(running for _, running in self.fullness.values()))

        return SimpleNamespace(record=record, log=record, log_engine_initialized=record, record_sleep_state=lambda *_: None)
