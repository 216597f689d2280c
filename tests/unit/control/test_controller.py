"""The controller over in-process channels and a launcher without processes: what it does when others die or repeat themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from asyncrl.buffer.open import open_buffer
from asyncrl.clock import SystemClock
from asyncrl.config.load import parse_config
from asyncrl.control.controller import Controller, RunParts
from asyncrl.control.join import Membership
from asyncrl.control.launch.lease import Ownership
from asyncrl.control.launch.processes import plan_processes
from asyncrl.control.lifecycle.events import DrainRequested, PauseRequested, ProcessUnwanted, ProcessWanted, ResumeRequested
from asyncrl.control.stall_detector import SLOW_SCORE_S
from asyncrl.errors import ConnectionClosed
from asyncrl.schema.batches import StepBatch, StepDone
from asyncrl.schema.control import (
    Checkpoint,
    CheckpointDone,
    EngineReady,
    Fault,
    JoinTerms,
    LearnerReady,
    LoadModel,
    ModelsReady,
    Pause,
    PhaseReached,
    Resume,
    SetPhase,
    Shutdown,
)
from asyncrl.schema.samples import (
    GroupWork,
    InferRequest,
    InferResult,
    Prompt,
    ScoreRequest,
)
from asyncrl.schema.weights import VersionLive, WeightsAvailable, WeightsManifest
from asyncrl.tasks.task import TaskData
from asyncrl.transport.protocol import Connection, Lane
from tests.builders import answer_to, hello, receive, score_of
from tests.fake_launcher import FakeLauncher
from tests.in_process import InProcessListener

B = G = 2
ETA = 1
NUM_STEPS = 2


class World:
    """A controller whose processes are the test."""

    def __init__(
        self, folder: Path, window: int = 64, listener: type[InProcessListener] = InProcessListener, **settings: object
    ) -> None:
        config = parse_config({
            "num_steps": NUM_STEPS,
            "algorithm": {"groups_per_step": B, "group_size": G},
            "buffer": {"max_staleness": ETA},
            "generate": {"num_workers": 1, "engine": {"kind": "fake", "num_slots": 64}},
            "eval": {"at_start": False, "at_end": False},
            "checkpoint": {"every_steps": 0},
            "supervision": {"backoff_s": 0.01},
            **settings,
        })  # fmt: skip
        self.launcher = FakeLauncher()
        self.buffer = open_buffer(config, folder, call_soon=asyncio.get_running_loop().call_soon_threadsafe)
        task = TaskData([Prompt(f"p{i}", text=f"{i}=", answer="46") for i in range(50)], [])
        self.listener = listener(hello("controller", "controller"), window)
        membership = Membership(plan_processes(config), config=config.supervision)
        self.controller = Controller(
            RunParts(config, folder, self.buffer, task, self.listener, self.launcher, membership, SystemClock())
        )  # fmt: skip

    async def join(self, kind: str, name: str) -> Connection:
        return await self.listener.connect(hello(kind, name))

    async def start(self, version: int = 0, *, version_is_live: bool = True) -> tuple[Connection, Connection, Connection]:
        """Bring up learner, reward worker and generator at this version."""
        await self.launcher.started("generator-0")
        learner, reward, generator = [
            await self.join(kind, name)
            for kind, name in (("learner", "learner"), ("reward", "reward-0"), ("generator", "generator-0"))
        ]
        await learner.send(LearnerReady(version, "model"), Lane.CONTROL)
        await receive(generator, LoadModel)
        await generator.send(EngineReady("generator-0", 64, -1), Lane.CONTROL)
        if version_is_live:
            await generator.send(VersionLive(version, "generator-0", 0.0, 0.0, 0.0), Lane.CONTROL)
        return learner, reward, generator

    async def let_in(self, name: str = "joined-b-7-0", *, version_is_live: bool = True) -> Connection:
        """Bring up a generator that the run did not start."""
        self.controller.membership.most_joined = 1
        assert self.controller.membership.refusal(hello("generator", name)) == ""
        guest = await self.join("generator", name)
        assert (await receive(guest, JoinTerms)).config_toml
        assert (await receive(guest, LoadModel)).model_folder == "model"
        await guest.send(EngineReady(name, 64, -1), Lane.CONTROL)
        if version_is_live:
            await guest.send(VersionLive(0, name, 0.0, 0.0, 0.0), Lane.CONTROL)
        return guest

    async def until(self, phase: str) -> None:
        async with asyncio.timeout(30):
            while self.controller.lifecycle.phase != phase:
                await asyncio.sleep(0.01)

    async def restart_learner(self, version: int) -> Connection:
        self.launcher.history[0].exit(-9)
        await self.launcher.started("learner", 2)
        learner = await self.join("learner", "learner")
        await learner.send(LearnerReady(version, "model"), Lane.CONTROL)
        return learner


@asynccontextmanager
async def _running(folder: Path, **settings: object) -> AsyncIterator[World]:
    world = World(folder, **settings)
    try:
        async with asyncio.TaskGroup() as group:
            run = group.create_task(world.controller.run(Ownership()))
            yield world
            run.cancel()
    finally:
        world.controller.reporter.steps.clear()  # nothing to draw
        await world.controller.reporter.close(folder)
        world.buffer.close()


async def _generate(generator: Connection, reward: Connection, count: int) -> list[int]:
    """Answer that many groups and their reward requests; return the groups' ids."""
    group_ids = []
    for _ in range(count):
        work = await receive(generator, GroupWork, Lane.DATA)
        group_ids.append(work.group_id)
        for index in work.indices:
            await generator.send(answer_to(work, index))
            request = await receive(reward, ScoreRequest, Lane.DATA)
            await reward.send(score_of(request.group_id, index, attempt=request.attempt, worker="reward-0"))
    return group_ids


