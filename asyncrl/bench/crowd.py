"""A whole run's processes in one: N generators, a reward worker and a learner that take no time over anything.

Each has a connection of its own and says what the real one would say: hello, heartbeats, ready, samples, scores, versions, steps.
Nothing is computed: a sample's tokens are made once, a step is done when its batch has arrived. So the controller, this process's
parent, is never waited for by anything but its own back-pressure. At versions `MEASURED_FROM` and `MEASURED_TO` the time and
the parent's CPU seconds are written to `RUN/crowd.json`.

`python -m asyncrl.bench.crowd RUN_FOLDER`; called by bench/controller_host.py.
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
from asyncrl.control.parent_watch import ignore_interrupts, watch_parent
from asyncrl.control.process_plan import plan_processes
from asyncrl.errors import ConnectionClosed
from asyncrl.pipeline import ENDPOINT_FILE
from asyncrl.schema.batches import StepBatch, StepDone
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
from asyncrl.schema.samples import GroupWork, Sample, Score, ScoreRequest, ids_to_bytes, logprobs_to_bytes
from asyncrl.schema.weights import VersionLive, WeightsAvailable, WeightsManifest
from asyncrl.transport.channel import Connection, Lane
from asyncrl.transport.open import new_hello, open_connection

RESULT_FILE = "crowd.json"
MEASURED_FROM, MEASURED_TO = 4, 12
"""Versions at which the controller is looked at; the steps before fill the pipeline."""
NUM_TOKENS, PROMPT_TOKENS = 256, 64
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
    """One process of the crowd: what all of them do."""

    def __init__(self, kind: ProcessKind, name: str, config: RunConfig, run_folder: Path) -> None:
        self.kind, self.name, self.config, self.run_folder = kind, name, config, run_folder
        self.connection: Connection

    async def live(self) -> None:
        """Connect and answer until the controller says goodbye."""
        address = (self.run_folder / ENDPOINT_FILE).read_text(encoding="utf-8")
        hello = new_hello(self.kind, self.name)
        self.connection = await open_connection(address, hello, self.config.transport, self.run_folder, timeout_s=60.0)
        try:
            async with asyncio.TaskGroup() as loops:
                background = [loops.create_task(self._beat()), loops.create_task(self._work())]
                await self.begin()
                await self._obey()
                for loop in background:
                    loop.cancel()
        except* ConnectionClosed:
            pass
        await self.connection.close()

    async def begin(self) -> None:
        """Say what is said unasked."""

    async def order(self, message: object) -> None:
        """Carry out an order."""

    async def work(self, message: object) -> None:
        """Do a piece of work and send what comes of it."""

    async def _obey(self) -> None:
        while True:
            delivery = await self.connection.receive(Lane.CONTROL)
            delivery.ack()
            if isinstance(delivery.message, Shutdown):
                return
            await self.order(delivery.message)

    async def _work(self) -> None:
        while True:
            delivery = await self.connection.receive(Lane.DATA)
            await self.work(delivery.message)
            delivery.ack()

    async def _beat(self) -> None:
        while True:
            self.connection.try_send(Heartbeat(self.name, time.monotonic(), "", 0.0, GAUGES), Lane.CONTROL)
            await asyncio.sleep(self.config.supervision.heartbeat_s)


class Generator(Member):
    """Answers a group with samples as fast as the window lets it."""

    def __init__(self, kind: ProcessKind, name: str, config: RunConfig, run_folder: Path) -> None:
        super().__init__(kind, name, config, run_folder)
        self._sample = _sample_of(name)

    async def order(self, message: object) -> None:
        """Get ready, or take a version."""
        if isinstance(message, LoadModel):
            slots = self.config.generate.engine.num_slots
            await self.connection.send(EngineReady(self.name, slots, -1), Lane.CONTROL)
        elif isinstance(message, WeightsAvailable):
            versions = ids_to_bytes(np.full(NUM_TOKENS, message.version, np.int32))
            self._sample = msgspec.structs.replace(self._sample, versions=versions)
            live = VersionLive(message.version, self.name, time.monotonic(), 1.0, 1.0, -1.0)
            await self.connection.send(live, Lane.CONTROL)

    async def work(self, message: object) -> None:
        """Send a group's samples."""
        assert isinstance(message, GroupWork), message
        for index in message.indices:
            sample = msgspec.structs.replace(
                self._sample, group_id=message.group_id, index=index, attempt=message.attempt, purpose=message.purpose
            )
            await self.connection.send(sample)


