"""The reward worker process: score requests in, scores out, as many at once as keep its scoring processes busy.

Three loops over one connection:
- requests (DATA): one task a request, at most about `RewardPool.capacity` samples; a request is acknowledged once its Scores are
  handed over;
- orders (CONTROL): Shutdown; what scores wait for is lost with it, and the ledger has them scored again at a resume;
- heartbeat: what it does or waits for, and its gauges. It beats while the scoring processes still start.

Invariant: every request ends in one Scores, with rewards or with the reasons why there are none; only a scoring process that
cannot be started ends the worker. Nothing is scored on this event loop: see pool.py.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from asyncrl.clock import Clock
from asyncrl.config.run import RunConfig
from asyncrl.reward.pool import RewardPool
from asyncrl.reward.sandbox.confined import resident_bytes_of_tree
from asyncrl.schema.control import Message
from asyncrl.schema.samples import ScoreRequest
from asyncrl.transport.protocol import Connection, Delivery, Lane
from asyncrl.transport.stage import Stage


class RewardWorker:
    """One worker.

    Args:
        config: Of the run.
        run_folder: Of the run; what rewards print goes to `logs/NAME-printed.log` there.
        connection: To the controller.
        clock: Times scores and heartbeats; time limits are real time.
        name: This process's name, as it said at hello.
    """

    def __init__(self, config: RunConfig, run_folder: Path, connection: Connection, clock: Clock, name: str = "reward-0") -> None:
        self._stage = Stage(connection, clock, name, config.supervision.heartbeat_s, self._report)
        printed = run_folder / "logs" / f"{name}-printed.log"
        printed.parent.mkdir(exist_ok=True)
        self._pool = RewardPool(config.reward, clock, name, printed)
        self._is_ready = False
        self._num_scoring = 0
        """Samples."""
        self._has_room = asyncio.Event()

    async def run(self) -> None:
        """Serve until Shutdown arrives or the connection closes.

        Raises:
            ConfigError: The rewards are configured wrongly.
            RewardError: They cannot be built here (a missing package, no sandbox).
        """

        async def obey(_: Message) -> None:
            """Do nothing: but for Shutdown, what is said on this lane is for others."""

        await self._stage.run(obey, self._serve_requests())

    async def _serve_requests(self) -> None:
        async with self._pool as pool, asyncio.TaskGroup() as samples:
            self._is_ready = True
            async for request, delivery in self._stage.requests(ScoreRequest):
                self._num_scoring += len(request.indices)
                samples.create_task(self._serve(request, delivery))
                while self._num_scoring >= pool.capacity:
                    self._has_room.clear()
                    await self._has_room.wait()

    async def _serve(self, request: ScoreRequest, delivery: Delivery) -> None:
        try:
            with self._stage.idle.running():
                scores = await self._pool.score(request)
                await self._stage.connection.send(scores, Lane.DATA)
                delivery.ack()
        finally:
            self._num_scoring -= len(request.indices)
            self._has_room.set()

    def _report(self) -> tuple[str, dict[str, float]]:
        counts, waiting_for = self._pool.counts, "" if self._num_scoring else "a sample to score"
        return waiting_for if self._is_ready else "its scoring processes to start", {
            "process/samples_scored": float(counts.scored),
            "process/samples_failed": float(counts.failed),
            "process/samples_scoring": float(self._num_scoring),
            "process/score_s_mean": counts.busy_s / max(counts.scored + counts.failed, 1),
            "process/children_replaced": float(counts.replaced),
            "process/samples_over_limit": float(counts.over_limit),
            "process/resident_bytes": float(resident_bytes_of_tree(os.getpid())),
        }