async def _train(learner: Connection, steps: range) -> None:
    for step in steps:
        assert (await receive(learner, StepBatch, Lane.DATA)).step == step
        await learner.send(StepDone(step, step + 1, {}, 0.0, 1.0), Lane.CONTROL)


async def test_a_learner_that_dies_over_the_last_checkpoint_repeats_its_steps_and_writes_it(tmp_path):
    async with _running(tmp_path) as world:
        learner, reward, generator = await world.start()
        await _generate(generator, reward, NUM_STEPS * B)
        await _train(learner, range(NUM_STEPS))
        await world.until("draining")
        assert (await receive(learner, Checkpoint)).version == NUM_STEPS
        again = await world.restart_learner(version=0)
        await _train(again, range(NUM_STEPS))
        assert (await receive(again, Checkpoint)).version == NUM_STEPS
        await again.send(CheckpointDone(NUM_STEPS, str(tmp_path / "checkpoints" / "step-000002"), 0.1), Lane.CONTROL)
        await asyncio.wait_for(world.controller.ending.wait(), 30)
        assert (world.controller.lifecycle.phase, world.controller.feeder.version) == ("stopped", NUM_STEPS)


async def test_a_drain_trains_every_step_that_was_taken_and_takes_no_other(tmp_path):
    async with _running(tmp_path, num_steps=9, buffer={"max_staleness": 5}) as world:
        learner, reward, generator = await world.start()
        await _generate(generator, reward, 4 * B)
        assert (await receive(learner, StepBatch, Lane.DATA)).step == 0
        async with asyncio.timeout(30):
            while world.buffer.counts().taken < 2 * B:
                await asyncio.sleep(0.01)
        world.controller.post(DrainRequested())
        again = await world.restart_learner(version=0)
        await _train(again, range(2))
        assert (await receive(again, Checkpoint)).version == 2
        await again.send(CheckpointDone(2, str(tmp_path / "checkpoints" / "step-000002"), 0.1), Lane.CONTROL)
        await asyncio.wait_for(world.controller.ending.wait(), 30)
        counts = world.buffer.counts()
        assert (world.controller.lifecycle.phase, counts.trained, counts.taken, counts.ready) == ("stopped", 2 * B, 0, 2 * B)


async def test_a_generator_that_says_twice_that_it_is_ready_keeps_the_groups_it_was_given(tmp_path):
    async with _running(tmp_path, window=1) as world:
        _, reward, generator = await world.start()
        await world.until("running")
        await generator.send(EngineReady("generator-0", 64, 0), Lane.CONTROL)
        assert await _generate(generator, reward, (ETA + 1) * B) == [0, 1, 2, 3]