class Reward(Member):
    """Finds every other member right."""

    async def work(self, message: object) -> None:
        """Send a score."""
        assert isinstance(message, ScoreRequest), message
        reward = float(message.index % 2)
        score = Score(message.group_id, message.index, message.attempt, reward, {"answer_match": reward}, "", self.name)
        await self.connection.send(score)


class Learner(Member):
    """Has trained a batch once it is there, and measures the controller meanwhile."""

    def __init__(self, kind: ProcessKind, name: str, config: RunConfig, run_folder: Path) -> None:
        super().__init__(kind, name, config, run_folder)
        self._controller = psutil.Process(os.getppid())
        self._marks: list[Mark] = []

    async def begin(self) -> None:
        """Publish version 0."""
        await self.connection.send(_version(0), Lane.CONTROL)
        await self.connection.send(LearnerReady(0, str(self.run_folder)), Lane.CONTROL)

    async def order(self, message: object) -> None:
        """Pretend to write a checkpoint."""
        if isinstance(message, Checkpoint):
            folder = self.run_folder / "checkpoints" / f"step-{self.config.num_steps:06d}"
            await self.connection.send(CheckpointDone(self.config.num_steps, str(folder), 0.0), Lane.CONTROL)

    async def work(self, message: object) -> None:
        """Take a step."""
        assert isinstance(message, StepBatch), message
        now = time.monotonic()
        metrics = {"data/samples": float(len(message.samples)), "reward/mean": 0.5}
        await self.connection.send(_version(message.step + 1), Lane.CONTROL)
        await self.connection.send(StepDone(message.step, message.step + 1, metrics, now, now), Lane.CONTROL)
        if message.step + 1 in {MEASURED_FROM, MEASURED_TO}:
            times = self._controller.cpu_times()
            self._marks.append(Mark(message.step + 1, time.perf_counter(), times.user + times.system))
            (self.run_folder / RESULT_FILE).write_bytes(msgspec.json.encode(self._marks))


KINDS: dict[ProcessKind, type[Member]] = {"generator": Generator, "reward": Reward, "learner": Learner}


def _sample_of(generator: str) -> Sample:
    rng = np.random.default_rng(0)
    return Sample(
        group_id=0,
        index=0,
        attempt=0,
        prompt_ids=ids_to_bytes(rng.integers(0, 50_000, PROMPT_TOKENS, dtype=np.int32)),
        token_ids=ids_to_bytes(rng.integers(0, 50_000, NUM_TOKENS, dtype=np.int32)),
        logprobs=logprobs_to_bytes(-rng.random(NUM_TOKENS, dtype=np.float32)),
        versions=ids_to_bytes(np.zeros(NUM_TOKENS, dtype=np.int32)),
        finish_reason="stop",
        text="word " * (NUM_TOKENS * 4 // 5),
        generator=generator,
        started_s=1.0,
        finished_s=2.0,
    )


def _version(number: int) -> WeightsAvailable:
    return WeightsAvailable(number, "none", "", WeightsManifest((), 0), "", time.time())  # noqa: TID251 - wall clock of a message


async def live_all(run_folder: Path) -> None:
    """Be every process that the run wants."""
    config = load_config(run_folder / "config.toml")
    async with asyncio.TaskGroup() as crowd:
        for planned in plan_processes(config):
            member = KINDS[planned.kind](planned.kind, planned.name, config, run_folder)
            crowd.create_task(member.live(), name=planned.name)


if __name__ == "__main__":
    ignore_interrupts()
    watch_parent()
    asyncio.run(live_all(Path(sys.argv[1])))
