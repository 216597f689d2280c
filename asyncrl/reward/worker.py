"""The reward worker process: score requests in, scores out, as many at once as keep its scoring processes busy.

Three loops over one connection:
- requests (DATA): one task a request, at most `RewardPool.capacity`; a request is acknowledged once its Score is handed over;
- orders (CONTROL): Shutdown; what scores wait for is lost with it, and the ledger has them scored again at a resume;
- heartbeat: what it does or waits for, and its gauges. It beats while the scoring processes still start.

Invariant: every request ends in one Score, with a reward or with the reason why there is none; only a scoring process that
cannot be started ends the worker. Nothing is scored on this event loop: see pool.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from asyncrl.clock import Clock
from asyncrl.config.run import RunConfig
from asyncrl.errors import first_fault
from asyncrl.reward.pool import RewardPool
from asyncrl.reward.sandbox.confined import resident_bytes_of_tree
from asyncrl.schema.control import Heartbeat, Shutdown
from asyncrl.schema.samples import ScoreRequest
from asyncrl.transport.protocol import Connection, Delivery, Lane

log = logging.getLogger(__name__)


async def run_reward_worker(
    config: RunConfig, run_folder: Path, connection: Connection, clock: Clock, name: str = "reward-0"
) -> None:
    """Serve until Shutdown arrives or the connection closes.

    Args:
        config: Of the run.
        run_folder: Of the run; what rewards print goes to `logs/NAME-printed.log` there.
        connection: To the controller.
        clock: Times scores and heartbeats; time limits are real time.
        name: This process's name, as it said at hello.

    Raises:
        ConfigError: The rewards are configured wrongly.
        RewardError: They cannot be built here (a missing package, no sandbox).
    """
    try:
        await RewardWorker(config, connection, clock, name, run_folder).run()
    except BaseExceptionGroup as group:
        fault = first_fault(group)
        if fault is not None:
            raise fault from None
        log.info("the connection to the controller is closed")


class RewardWorker:
    """One worker's state and loops; `run_reward_worker` is the way in."""

    def __init__(self, config: RunConfig, connection: Connection, clock: Clock, name: str, run_folder: Path) -> None:
        self._config, self._connection, self._clock, self._name = config, connection, clock, name
        printed = run_folder / "logs" / f"{name}-printed.log"
        printed.parent.mkdir(exist_ok=True)
        self._pool = RewardPool(config.reward, clock, name, printed)
        self._is_ready = False
        self._num_scoring = 0
        self._since_s = clock.now()
        """When it last began or ceased to have nothing to do."""
        self._idle_s = 0.0

    async def run(self) -> None:
        """Run the three loops until the orders end."""
        async with asyncio.TaskGroup() as loops:
            background = [
                loops.create_task(self._serve_requests(), name="requests"),
                loops.create_task(self._beat(), name="heartbeat"),
            ]
            try:
                await self._obey()
            finally:
                for loop in background:
                    loop.cancel()

    async def _obey(self) -> None:
        """Wait for Shutdown; whatever else is said on this lane is for others."""
        while True:
            delivery = await self._connection.receive(Lane.CONTROL)
            delivery.ack()
            if isinstance(delivery.message, Shutdown):
                log.info("shutting down: %s", delivery.message.reason or "asked to")
                return

    async def _serve_requests(self) -> None:
        async with self._pool as pool, asyncio.TaskGroup() as samples:
            self._is_ready = True
            self._since_s = self._clock.now()
            room = asyncio.Semaphore(pool.capacity)
            while True:
                await room.acquire()
                delivery = await self._connection.receive(Lane.DATA)
                if isinstance(delivery.message, ScoreRequest):
                    samples.create_task(self._serve(delivery.message, delivery, room))
                else:
                    log.warning("a reward worker has no use for %s", type(delivery.message).__name__)
                    delivery.ack()
                    room.release()

    async def _serve(self, request: ScoreRequest, delivery: Delivery, room: asyncio.Semaphore) -> None:
        self._begin()
        try:
            score = await self._pool.score(request)
            await self._connection.send(score, Lane.DATA)
            delivery.ack()
        finally:
            self._end()
            room.release()

    async def _beat(self) -> None:
        while True:
            waiting_for = self._waiting_for()
            since_s = self._since_s if waiting_for else 0.0
            beat = Heartbeat(self._name, self._clock.now(), waiting_for, since_s, self._gauges())
            self._connection.try_send(beat, Lane.CONTROL)
            await self._clock.sleep(self._config.supervision.heartbeat_s)

    def _gauges(self) -> dict[str, float]:
        counts = self._pool.counts
        idle_now_s = self._clock.now() - self._since_s if self._is_ready and not self._num_scoring else 0.0
        return {
            "process/samples_scored": float(counts.scored),
            "process/samples_failed": float(counts.failed),
            "process/samples_scoring": float(self._num_scoring),
            "process/score_s_mean": counts.busy_s / max(counts.scored + counts.failed, 1),
            "process/children_replaced": float(counts.replaced),
            "process/samples_over_limit": float(counts.over_limit),
            "process/idle_s": self._idle_s + idle_now_s,
            "process/resident_bytes": float(resident_bytes_of_tree(os.getpid())),
        }

    def _waiting_for(self) -> str:
        if not self._is_ready:
            return "its scoring processes to start"
        return "" if self._num_scoring else "a sample to score"

    def _begin(self) -> None:
        if not self._num_scoring:
            now_s = self._clock.now()
            self._idle_s += now_s - self._since_s
            self._since_s = now_s
        self._num_scoring += 1

    def _end(self) -> None:
        self._num_scoring -= 1
        if not self._num_scoring:
            self._since_s = self._clock.now()
