"""The inference process: completions in, reference log-probabilities and reward-model scores out, forward only.

Owns the models from LoadModel to Shutdown, one thread on which its models run, and four loops over one connection:
- orders (CONTROL): load the models, take a shared device or give it back, shut down;
- requests (DATA): put what arrives into the queue, which the channel's window bounds;
- batches: while the device is its own, take what shares a forward pass off the queue, run it on the thread, send the results,
  acknowledge their requests;
- heartbeat: what it does or waits for, and its gauges.

Invariants: every request ends in one InferResult, with values or with the reason why there are none; it is acknowledged once its
result is handed over, so that the controller's window is the only queue there is; nothing is scored while others have a shared
device; only a model that cannot be opened or run ends the process.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from asyncrl.clock import Clock
from asyncrl.config.placement_rules import inference_takes_turns
from asyncrl.config.run import RunConfig
from asyncrl.errors import first_fault
from asyncrl.inference.batching import num_tokens, take_batch
from asyncrl.inference.offload import open_scorer_offload
from asyncrl.inference.scorer import Scorer
from asyncrl.observe.memory import MemoryLine
from asyncrl.observe.steps import JsonLines
from asyncrl.residency.manager import ResidencyManager
from asyncrl.schema.control import Heartbeat, LoadModel, ModelsReady, SetPhase, Shutdown
from asyncrl.schema.samples import InferRequest, InferResult
from asyncrl.transport.protocol import Connection, Delivery, Lane

log = logging.getLogger(__name__)

T = TypeVar("T")


async def run_inference_worker(
    config: RunConfig, run_folder: Path, connection: Connection, clock: Clock, name: str = "inference-0"
) -> None:
    """Serve until Shutdown arrives or the connection closes.

    Args:
        config: Of the run.
        run_folder: Of the run; `memory/` and `swap/` in it are written where the device is shared.
        connection: To the controller.
        clock: Times batches and heartbeats.
        name: This process's name, as it said at hello.

    Raises:
        ConfigError: A model cannot be opened, or is not of the sort its place needs.
    """
    worker = InferenceWorker(config, run_folder, connection, clock, name)
    try:
        await worker.run()
    except BaseExceptionGroup as group:
        fault = first_fault(group)
        if fault is not None:
            raise fault from group
        log.info("the connection to the controller is closed")
    finally:
        await worker.close()


class InferenceWorker:
    """One worker's state and loops; `run_inference_worker` is the way in."""

    def __init__(self, config: RunConfig, run_folder: Path, connection: Connection, clock: Clock, name: str) -> None:
        self._config, self._run_folder, self._connection, self._clock, self._name = config, run_folder, connection, clock, name
        threads = config.inference.num_threads
        self._thread = ThreadPoolExecutor(1, "asyncrl-inference", torch.set_num_threads, (threads,))
        self._scorer: Scorer | None = None
        self._offload: tuple[ResidencyManager, JsonLines[MemoryLine]] | None = None
        """Where the device is shared by turns: who moves the models, and the timeline of it."""
        self._has_device = False
        self._queue: deque[InferRequest] = deque()
        self._deliveries: dict[int, Delivery] = {}
        """By the identity of their requests, which the queue and the batch in hand keep alive."""
        self._news = asyncio.Event()
        """A request has come, or the device."""
        self._started_s = clock.now()
        self._idle_since_s: float | None = clock.now()
        self._idle_s = 0.0
        self._num_bytes = 0
        """Of its models, wherever they are."""
        self._num_scored = 0
        self._num_failed = 0
        self._num_tokens = 0
        self._process = psutil.Process()

    async def run(self) -> None:
        """Run the four loops until the orders end."""
        async with asyncio.TaskGroup() as loops:
            background = [
                loops.create_task(self._receive(), name="requests"),
                loops.create_task(self._serve(), name="batches"),
                loops.create_task(self._beat(), name="heartbeat"),
            ]
            try:
                await self._obey()
            finally:
                for loop in background:
                    loop.cancel()

    async def close(self) -> None:
        """Wait for the batch in hand, and end the thread."""

        def end() -> None:
            self._thread.shutdown()
            if self._offload is not None:
                self._offload[1].close()

        # Shielded: a cancelled future that no thread has begun yet is never run.
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, end))

    # -- loops -----------------------------------------------------------------------------------------------------------

    async def _obey(self) -> None:
        while True:
            delivery = await self._connection.receive(Lane.CONTROL)
            message = delivery.message
            if isinstance(message, LoadModel):
                await self._load(Path(message.model_folder))
            elif isinstance(message, SetPhase):
                await self._reach(message)
            delivery.ack()
            if isinstance(message, Shutdown):
                log.info("shutting down: %s", message.reason or "asked to")
                return

    async def _load(self, model_folder: Path) -> None:
        """Open every model; told again (a learner came back), only say that they are there."""
        if self._scorer is None:
            await self._on_thread(lambda: self._open(model_folder))
        assert self._scorer is not None
        await self._connection.send(ModelsReady(self._name, self._scorer.names, self._num_bytes), Lane.CONTROL)
        if self._offload is None:
            self._take_device(True)

    def _open(self, model_folder: Path) -> None:
        scorer = Scorer(self._config, model_folder)
        self._num_bytes = scorer.num_bytes
        if inference_takes_turns(self._config):
            self._offload = open_scorer_offload(
                scorer, self._config, self._run_folder, model_folder, self._name, self._clock
            )  # fmt: skip
        self._scorer = scorer

    async def _reach(self, order: SetPhase) -> None:
        """Take a shared device or, after the batch in hand, give it back, and say so."""
        assert self._offload is not None, f"told to {order.phase} before the models were loaded"
        manager = self._offload[0]
        if order.phase != "inference":
            self._take_device(False)
        reached = await self._on_thread(lambda: manager.switch(order.phase, order.number))
        self._take_device(order.phase == "inference")
        await self._connection.send(reached, Lane.CONTROL)

    def _take_device(self, has_device: bool) -> None:
        self._has_device = has_device
        self._news.set()

    async def _receive(self) -> None:
        while True:
            delivery = await self._connection.receive(Lane.DATA)
            if isinstance(delivery.message, InferRequest):
                self._queue.append(delivery.message)
                self._deliveries[id(delivery.message)] = delivery
                self._news.set()
            else:
                log.warning("an inference worker has no use for %s", type(delivery.message).__name__)
                delivery.ack()

    async def _serve(self) -> None:
        while True:
            while not (self._queue and self._has_device):
                self._news.clear()
                await self._news.wait()
            assert self._scorer is not None
            self._set_idle(False)
            requests = take_batch(self._queue, self._config.inference.tokens_per_batch)
            started_s = self._clock.now()
            answers = await self._on_thread(partial(self._scorer.score, requests))
            finished_s = self._clock.now()
            for request, answer in zip(requests, answers, strict=True):
                result = InferResult(
                    request.group_id, request.index, request.attempt, answer.reference_logprobs, answer.rewards, answer.error,
                    self._name, started_s, finished_s, request.purpose,
                )  # fmt: skip
                await self._connection.send(result, Lane.DATA)
                self._deliveries.pop(id(request)).ack()
            self._num_scored += len(requests)
            self._num_failed += sum(bool(answer.error) for answer in answers)
            self._num_tokens += sum(map(num_tokens, requests))
            self._set_idle(not (self._queue and self._has_device))

    async def _beat(self) -> None:
        while True:
            waiting_for = ""
            if self._scorer is None:
                waiting_for = "its models to load"
            elif self._idle_since_s is not None:
                is_away = self._queue and not self._has_device
                waiting_for = "the device, which others have" if is_away else "a sample to score"
            since_s = (self._idle_since_s or 0.0) if waiting_for else 0.0
            beat = Heartbeat(self._name, self._clock.now(), waiting_for, since_s, self._gauges())
            self._connection.try_send(beat, Lane.CONTROL)
            await self._clock.sleep(self._config.supervision.heartbeat_s)

    # -- small things ----------------------------------------------------------------------------------------------------

    def _gauges(self) -> dict[str, float]:
        now = self._clock.now()
        idle_s = self._idle_s + (0.0 if self._idle_since_s is None else now - self._idle_since_s)
        busy_s = now - self._started_s - idle_s
        return {
            "process/samples_scored": float(self._num_scored - self._num_failed),
            "process/samples_failed": float(self._num_failed),
            "process/samples_scoring": float(len(self._deliveries)),
            "process/tokens_judged": float(self._num_tokens),
            "process/judged_tokens_per_sec": self._num_tokens / busy_s if busy_s > 0 else 0.0,
            "process/models_loaded": float(len(self._scorer.names) if self._scorer else 0),
            "process/model_bytes": float(self._num_bytes),
            "process/idle_s": idle_s,
            "process/busy_s": busy_s,
            "process/resident_bytes": float(self._process.memory_info().rss),
        }

    def _set_idle(self, is_idle: bool) -> None:
        now = self._clock.now()
        if is_idle and self._idle_since_s is None:
            self._idle_since_s = now
        elif not is_idle and self._idle_since_s is not None:
            self._idle_s += now - self._idle_since_s
            self._idle_since_s = None

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
