"""The learner process over an in-process channel: what the controller sees."""

import asyncio

import msgspec
import pytest

from asyncrl.clock import SystemClock
from asyncrl.config.learner import LearnerConfig, ScratchModel, WarmStart
from asyncrl.config.load import parse_config
from asyncrl.config.run import CheckpointConfig, RunConfig, SupervisionConfig
from asyncrl.errors import BroadcastError, LearnerError
from asyncrl.learner.fake import FakeLearner
from asyncrl.learner.ranks.group import RankLauncher
from asyncrl.learner.worker import LearnerWorker
from asyncrl.schema.control import Checkpoint, CheckpointDone, Heartbeat, LearnerReady
from asyncrl.schema.samples import StepDone
from tests.builders import Controller, working

ALPHABET = "abcdefghijklmnopqrstu"
CONFIG = RunConfig(
    model=ScratchModel(hidden_size=32, num_layers=1, num_heads=2),
    learner=LearnerConfig(learning_rate=1e-3, warmup_steps=1),
    supervision=SupervisionConfig(heartbeat_s=0.02),
)
WITHOUT_MODEL = {"learner": {"fake_step_s": 0.01}, "generate": {"engine": {"kind": "fake"}}, "supervision": {"heartbeat_s": 0.02}}
any_learner = pytest.mark.parametrize("config", [CONFIG, parse_config(WITHOUT_MODEL)], ids=["torch", "without a model"])
TIMEOUT_S = 20


class Publisher(Controller):
    """The other end: notes what was published."""

    def __init__(self, connection):
        super().__init__(connection)
        self.published = set()

    def publish(self, version, tensors, probe):
        self.published.add(version)
        return 0.0

    def announce(self, available):
        assert available.manifest.total_bytes == 0
        self.published.add(available.version)

    async def step(self, batch):
        await self.connection.send(batch)
        return await self.report(StepDone)


def learner(run_folder, config=CONFIG, examples=list):
    def learn(near, controller):
        if config.learner.fake_step_s is not None:
            return FakeLearner(config, run_folder, near, SystemClock(), controller.announce).run()
        worker = LearnerWorker(config, run_folder, near, SystemClock(), controller.publish, RankLauncher(config, None))
        controller.worker = worker
        return worker.run(examples, ALPHABET)

    return working("learner", "learner", learn, Publisher)


@any_learner
async def test_checkpoints_are_written_as_told_and_the_next_learner_goes_on_from_the_newest_whole_one(kit, tmp_path, config):
    """At every multiple of `every_steps`, where the controller says so, and at no other."""
    config = msgspec.structs.replace(config, checkpoint=CheckpointConfig(every_steps=2, keep_last=9))
    async with learner(tmp_path, config) as controller:
        assert (await controller.report(LearnerReady)).version == 0
        for step in range(5):  # all at once: the next batches wait while a checkpoint is written
            await controller.connection.send(kit.batch(kit.samples(seed=step), step=step))
        await controller.order(Checkpoint(5))
        news = [await controller.report(StepDone | CheckpointDone) for _ in range(8)]
        assert [told.version for told in news] == [1, 2, 2, 3, 4, 4, 5, 5]
        assert news[0].finished_s - news[0].started_s >= (config.learner.fake_step_s or 0.0)
        assert news[0].metrics["reward/min"] <= news[0].metrics["reward/mean"] <= news[0].metrics["reward/max"]
        assert await controller.connection.flush(TIMEOUT_S)
        assert controller.published == set(range(6))
    checkpoints, names = tmp_path / "checkpoints", ["step-000002", "step-000004", "step-000005"]
    assert sorted(path.name for path in checkpoints.iterdir()) == names
    (checkpoints / names[-1] / "trainer" / "state.json").write_text("{}")
    async with learner(tmp_path, config) as controller:
        ready = await controller.report(LearnerReady)
        assert (ready.version, ready.checkpoint) == (4, str(checkpoints / "step-000004"))


@any_learner
async def test_a_repeated_step_is_answered_and_not_trained_and_one_out_of_order_ends_the_learner(kit, tmp_path, config):
    async with learner(tmp_path, config) as controller:
        await controller.report(LearnerReady)
        batch = kit.batch(kit.samples())
        first = await controller.step(batch)
        again = await controller.step(batch)
        assert (again.step, again.version) == (first.step, first.version) == (0, 1)
        assert controller.published == {0, 1}
        await controller.connection.send(kit.batch(kit.samples(), step=3))
        error = await asyncio.wait_for(controller.task, TIMEOUT_S)
    assert isinstance(error, LearnerError)
    assert "step 3 came while the learner is at version 1" in str(error)


async def test_a_version_that_nobody_can_fetch_ends_a_learner_that_waits_for_a_batch(tmp_path):
    async with learner(tmp_path) as controller:
        await controller.report(LearnerReady)
        controller.worker.publish_failed(failure := BroadcastError("version 0 was not published: the disk is full"))
        assert await asyncio.wait_for(controller.task, TIMEOUT_S) is failure


async def test_shutdown_interrupts_a_long_warm_start(tmp_path):
    model = ScratchModel(hidden_size=32, num_layers=1, num_heads=2, warm_start=WarmStart(steps=10**6, batch_size=2))
    config = msgspec.structs.replace(CONFIG, model=model)
    async with learner(tmp_path, config, lambda: [("ab", "c"), ("ac", "d")]) as controller:
        await controller.report(Heartbeat)
    assert not (tmp_path / "model").exists()
