"""The learner process over an in-process channel: what the controller sees."""

import asyncio
import contextlib

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from asyncrl.clock import SystemClock
from asyncrl.config.learner import LearnerConfig, ScratchModel, WarmStart
from asyncrl.config.run import CheckpointConfig, PlacementConfig, RunConfig, SupervisionConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.worker import run_learner
from asyncrl.schema.batches import StepDone
from asyncrl.schema.control import (
    Checkpoint,
    CheckpointDone,
    Heartbeat,
    LearnerReady,
    PhaseReached,
    SetPhase,
    Shutdown,
)
from asyncrl.schema.samples import ids_from_bytes, logprobs_from_bytes
from asyncrl.transport.protocol import Lane
from tests.builders import Controller, channel_of, outcome_of

ALPHABET = "abcdefghijklmnopqrstu"
CONFIG = RunConfig(
    model=ScratchModel(hidden_size=32, num_layers=1, num_heads=2),
    learner=LearnerConfig(learning_rate=1e-3, warmup_steps=1),
    supervision=SupervisionConfig(heartbeat_s=0.02),
)
TIMEOUT_S = 20


class Publisher(Controller):
    """The other end: keeps heartbeats apart from news, and notes what was published."""

    def __init__(self, connection):
        super().__init__(connection)
        self.heartbeats = []
        self.published = {}

    def publish(self, version, tensors, probe):
        self.published[version] = ({name: tensor.detach().clone() for name, tensor in tensors.items()}, probe)
        return 0.0

    async def news(self, kind):
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                delivery = await self.connection.receive(Lane.CONTROL)
                delivery.ack()
                if isinstance(delivery.message, Heartbeat):
                    self.heartbeats.append(delivery.message)
                else:
                    assert isinstance(delivery.message, kind), delivery.message
                    return delivery.message

    async def ended(self):
        async with asyncio.timeout(TIMEOUT_S):
            return await self.task

    async def step(self, batch):
        await self.connection.send(batch)
        return await self.news(StepDone)


@contextlib.asynccontextmanager
async def learner(run_folder, config=CONFIG, examples=list):
    async with channel_of("learner", "learner") as (near, far), asyncio.TaskGroup() as group:
        controller = Publisher(far)
        running = run_learner(
            config, run_folder, near, SystemClock(),
            publish=controller.publish, warm_start_examples=examples, alphabet=ALPHABET,
        )  # fmt: skip
        controller.task = group.create_task(outcome_of(running))
        yield controller
        if not controller.task.done():
            await controller.order(Shutdown())
            assert await controller.ended() is None


async def test_steps_make_versions_that_are_published_with_a_probe(kit, tmp_path):
    async with learner(tmp_path) as controller:
        ready = await controller.news(LearnerReady)
        assert (ready.version, ready.model_folder) == (0, str(tmp_path / "model"))
        for step in range(3):
            await controller.connection.send(kit.batch(kit.samples(seed=step), step=step))
        await controller.order(Checkpoint(3))
        for step in range(3):
            done = await controller.news(StepDone)
            assert (done.step, done.version) == (step, step + 1)
            assert done.finished_s >= done.started_s
            assert done.metrics["memory/allocated_gb"] > 0
        assert (await controller.news(CheckpointDone)).version == 3
        assert await controller.connection.flush(TIMEOUT_S)
        assert controller.connection.unacknowledged() == 0
        assert sorted(controller.published) == [0, 1, 2, 3]
        initial = load_file(tmp_path / "model" / "model.safetensors")
        assert all(torch.equal(initial[name], tensor) for name, tensor in controller.published[0][0].items())
        probes = [logprobs_from_bytes(probe.logprobs) for _, probe in controller.published.values()]
        tokens = ids_from_bytes(controller.published[0][1].token_ids)
        assert all(len(probe) == len(tokens) - 1 for probe in probes)
        assert (probes[0] != probes[3]).any()


