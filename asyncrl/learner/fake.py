"""A learner without a model: a step takes `learner.fake_step_s` and makes a version without weights. No torch anywhere.

With the fake engine everything but the models runs: to measure the throughput of pipeline and rewards, and for tests.

Invariants: those of learner/worker.py. Steps are done in order, each once between two resumes; a checkpoint contains all that the
controller gave, in the format of a real one; Shutdown lets the present step finish.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from asyncrl.algorithms.diagnostics import batch_metrics
from asyncrl.clock import Clock
from asyncrl.config.live import with_settings
from asyncrl.config.run import RunConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.checkpoint_folder import TrainerState, newest_checkpoint, read_state, rename_newer, write_checkpoint
from asyncrl.schema.control import Checkpoint, CheckpointDone, LearnerReady, Message, Shutdown
from asyncrl.schema.samples import StepBatch, StepDone
from asyncrl.schema.weights import WeightsAvailable, WeightsManifest
from asyncrl.transport.protocol import Connection
from asyncrl.transport.stage import Stage

log = logging.getLogger(__name__)

NAME = "learner"
Announce = Callable[[WeightsAvailable], None]
"""Tells the controller of a version."""


class FakeLearner:
    """The fake learner's state and loops.

    Args:
        config: Config of the run; `learner.fake_step_s` is set.
        run_folder: Folder of the run; the learner owns `checkpoints/` in it.
        connection: To the controller.
        clock: Time.
        announce: Is told of every version; none has tensors.
    """

    def __init__(self, config: RunConfig, run_folder: Path, connection: Connection, clock: Clock, announce: Announce) -> None:
        self._config, self._run_folder, self._clock, self._announce = config, run_folder, clock, announce
        self._stage = Stage(connection, clock, NAME, config.supervision.heartbeat_s, self._report)
        self._version = 0
        self._checkpoint: Checkpoint | None = None
        self._at_work = asyncio.Lock()
        """Held during a step and while a checkpoint is written."""

    async def run(self) -> None:
        """Start from the newest checkpoint, and do steps until Shutdown arrives or the connection closes.

        Raises:
            LearnerError: A step came out of order, or all checkpoints are damaged.
        """
        newest = newest_checkpoint(self._run_folder / "checkpoints")
        if newest is not None:
            rename_newer(newest)
            self._version = read_state(newest).version
        log.info("at version %d, from %s, without a model", self._version, newest or "nothing")
        await self._stage.run(self._obey, self._train(newest))

    def _report(self) -> tuple[str, dict[str, float]]:
        waiting_for = f"the batch of step {self._version}" if self._stage.idle.is_idle else ""
        return waiting_for, {"process/version": float(self._version)}

    async def _obey(self, order: Message) -> None:
        match order:
            case Checkpoint():
                self._checkpoint = order
                async with self._at_work:
                    await self._write_what_is_due()
            case Shutdown():
                await self._at_work.acquire()

    async def _train(self, newest: Path | None) -> None:
        self._publish()
        await self._stage.tell(LearnerReady(self._version, str(self._run_folder / "model"), {}, str(newest or "")))
        waiting_from_s = self._clock.now()
        async for batch, delivery in self._stage.requests(StepBatch):
            if batch.step > self._version:
                raise LearnerError(f"step {batch.step} came while the learner is at version {self._version}: steps go in order")
            async with self._at_work:
                started_s = self._clock.now()
                if batch.step == self._version:
                    self._config = with_settings(self._config, batch.settings)
                    with self._stage.idle.running():
                        await self._clock.sleep(self._config.learner.fake_step_s or 0.0)
                    self._version += 1
                    self._publish()
                waited_s, metrics = started_s - waiting_from_s, batch_metrics(batch, None)
                await self._stage.tell(StepDone(batch.step, batch.step + 1, metrics, started_s, self._clock.now(), waited_s))
                delivery.ack()
                every = self._config.checkpoint.every_steps
                if every and self._version == batch.step + 1 and self._version % every == 0:
                    await self._write_checkpoint()
                await self._write_what_is_due()
            waiting_from_s = self._clock.now()

    def _publish(self) -> None:
        nothing = WeightsManifest((), 0, self._config.broadcast.bucket_bytes)
        medium, now = self._config.broadcast.medium.kind, self._clock.now()
        self._announce(WeightsAvailable(self._version, medium, "", nothing, "", now))

    async def _write_what_is_due(self) -> None:
        if self._checkpoint is not None and self._checkpoint.version <= self._version:
            self._checkpoint = None
            await self._write_checkpoint()

    async def _write_checkpoint(self) -> None:
        started_s, folder = self._clock.now(), self._run_folder / "checkpoints"
        state = TrainerState(self._version)
        path = await asyncio.to_thread(write_checkpoint, folder, state, lambda _: None, self._config.checkpoint.keep_last)
        await self._stage.tell(CheckpointDone(self._version, str(path), self._clock.now() - started_s))