async def test_a_checkpoint_that_is_not_of_this_run_ends_it_with_the_reason(tmp_path):
    async with _running(tmp_path) as world:
        await world.launcher.started("learner")
        learner = await world.join("learner", "learner")
        await learner.send(LearnerReady(7, "model"), Lane.CONTROL)
        await asyncio.wait_for(world.controller.ending.wait(), 30)
        assert "learner stands at version 7" in world.controller.lifecycle.reason


async def _reach(connection: Connection, name: str, phase: str, number: int) -> None:
    """Wait for this order, and answer it."""
    assert await receive(connection, SetPhase) == SetPhase(phase, number)  # type: ignore[arg-type]
    await connection.send(PhaseReached(name, phase, number), Lane.CONTROL)  # type: ignore[arg-type]


async def test_by_turns_groups_go_out_in_rollouts_and_steps_when_the_learner_has_the_device(tmp_path):
    async with _running(tmp_path, placement={"kind": "colocated"}) as world:
        await world.launcher.started("generator-0")
        learner, reward, generator = [
            await world.join(kind, name)
            for kind, name in (("learner", "learner"), ("reward", "reward-0"), ("generator", "generator-0"))
        ]
        await learner.send(LearnerReady(0, "model"), Lane.CONTROL)
        await learner.send(WeightsAvailable(0, "none", "", WeightsManifest((), 0), "", 0.0), Lane.CONTROL)
        await _reach(learner, "learner", "train", 0)
        await _reach(learner, "learner", "rollout", 1)
        await receive(generator, LoadModel)
        await generator.send(EngineReady("generator-0", 64, -1), Lane.CONTROL)
        await generator.send(VersionLive(0, "generator-0", 0.0, 0.0, 0.0), Lane.CONTROL)
        await _reach(generator, "generator-0", "rollout", 1)
        await _generate(generator, reward, B)
        assert await receive(generator, SetPhase) == SetPhase("train", 2)
        wait = next(wait for wait in world.controller.waits(world.controller.clock.now()) if "device back" in wait.what)
        assert wait.what == "generator-0 to give the device back for phase train"
        assert world.controller.feeder.version == 0
        await generator.send(PhaseReached("generator-0", "train", 2), Lane.CONTROL)
        await _reach(learner, "learner", "train", 2)
        await _train(learner, range(1))
        await learner.send(WeightsAvailable(1, "none", "", WeightsManifest((), 0), "", 1.0), Lane.CONTROL)
        await _reach(learner, "learner", "rollout", 3)
        await _reach(generator, "generator-0", "rollout", 3)


async def test_an_inference_worker_is_waited_for_named_when_it_is_slow_and_asked_again_when_it_dies(tmp_path):
    judge = {"reward_models": [{"name": "judge", "path": "judge"}]}
    async with _running(tmp_path, inference=judge, reward={"functions": []}) as world:
        await world.launcher.started("generator-0")
        inference = await world.join("inference", "inference-0")
        learner, generator = await world.join("learner", "learner"), await world.join("generator", "generator-0")
        await learner.send(LearnerReady(0, "model"), Lane.CONTROL)
        assert (await receive(inference, LoadModel)).model_folder == "model"
        await generator.send(EngineReady("generator-0", 64, -1), Lane.CONTROL)
        await generator.send(VersionLive(0, "generator-0", 0.0, 0.0, 0.0), Lane.CONTROL)
        await receive(generator, LoadModel)
        await world.until("warming")
        await inference.send(ModelsReady("inference-0", ("judge",), 4), Lane.CONTROL)
        await world.until("running")
        work = await receive(generator, GroupWork, Lane.DATA)
        await generator.send(answer_to(work))
        request = await receive(inference, InferRequest, Lane.DATA)
        now = world.controller.clock.now()
        assert not [wait for wait in world.controller.waits(now) if "inference" in wait.what]
        (wait,) = [wait for wait in world.controller.waits(now + SLOW_SCORE_S) if "inference" in wait.what]
        assert wait.what == "1 answers of inference-0"
        next(process for process in world.launcher.history if process.spec.name == "inference-0").exit(-9)
        await world.launcher.started("inference-0", 2)
        again = await world.join("inference", "inference-0")
        assert (await receive(again, LoadModel)).model_folder == "model"
        assert await receive(again, InferRequest, Lane.DATA) == request
        await again.send(InferResult(request.group_id, 0, request.attempt, b"", {"judge": 0.5}, "", "inference-0"))
        async with asyncio.timeout(30):
            while len(world.controller.dispatcher.scores):
                await asyncio.sleep(0.01)


