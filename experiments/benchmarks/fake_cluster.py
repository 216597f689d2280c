"""A whole run's processes in one: N generators, a reward worker and a learner that take no time over anything.

Each has a connection of its own and says what the real one would say: hello, heartbeats, ready, samples, scores, versions, steps.
Nothing is computed: a sample's tokens are made once, a step is done when its batch has arrived. So the controller, this process's
parent, is never waited for by anything but its own back-pressure. At versions `MEASURED_FROM` and `MEASURED_TO` the time and
the parent's CPU seconds (user and system) are written to `RUN/marks.json`.

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

from asyncrl.clock import SystemClock
from asyncrl.config.load import load_config
from asyncrl.config.run import RunConfig
from asyncrl.control.launch.process_main import ignore_interrupts, watch_parent
from asyncrl.control.launch.processes import plan_processes
from asyncrl.pipeline import ENDPOINT_FILE
from asyncrl.schema import control as msg
from asyncrl.schema.samples import GroupWork, Samples, Score, ScoreRequest, Scores, StepBatch, StepDone, ids_to_bytes
from asyncrl.schema.weights import VersionLive, WeightsAvailable
from asyncrl.transport.protocol import Lane, new_hello
from asyncrl.transport.stage import Stage
from asyncrl.transport.zmq_client import open_connection
from benchmarks.samples import no_weights, random_sample

RESULT_FILE = "marks.json"
MEASURED_FROM, MEASURED_TO = 4, 12
"""Versions at which the controller is looked at; the steps before fill the pipeline."""
PROMPT_TOKENS = 64
GAUGES = {f"process/{name}": 1.0 for name in ("tokens_generated", "requests_running", "slots", "version")}
"""A generator's heartbeat has as many."""


class Member:
    """One process of the cluster."""

    def __init__(self, kind: msg.ProcessKind, name: str, config: RunConfig, run_folder: Path) -> None:
        self.kind, self.name, self.config, self.run_folder = kind, name, config, run_folder
        self._sample = random_sample(config.generate.sampling.max_new_tokens, PROMPT_TOKENS, name)
        self._marks: list[tuple[float, float]] = []

    async def live(self) -> None:
        """Connect and answer until the controller says goodbye."""
        address = (self.run_folder / ENDPOINT_FILE).read_text(encoding="utf-8")
        hello = new_hello(self.kind, self.name)
        connection = await open_connection(address, hello, self.config.transport, self.run_folder, timeout_s=60.0)
        self.stage = Stage(connection, SystemClock(), self.name, self.config.supervision.heartbeat_s, lambda: ("", GAUGES))
        await self.stage.run(self._obey, self._work())
        await connection.close()

    async def _obey(self, order: msg.Message) -> None:
        """Get ready, take a version, or pretend to write a checkpoint."""
        match order:
            case msg.LoadModel():
                await self.stage.tell(msg.EngineReady(self.name, self.config.generate.engine.slots, -1))
            case WeightsAvailable(version):
                versions = ids_to_bytes(np.full(self._sample.num_tokens, version, np.int32))
                self._sample = msgspec.structs.replace(self._sample, versions=versions)
                await self.stage.tell(VersionLive(version, self.name, time.monotonic(), 1.0, 1.0, -1.0))
            case msg.Checkpoint():
                folder = self.run_folder / "checkpoints" / f"step-{self.config.num_steps:06d}"
                await self.stage.tell(msg.CheckpointDone(self.config.num_steps, str(folder), 0.0))

    async def _work(self) -> None:
        """Answer a group with samples, a sample with a score, a batch with a step."""
        if self.kind == "learner":
            await self.stage.tell(no_weights(0))
            await self.stage.tell(msg.LearnerReady(0, str(self.run_folder)))
        while True:
            delivery = await self.stage.connection.receive(Lane.DATA)
            match work := delivery.message:
                case GroupWork():
                    placed = {"group_id": work.group_id, "attempt": work.attempt, "purpose": work.purpose}
                    members = [msgspec.structs.replace(self._sample, index=index, **placed) for index in work.indices]
                    await self.stage.connection.send(Samples.of(members))
                case ScoreRequest():
                    scores = [Score(index, float(index % 2), {"answer_match": float(index % 2)}) for index in work.indices]
                    await self.stage.connection.send(Scores(work.group_id, work.attempt, tuple(scores), self.name))
                case StepBatch(step):
                    now, metrics = time.monotonic(), {"data/samples": float(len(work.samples)), "reward/mean": 0.5}
                    await self.stage.tell(no_weights(step + 1))
                    await self.stage.tell(StepDone(step, step + 1, metrics, now, now))
                    if step + 1 in {MEASURED_FROM, MEASURED_TO}:
                        times = psutil.Process(os.getppid()).cpu_times()
                        self._marks.append((time.perf_counter(), times.user + times.system))
                        (self.run_folder / RESULT_FILE).write_bytes(msgspec.json.encode(self._marks))
            delivery.ack()


async def live_all(run_folder: Path) -> None:
    """Be every process that the run wants."""
    config = load_config(run_folder / "config.toml")
    async with asyncio.TaskGroup() as cluster:
        for planned in plan_processes(config):
            cluster.create_task(Member(planned.kind, planned.name, config, run_folder).live(), name=planned.name)


if __name__ == "__main__":
    ignore_interrupts()
    watch_parent()
    asyncio.run(live_all(Path(sys.argv[1])))