async def test_checkpoints_are_written_at_every_multiple_of_every_steps_and_at_no_other(kit, tmp_path):
    config = msgspec.structs.replace(CONFIG, checkpoint=CheckpointConfig(every_steps=2, keep_last=9))
    async with learner(tmp_path, config) as controller:
        await controller.news(LearnerReady)
        for step in range(5):  # all at once: the next batches wait while a checkpoint is written
            await controller.connection.send(kit.batch(kit.samples(seed=step), step=step))
        news = [await controller.news(StepDone | CheckpointDone) for _ in range(7)]
        assert [told.version for told in news] == [1, 2, 2, 3, 4, 4, 5]
        checkpoints = tmp_path / "checkpoints"
        assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000002", "step-000004"]
    (checkpoints / "step-000004" / "model.safetensors").write_bytes(b"damaged")
    async with learner(tmp_path, config) as controller:
        ready = await controller.news(LearnerReady)
        assert (ready.version, ready.checkpoint) == (2, str(checkpoints / "step-000002"))


async def test_a_repeated_step_is_answered_and_not_trained(kit, tmp_path):
    async with learner(tmp_path) as controller:
        await controller.news(LearnerReady)
        batch = kit.batch(kit.samples())
        first = await controller.step(batch)
        again = await controller.step(msgspec.structs.replace(batch, replay=True))
        assert again == first
        assert sorted(controller.published) == [0, 1]


async def test_a_step_out_of_order_ends_the_learner(kit, tmp_path):
    async with learner(tmp_path) as controller:
        await controller.news(LearnerReady)
        await controller.connection.send(kit.batch(kit.samples(), step=2))
        error = await controller.ended()
    assert isinstance(error, LearnerError)
    assert "step 2 came while the learner is at version 0" in str(error)


async def test_shutdown_interrupts_a_long_warm_start(tmp_path):
    model = ScratchModel(hidden_size=32, num_layers=1, num_heads=2, warm_start=WarmStart(steps=10**6, batch_size=2))
    config = msgspec.structs.replace(CONFIG, model=model)
    async with learner(tmp_path, config, lambda: [("ab", "c"), ("ac", "d")]) as controller:
        await controller.report(Heartbeat, lambda beat: True)
    assert not (tmp_path / "model").exists()


COLOCATED = msgspec.structs.replace(CONFIG, placement=PlacementConfig(kind="colocated", device_memory_gib=1.0))


async def set_phase(controller, phase, number):
    await controller.order(SetPhase(phase, number))
    return await controller.news(PhaseReached)


@pytest.mark.parametrize(("offload_to", "nearer"), [("host", set()), ("disk", {("disk", "host")})])
async def test_phases_move_the_learner_off_its_device_and_back_and_steps_wait_for_their_turn(kit, tmp_path, offload_to, nearer):
    """With a step in hand, what is on disk comes nearer before its turn."""
    placement = msgspec.structs.replace(COLOCATED.placement, offload_to=offload_to)
    async with learner(tmp_path, msgspec.structs.replace(COLOCATED, placement=placement)) as controller:
        await controller.news(LearnerReady)
        left = await set_phase(controller, "rollout", 1)
        assert (left.name, left.phase, left.number, left.resident) == ("learner", "rollout", 1, {})
        assert {(move.before, move.after) for move in left.moves} == {("device", offload_to)}
        await controller.connection.send(kit.batch(kit.samples(), step=0))
        waiting = await controller.report(Heartbeat, lambda beat: "others have" in beat.waiting_for)
        assert waiting.gauges["process/version"] == 0
        back = await set_phase(controller, "train", 2)
        assert {(move.before, move.after) for move in back.moves} == {("host", "device"), *nearer}
        assert back.resident["policy"] > 0
        assert (await controller.news(StepDone)).version == 1
        onto_it = [move.num_bytes for move in back.moves if move.after == "device"]
        assert (await set_phase(controller, "rollout", 3)).peak_bytes >= sum(onto_it)


async def test_a_checkpoint_while_generation_has_the_device_is_that_of_the_version(kit, tmp_path):
    """Nothing is on the device, and what is saved is what was published."""
    async with learner(tmp_path, COLOCATED) as controller:
        await controller.news(LearnerReady)
        await controller.step(kit.batch(kit.samples(), step=0))
        await set_phase(controller, "rollout", 1)
        await controller.order(Checkpoint(1))
        done = await controller.news(CheckpointDone)
        saved = load_file(f"{done.folder}/model.safetensors")
        assert all(torch.equal(saved[name], tensor) for name, tensor in controller.published[1][0].items() if name in saved)
        assert load_file(f"{done.folder}/trainer/optimizer.safetensors")
        assert set((await set_phase(controller, "train", 2)).resident) == {"policy", "policy optimizer"}