async def test_a_joining_generator_that_was_cut_off_in_a_pause_and_comes_back_after_it_goes_on(tmp_path):
    async with _running(tmp_path) as world:
        await world.start()
        await world.until("running")
        name = "joined-b-7-0"
        guest = await world.let_in(name)
        world.controller.post(PauseRequested())
        await receive(guest, Pause)
        await guest.close()
        async with asyncio.timeout(30):
            while name in world.controller.membership.joined:
                await asyncio.sleep(0.01)
        world.controller.post(ResumeRequested())
        await world.until("running")
        assert await receive(await world.let_in(name), Resume) == Resume()


class _LateListener(InProcessListener):
    """Hands a connection over only when it is told to: who is judged in one turn of the loop is taken in in a later one."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.may_accept = asyncio.Event()
        self.may_accept.set()

    async def accept(self) -> Connection:
        connection = await super().accept()
        await self.may_accept.wait()
        return connection


async def test_a_joining_generator_whose_place_was_given_away_before_it_was_taken_in_is_told_so(tmp_path):
    async with _running(tmp_path, listener=_LateListener) as world:
        await world.start()
        membership, late, early = world.controller.membership, "joined-b-7-0", "joined-b-8-0"
        await world.let_in(late)
        world.listener.may_accept.clear()
        assert membership.refusal(hello("generator", late)) == ""
        again = await world.join("generator", late)  # and with that the connection before is over
        async with asyncio.timeout(30):
            while late in membership.joined:
                await asyncio.sleep(0.01)
        assert membership.refusal(hello("generator", early)) == ""
        guest = await world.join("generator", early)
        world.listener.may_accept.set()
        with pytest.raises(ConnectionClosed, match="all 1 places for joining generators are taken"):
            await receive(again, JoinTerms)
        assert (await receive(guest, JoinTerms)).config_toml
        assert membership.counts() == {"here": 1, "most": 1, "came": 2, "left": 0, "lost": 1}


# -- generators that come and go -------------------------------------------------------------------------------------------


async def test_a_generator_that_is_not_needed_finishes_what_it_holds_and_leaves_without_a_death(tmp_path, caplog):
    async with _running(tmp_path) as world:
        _, reward, generator = await world.start()
        await world.until("running")
        world.controller.post(ProcessUnwanted("generator-0"))
        await _generate(generator, reward, (ETA + 1) * B)
        assert (await receive(generator, Shutdown)).reason
        world.launcher.history[-1].exit(0)
        record = world.controller.lifecycle.processes["generator-0"]
        async with asyncio.timeout(30):
            while record.state != "left":
                await asyncio.sleep(0.01)
        assert (record.exit_codes, record.departures) == ([], 1)
        assert "generator-0 is gone" not in "".join(line.getMessage() for line in caplog.records if line.levelname != "INFO")
        assert world.buffer.counts().running == 0
        world.controller.post(ProcessWanted("generator-0", "generator"))
        assert (await world.launcher.started("generator-0", 2)).spec.incarnation == 2


async def test_a_joining_generator_that_cannot_go_on_does_not_end_the_run(tmp_path):
    async with _running(tmp_path) as world:
        await world.start()
        await world.until("running")
        guest = await world.let_in()
        await guest.send(Fault("joined-b-7-0", "no such folder", fatal=True), Lane.CONTROL)
        assert await guest.flush(30)
        await guest.close()
        for _ in range(5):
            await asyncio.sleep(0)
        assert world.controller.lifecycle.phase == "running"
