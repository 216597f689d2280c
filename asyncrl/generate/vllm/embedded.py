"""vLLM's AsyncLLM in this event loop, its engine core and workers in processes of their own (launch.py).

Its engine core may die at any moment, and then never answers: whatever is awaited of it, its death is looked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import psutil

from asyncrl.config.generate import VLLMEngineConfig, VLLMServerEngineConfig
from asyncrl.errors import EngineDied, GenerationError
from asyncrl.folders import OwnedFolder
from asyncrl.generate.engine import EngineRequest, RequestRules, SleepLevel
from asyncrl.generate.vllm.backend import Facts, Piece, sampling_arguments
from asyncrl.generate.vllm.checkpoint import ModelFolder
from asyncrl.generate.vllm.launch import launch, processes_of, shut_down, socket_folder
from asyncrl.generate.vllm.load_request import LoadReply, LoadRequest
from asyncrl.generate.vllm.versions import installed_version

DEATH = "vLLM's engine process died; its last words are in this process's log"
_DEATH_CHECK_S = 0.5

T = TypeVar("T")


class EmbeddedVLLM:
    """See `asyncrl.generate.vllm.backend.Backend`."""

    facts: Facts
    shared_folder = ""

    def __init__(self, config: VLLMEngineConfig, *, fp32_head: bool = False) -> None:
        """Note what `start` will start."""
        self.config: VLLMEngineConfig | VLLMServerEngineConfig = config
        self._launch = partial(launch, config, fp32_head=fp32_head)
        self._can_sleep, self._num_replicas = config.sleep, config.data_parallel
        self.fullness: dict[int, tuple[float, int]] = {}
        self.llm: Any = None
        self.processes: set[psutil.Process] = set()
        self.sockets: OwnedFolder | None = None
        self._serial = itertools.count()

    @property
    def fault(self) -> str:
        """What vLLM died of."""
        return DEATH if self.llm is not None and self.llm.errored else ""

    async def start(self, folder: ModelFolder, on_room: Callable[[int, int], None], on_death: Callable[[], None]) -> None:
        """Start vLLM and load the model; streams tell of its death."""
        del on_death
        vllm = installed_version()
        self._on_room = on_room
        self.sockets = socket_folder(os.environ)
        path = self.sockets.path
        self.llm = await self._started(partial(self._launch, folder, self._watch, path), path)
        self.processes = processes_of(path)
        cache = self.llm.vllm_config.cache_config
        self._blocks_each = int(cache.num_gpu_blocks or 0) // self._num_replicas
        self.facts = Facts(
            num_slots=self.config.num_slots * self._num_replicas,
            block_tokens=int(cache.block_size),
            is_remote=False,
            has_spans=vllm.has_weight_versions,
            most_scored_tokens=self.llm.model_config.max_model_len - 1,
            why_no_sleep="" if self._can_sleep else "the engine cannot sleep: set generate.engine.sleep = true (GPU only)",
        )
        params = import_module("vllm.sampling_params")
        self._make_params: Callable[..., Any] = params.SamplingParams
        self._delta = params.RequestOutputKind.DELTA
        cores = [process.pid for process in psutil.Process().children() if process in self.processes]
        await self._call(self._in_every_worker("asyncrl_follow", os.getpid(), cores, str(path)))

    async def stream(self, request: EngineRequest, rules: RequestRules, salt: str) -> AsyncGenerator[Piece, None]:
        """Generate a completion, in pieces as vLLM makes them."""
        arguments = sampling_arguments(request, rules)
        params = self._make_params(**arguments, detokenize=False, flat_logprobs=True, output_kind=self._delta)
        prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids), "cache_salt": salt}
        vllm_id, is_finished = f"{request.request_id}.{next(self._serial)}", False
        try:
            async with contextlib.aclosing(self.llm.generate(prompt, params, vllm_id)) as outputs:
                async for output in outputs:
                    is_finished = output.finished
                    completion = output.outputs[0]
                    flat, spans = completion.logprobs, getattr(completion, "weight_versions", None)
                    yield Piece(
                        completion.token_ids,
                        [flat.logprobs[start] for start in flat.start_indices] if completion.token_ids else (),
                        completion.finish_reason,
                        None if spans is None else [(span.version, span.end - span.start) for span in spans],
                    )
        except Exception as error:
            raise self._failure(error) from error
        finally:
            if not (is_finished or self.fault):  # vLLM itself does so only once it has handed the request over
                await self.llm.abort(vllm_id)

    async def pause(self, *, clear_cache: bool) -> None:
        """Stop at a token boundary. AsyncLLM's own `pause_generation` does the same and then sleeps for 20 ms."""
        await self._call(self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache))

    async def resume(self) -> None:
        """Go on."""
        await self._call(self.llm.resume_generation())

    async def load(self, request: LoadRequest) -> list[LoadReply]:
        """Have every worker of every replica load."""
        replies = await self._call(self._in_every_worker("asyncrl_load", msgspec.json.encode(request).decode()))
        return [msgspec.json.decode(text, type=LoadReply) for text in replies]

    async def name_weights(self, label: str) -> None:
        """Name the weights that are there now."""
        await self._call(self.llm.update_weight_version(label))

    async def score(self, token_ids: Sequence[int], salt: str) -> list[float]:
        """Return the logprob of each token after the first.

        Prompt logprobs are taken before any temperature or filter, whatever `logprobs_mode` says, and never from cached prompts.
        """
        del salt
        return await self._call(self._score(token_ids))

    async def _score(self, token_ids: Sequence[int]) -> list[float]:
        params = self._make_params(max_tokens=1, seed=0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        prompt = {"type": "token", "prompt_token_ids": list(token_ids)}
        final = None
        async for output in self.llm.generate(prompt, params, f"asyncrl-score-{next(self._serial)}"):
            final = output
        assert final is not None
        return [position[token].logprob for position, token in zip(final.prompt_logprobs[1:], token_ids[1:], strict=True)]

    async def sleep(self, level: SleepLevel) -> None:
        """Give memory back."""
        await self._call(self.llm.sleep(level, mode="keep"))

    async def wake_up(self, tag: str = "") -> None:
        """Take memory again."""
        await self._call(self.llm.wake_up([tag] if tag else None))

    async def look(self) -> None:
        """Do nothing: `fault` knows."""

    async def close(self) -> None:
        """End vLLM's processes."""
        try:
            if (llm := self.llm) is not None:
                path = self.sockets.path if self.sockets is not None else Path()
                await asyncio.to_thread(lambda: shut_down(llm, self.processes | processes_of(path)))
                await asyncio.sleep(0)  # vLLM closes its sockets in a callback; only then does its context end
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.to_thread(llm.engine_core.resources.ctx.term), _DEATH_CHECK_S)
        finally:
            if self.sockets is not None:
                self.sockets.close()

    async def _in_every_worker(self, method: str, *args: object) -> list[Any]:
        """Call a method of every worker's; by `collective_rpc` only those of the first data-parallel engine would answer."""
        client = self.llm.engine_core
        try:
            async with asyncio.TaskGroup() as tasks:
                calls = [
                    tasks.create_task(client._call_utility_async("collective_rpc", method, None, args, None, engine=engine))  # noqa: SLF001
                    for engine in client.core_engines
                ]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return [reply for call in calls for reply in call.result()]

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Await something of vLLM's, which never answers once its engine process is dead."""
        task = asyncio.get_running_loop().create_task(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_DEATH_CHECK_S)
                if not task.done() and self.fault:
                    break
            return task.result()  # of one that is not done: InvalidStateError
        except Exception as error:
            raise self._failure(error) from error
        finally:
            task.cancel()

    def _failure(self, error: Exception) -> GenerationError:
        if isinstance(error, GenerationError):
            return error
        return EngineDied(self.fault) if self.fault else GenerationError(f"vLLM failed: {type(error).__name__}: {error}")

    def _watch(self, config: Any, engine_index: int = 0) -> SimpleNamespace:  # noqa: ANN401 - vLLM's
        """Return what vLLM calls a stat logger: it hears after every step how full one of the engines is."""
        del config

        def record(scheduler_stats: Any = None, *_: object, **__: object) -> None:  # noqa: ANN401 - vLLM's
            if scheduler_stats is None:
                return
            self.fullness[engine_index] = (1.0 - scheduler_stats.kv_cache_usage, scheduler_stats.num_running_reqs)
            free_blocks = sum(share for share, _ in self.fullness.values()) * self._blocks_each
            self._on_room(int(free_blocks), sum(running for _, running in self.fullness.values()))

        def ignore(*_: object) -> None:
            pass

        return SimpleNamespace(record=record, log=ignore, log_engine_initialized=ignore, record_sleep_state=ignore)

    @staticmethod
    async def _started(start: Callable[[], Any], sockets: Path) -> Any:  # noqa: ANN401 - an AsyncLLM
        """Run `start` on a thread; where the caller is cancelled meanwhile, what it started is ended when it is there."""
        running = asyncio.get_running_loop().run_in_executor(None, start)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            started = (await asyncio.wait({running}))[0].pop()
            if started.exception() is None:
                await asyncio.to_thread(lambda: shut_down(started.result(), processes_of(sockets)))
            raise
