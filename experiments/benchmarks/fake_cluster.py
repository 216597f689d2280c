"""A whole run's processes in one: N generators, a reward worker and a learner that take no time over anything.

Each has a connection of its own and says what the real one would say: hello, heartbeats, ready, samples, scores, versions, steps.
Nothing is computed: a sample's tokens are made once, a step is done when its batch has arrived. So the controller, this process's
parent, is never waited for by anything but its own back-pressure. At versions `MEASURED_FROM` and `MEASURED_TO` the time and
the parent's CPU seconds are written to `RUN/marks.json`.

`python -m benchmarks.fake_cluster RUN_FOLDER`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil

from asyncrl.config.load import load_config
from asyncrl.config.run import RunConfig
from asyncrl.control.launch.process_main import ignore_interrupts, watch_parent
from asyncrl.control.launch.processes import plan_processes
from asyncrl.errors import ConnectionClosed
from asyncrl.pipeline import ENDPOINT_FILE
from asyncrl.schema.batches import StepBatch, StepDone
from asyncrl.schema.codec import Message
from asyncrl.schema.control import (
    Checkpoint,
    CheckpointDone,
    EngineReady,
    Heartbeat,
    LearnerReady,
    LoadModel,
    ProcessKind,
    Shutdown,
)
from asyncrl.schema.samples import GroupWork, Samples, Score, ScoreRequest, Scores, ids_to_bytes
from asyncrl.schema.weights import VersionLive, WeightsAvailable
from asyncrl.transport.protocol import Connection, Lane, new_hello
from asyncrl.transport.zmq_client import open_connection
from benchmarks.samples import no_weights, random_sample

RESULT_FILE = "marks.json"
MEASURED_FROM, MEASURED_TO = 4, 12
"""Versions at which the controller is looked at; the steps before fill the pipeline."""
PROMPT_TOKENS = 64
GAUGES = dict.fromkeys(
    (
        "process/tokens_generated", "process/requests_running", "process/slots", "process/idle_s", "process/busy_s",
        "process/resident_bytes", "process/version",
    ),
    1.0,
)  # fmt: skip
"""A generator's heartbeat has as many."""


class Mark(msgspec.Struct, frozen=True):
    """A moment of the controller."""

    step: int
    wall_s: float
    cpu_s: float
    """User and system seconds of the controller so far."""


class Member:
    """One process of the cluster."""

    def __init__(self, kind: ProcessKind, name: str, config: RunConfig, run_folder: Path) -> None:
        self.kind, self.name, self.config, self.run_folder = kind, name, config, run_folder
        self.connection: Connection
        self._sample = random_sample(config.generate.sampling.max_new_tokens, PROMPT_TOKENS, name)
        self._controller = psutil.Process(os.getppid())
        self._marks: list[Mark] = []

    async def live(self) -> None:
        """Connect and answer until the controller says goodbye."""
        address = (self.run_folder / ENDPOINT_FILE).read_text(encoding="utf-8")
        hello = new_hello(self.kind, self.name)
        self.connection = await open_connection(address, hello, self.config.transport, self.run_folder, timeout_s=60.0)
        try:
            async with asyncio.TaskGroup() as loops:
                background = [loops.create_task(self._beat()), loops.create_task(self._work())]
                if self.kind == "learner":
                    await self._tell(no_weights(0), LearnerReady(0, str(self.run_folder)))
                while not isinstance(order := await self._next(Lane.CONTROL), Shutdown):
                    await self._obey(order)
                for loop in background:
                    loop.cancel()
        except* ConnectionClosed:
            pass
        await self.connection.close()

    async def _next(self, lane: Lane) -> Message:
        delivery = await self.connection.receive(lane)
        delivery.ack()
        return delivery.message

    async def _tell(self, *messages: Message) -> None:
        for message in messages:
            await self.connection.send(message, Lane.CONTROL)

    async def _beat(self) -> None:
        while True:
            self.connection.try_send(Heartbeat(self.name, time.monotonic(), "", 0.0, GAUGES), Lane.CONTROL)
            await asyncio.sleep(self.config.supervision.heartbeat_s)

    async def _obey(self, order: Message) -> None:
        """Get ready, take a version, or pretend to write a checkpoint."""
        if self.kind == "generator" and isinstance(order, LoadModel):
            await self._tell(EngineReady(self.name, self.config.generate.engine.slots, -1))
        elif self.kind == "generator" and isinstance(order, WeightsAvailable):
            versions = ids_to_bytes(np.full(self._sample.num_tokens, order.version, np.int32))
            self._sample = msgspec.structs.replace(self._sample, versions=versions)
            await self._tell(VersionLive(order.version, self.name, time.monotonic(), 1.0, 1.0, -1.0))
        elif self.kind == "learner" and isinstance(order, Checkpoint):
            folder = self.run_folder / "checkpoints" / f"step-{self.config.num_steps:06d}"
            await self._tell(CheckpointDone(self.config.num_steps, str(folder), 0.0))

    async def _work(self) -> None:
        """Answer a group with samples, a sample with a score, a batch with a step."""
        while True:
            delivery = await self.connection.receive(Lane.DATA)
            match work := delivery.message:
                case GroupWork():
                    placed = {"group_id": work.group_id, "attempt": work.attempt, "purpose": work.purpose}
                    members = [msgspec.structs.replace(self._sample, index=index, **placed) for index in work.indices]
                    await self.connection.send(Samples.of(members))
                case ScoreRequest():
                    scores = [Score(index, float(index % 2), {"answer_match": float(index % 2)}) for index in work.indices]
                    await self.connection.send(Scores(work.group_id, work.attempt, tuple(scores), self.name))
                case StepBatch(step):
                    now, metrics = time.monotonic(), {"data/samples": float(len(work.samples)), "reward/mean": 0.5}
                    await self._tell(no_weights(step + 1), StepDone(step, step + 1, metrics, now, now))
                    if step + 1 in {MEASURED_FROM, MEASURED_TO}:
                        times = self._controller.cpu_times()
                        self._marks.append(Mark(step + 1, time.perf_counter(), times.user + times.system))
                        (self.run_folder / RESULT_FILE).write_bytes(msgspec.json.encode(self._marks))
            delivery.ack()


async def live_all(run_folder: Path) -> None:
    """Be every process that the run wants."""
    config = load_config(run_folder / "config.toml")
    async with asyncio.TaskGroup() as cluster:
        for planned in plan_processes(config):
            member = Member(planned.kind, planned.name, config, run_folder)
            cluster.create_task(member.live(), name=planned.name)


if __name__ == "__main__":
    ignore_interrupts()
    watch_parent()
    asyncio.run(live_all(Path(sys.argv[1])))
