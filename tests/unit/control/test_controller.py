"""The controller over in-process channels and a launcher without processes: what it does when others die or repeat themselves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from asyncrl.buffer.ledger.reader import LedgerReader
from asyncrl.buffer.open import open_buffer
from asyncrl.clock import SystemClock
from asyncrl.config.load import dump_config, load_config, parse_config
from asyncrl.control.api import ConfigChange, ExternalStep, RunApi, StepAsked
from asyncrl.control.controller import KEPT_STEPS, Controller
from asyncrl.control.join import Membership
from asyncrl.control.launch.process_main import Ownership
from asyncrl.control.launch.processes import plan_processes
from asyncrl.control.lifecycle.events import DrainRequested, PauseRequested, ResumeRequested, StopRequested
from asyncrl.errors import ConnectionClosed, RunError
from asyncrl.observe.samples import read_samples
from asyncrl.observe.steps import EvalReport
from asyncrl.schema.control import Checkpoint, CheckpointDone, EngineReady, JoinTerms, LearnerReady, LoadModel, Pause, Resume
from asyncrl.schema.samples import GroupWork, Prompt, ScoreRequest, StepBatch, StepDone
from asyncrl.schema.status import RELEASED, GroupAsked, GroupsAsked, Released
from asyncrl.schema.weights import VersionLive
from asyncrl.tasks.task import TaskData
from asyncrl.transport.protocol import Connection, Lane
from tests.builders import answer_to, hello, receive, score_of, until
from tests.fake_launcher import FakeLauncher
from tests.in_process import InProcessListener

B = G = 2
ETA = 1
NUM_STEPS = 2
SECRET = "https://alarms/token"


class World:
    """A controller whose processes are the test."""

    def __init__(self, folder: Path, window: int = 64, **settings: object) -> None:
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
        self.config, self.launcher = config, FakeLauncher()
        self.buffer = open_buffer(config, folder, call_soon=asyncio.get_running_loop().call_soon_threadsafe)
        task = TaskData(
            [Prompt(f"p{i}", text=f"{i}=", answer="46") for i in range(50)], [Prompt("held out", text="1=", answer="46")]
        )
        self.listener = InProcessListener(hello("controller", "controller"), window)
        membership = Membership(plan_processes(config), config=config.supervision)
        self.controller = Controller(config, folder, self.buffer, task, self.listener, self.launcher, membership, SystemClock())

    async def join(self, kind: str, name: str) -> Connection:
        return await self.listener.connect(hello(kind, name))

    async def start(self, version: int = 0, *, version_is_live: bool = True) -> tuple[Connection, Connection, Connection]:
        """Bring up learner, reward worker and generator at this version."""
        await self.launcher.started("generator-0")
        names = ("learner", "reward-0", "generator-0")
        learner, reward, generator = [await self.join(name.partition("-")[0], name) for name in names]
        await learner.send(LearnerReady(version, "model"), Lane.CONTROL)
        await receive(generator, LoadModel)
        await generator.send(EngineReady("generator-0", 64, -1), Lane.CONTROL)
        if version_is_live:
            await generator.send(VersionLive(version, "generator-0", 0.0, 0.0, 0.0), Lane.CONTROL)
        return learner, reward, generator

    async def start_outside(self) -> tuple[Connection, Connection]:
        """Bring up reward worker and generator of a run whose learner is outside."""
        await self.launcher.started("generator-0")
        reward, generator = [await self.join(name.partition("-")[0], name) for name in ("reward-0", "generator-0")]
        await generator.send(EngineReady("generator-0", 64, 0), Lane.CONTROL)
        return reward, generator

    async def let_in(self, name: str = "joined-b-7-0", *, version_is_live: bool = True) -> Connection:
        """Bring up a generator that the run did not start."""
        self.controller.membership.most_joined = 1
        assert self.controller.membership.refusal(hello("generator", name)) == ""
        guest = await self.join("generator", name)
        assert SECRET not in (await receive(guest, JoinTerms)).config_toml
        assert (await receive(guest, LoadModel)).model_folder == "model"
        await guest.send(EngineReady(name, 64, -1), Lane.CONTROL)
        if version_is_live:
            await guest.send(VersionLive(0, name, 0.0, 0.0, 0.0), Lane.CONTROL)
        return guest

    async def until(self, phase: str) -> None:
        await until(lambda: self.controller.lifecycle.phase == phase)

    async def restart_learner(self, version: int) -> Connection:
        self.launcher.history[0].exit(-9)
        await self.launcher.started("learner", 2)
        learner = await self.join("learner", "learner")
        await learner.send(LearnerReady(version, "model"), Lane.CONTROL)
        return learner


@asynccontextmanager
async def running(folder: Path, **settings: object) -> AsyncIterator[World]:
    """Yield a world whose controller runs; fail where a loop of it has raised."""
    world = World(folder, **settings)
    run = asyncio.get_running_loop().create_task(world.controller.run(Ownership()))
    try:
        yield world
        assert not run.done() or run.exception() is None, run.exception()
        world.buffer.state.check_invariants()
        world.buffer.ledger.sync()
    finally:
        run.cancel()
        await asyncio.wait([run])
        world.controller.reporter.newest = None  # nothing to draw
        await world.controller.reporter.close()
        world.buffer.close()


async def generate(generator: Connection, reward: Connection, count: int, version: int = 0) -> list[int]:
    """Answer that many groups and their reward requests; return the groups' ids."""
    group_ids = []
    for _ in range(count):
        work = await receive(generator, GroupWork, Lane.DATA)
        group_ids.append(work.group_id)
        for index in work.indices:
            await generator.send(answer_to(work, index, versions=version))
            request = await receive(reward, ScoreRequest, Lane.DATA)
            await reward.send(score_of(request.group_id, index, attempt=request.attempt, worker="reward-0"))
    return group_ids


async def train(learner: Connection, steps: range) -> None:
    for step in steps:
        assert (await receive(learner, StepBatch, Lane.DATA)).step == step
        await learner.send(StepDone(step, step + 1, {}, 0.0, 1.0), Lane.CONTROL)


async def test_a_learner_that_dies_over_the_last_checkpoint_repeats_its_steps_and_writes_it(tmp_path):
    async with running(tmp_path) as world:
        learner, reward, generator = await world.start()
        await generate(generator, reward, NUM_STEPS * B)
        await train(learner, range(NUM_STEPS))
        await world.until("draining")
        assert (await receive(learner, Checkpoint)).version == NUM_STEPS
        again = await world.restart_learner(version=0)
        await train(again, range(NUM_STEPS))
        assert (await receive(again, Checkpoint)).version == NUM_STEPS
        await again.send(CheckpointDone(NUM_STEPS, str(tmp_path / "checkpoints" / "step-000002"), 0.1), Lane.CONTROL)
        await asyncio.wait_for(world.controller.ending.wait(), 30)
        assert (world.controller.lifecycle.phase, world.controller.feeder.version) == ("stopped", NUM_STEPS)
        with pytest.raises(RunError, match=f"the run is over: what it has saved is in {tmp_path}/checkpoints"):
            await asyncio.wait_for(RunApi(world.controller).checkpoint(), 30)


@pytest.mark.parametrize("is_saved", [False, True], ids=["over the checkpoint", "over the step after it"])
async def test_a_learner_that_dies_while_it_saves_loses_no_batch_and_ends_the_run_by_name(tmp_path, is_saved):
    supervision = {"backoff_s": 0.01, "max_deaths": 2, "death_window_s": 0.001}
    async with running(tmp_path, checkpoint={"every_steps": 1}, supervision=supervision) as world:
        learner, reward, generator = await world.start()
        await generate(generator, reward, NUM_STEPS * B)
        lifecycle, saved = world.controller.lifecycle, CheckpointDone(1, str(tmp_path / "checkpoints" / "step-000001"), 0.1)
        for life in (1, 2, 3):
            assert (await receive(learner, StepBatch, Lane.DATA)).step == 0
            await learner.send(StepDone(0, 1, {}, 0.0, 1.0), Lane.CONTROL)
            if is_saved:
                await learner.send(saved, Lane.CONTROL)
            assert (await receive(learner, StepBatch, Lane.DATA)).step == 1
            await until(
                lambda: world.controller.feeder.version == 1 and world.controller.checkpoints.version == (1 if is_saved else -1)
            )
            (await world.launcher.started("learner", life)).exit(-9)
            if life == 2 and is_saved:
                await until(lambda: world.buffer.counts().dropped == {"the learner died over it 2 times": B})
                return
            if life < 3:
                await world.launcher.started("learner", life + 1)
                learner = await world.join("learner", "learner")
                await learner.send(LearnerReady(0, "model"), Lane.CONTROL)
        await asyncio.wait_for(world.controller.ending.wait(), 30)
        assert "it died 3 times while a checkpoint of version 1 was due" in lifecycle.reason
        assert (lifecycle.phase, world.buffer.counts().dropped) == ("failed", {})


async def test_a_drain_trains_every_step_that_was_taken_and_takes_no_other(tmp_path):
    async with running(tmp_path, num_steps=9, buffer={"max_staleness": 5, "ahead": "as_allowed"}) as world:
        learner, reward, generator = await world.start()
        await generate(generator, reward, 4 * B)
        assert (await receive(learner, StepBatch, Lane.DATA)).step == 0
        await until(lambda: world.buffer.counts().taken >= 2 * B)
        world.controller.post(DrainRequested())
        again = await world.restart_learner(version=0)
        await train(again, range(2))
        await until(lambda: world.controller.feeder.version == 2)
        assert sorted(row.name for row in read_samples(tmp_path)) == [
            f"g{group}.{index}" for group in range(4) for index in (0, 1)
        ]
        assert (await receive(again, Checkpoint)).version == 2
        await again.send(CheckpointDone(2, str(tmp_path / "checkpoints" / "step-000002"), 0.1), Lane.CONTROL)
        await asyncio.wait_for(world.controller.ending.wait(), 30)
        counts = world.buffer.counts()
        assert (world.controller.lifecycle.phase, counts.trained, counts.taken, counts.ready) == ("stopped", 2 * B, 0, 2 * B)


async def test_a_generator_that_says_twice_that_it_is_ready_keeps_the_groups_it_was_given(tmp_path):
    async with running(tmp_path, window=1) as world:
        _, reward, generator = await world.start()
        await world.until("running")
        await generator.send(EngineReady("generator-0", 64, 0), Lane.CONTROL)
        assert await generate(generator, reward, (ETA + 1) * B) == [0, 1, 2, 3]


async def test_a_joining_generator_that_was_cut_off_in_a_pause_and_comes_back_after_it_goes_on(tmp_path):
    async with running(tmp_path, observe={"webhook": SECRET}) as world:
        await world.start()
        await world.until("running")
        name = "joined-b-7-0"
        guest = await world.let_in(name)
        world.controller.post(PauseRequested())
        await receive(guest, Pause)
        await guest.close()
        await until(lambda: name not in world.controller.membership.joined)
        world.controller.post(ResumeRequested())
        await world.until("running")
        assert await receive(await world.let_in(name), Resume) == Resume()


async def test_a_joining_generator_whose_place_was_given_away_before_it_was_taken_in_is_told_so(tmp_path):
    async with running(tmp_path) as world:
        await world.start()
        membership, late = world.controller.membership, "joined-b-7-0"
        before = await world.let_in(late)
        assert membership.refusal(hello("generator", late)) == ""  # it is judged as it comes back, and taken in later
        await before.close()
        await until(lambda: late not in membership.joined)
        await world.let_in("joined-b-8-0")
        again = await world.join("generator", late)
        with pytest.raises(ConnectionClosed, match="all 1 places for joining generators are taken"):
            await receive(again, JoinTerms)
        assert (membership.counts()["here"], membership.counts()["came"]) == (1, 2)


async def test_a_learner_that_makes_a_version_again_has_it_judged_once(tmp_path):
    async with running(tmp_path, num_steps=3, eval={"at_start": False, "at_end": False, "every_steps": 1}) as world:
        learner, reward, generator = await world.start(version_is_live=False)
        world.controller.reporter.note_evaluation(EvalReport(version=1, num_samples=1))
        await generator.send(VersionLive(0, "generator-0", 0.0, 0.0, 0.0), Lane.CONTROL)
        await generate(generator, reward, 2 * B)
        await train(learner, range(1))
        await until(lambda: world.controller.feeder.version == 1)
        assert world.controller.dispatcher.evaluation is None
        await train(learner, range(1, 2))
        await until(lambda: world.controller.feeder.version == 2)
        assert world.controller.dispatcher.evaluation.version == 2


async def test_the_accuracy_before_training_is_that_of_version_0_and_no_other(tmp_path):
    async with running(tmp_path) as world:
        told, reporter = RunApi(world.controller), world.controller.reporter
        reporter.note_evaluation(EvalReport(version=5, num_samples=8, accuracy=0.5))
        assert (told.status().accuracy_before, told.status().accuracy_after) == (None, 0.5)
        for version, accuracy in ((0, 0.25), (10, 0.75)):
            reporter.note_evaluation(EvalReport(version=version, num_samples=8, accuracy=accuracy))
        assert (told.status().accuracy_before, told.status().accuracy_after) == (0.25, 0.75)


async def test_an_evaluation_that_was_under_way_as_the_run_ended_is_made_by_the_resume(tmp_path):
    settings = {"num_steps": 3, "eval": {"at_start": False, "at_end": False, "every_steps": 1}}
    async with running(tmp_path, **settings) as world:
        learner, reward, generator = await world.start()
        await generate(generator, reward, B)
        await train(learner, range(1))
        await until(lambda: world.controller.dispatcher.evaluation is not None)
    async with running(tmp_path, **settings) as world:
        _, reward, generator = await world.start(version=1)
        while (await receive(generator, GroupWork, Lane.DATA)).purpose != "eval":
            pass
        assert world.controller.dispatcher.evaluation.version == 1
        world.controller.reporter.note_evaluation(EvalReport(version=1, num_samples=1))
    async with running(tmp_path, **settings) as world:
        await world.start(version=1)
        await world.until("running")
        assert world.controller.dispatcher.evaluation is None


# -- changes of a live run


async def test_only_a_change_of_the_number_of_generators_undoes_elastic_scaling_and_one_that_is_wanted_again_comes_back(tmp_path):
    launch = {"kind": "local", "elastic": {"max_generators": 4}}
    async with running(tmp_path, launch=launch) as world:
        (tmp_path / "config.toml").write_text(dump_config(world.config), encoding="utf-8")
        controller, autoscaler = world.controller, world.controller.autoscaler
        await world.start()
        autoscaler.want(2, 0.0)
        second = await world.launcher.started("generator-1")
        RunApi(controller).change(ConfigChange({"max_run_s": 999.0}, "me"))
        assert autoscaler.scaler.wanted == 2
        await until(lambda: "generator-1" in controller.supervisor.live)
        autoscaler.want(1, 0.0)
        autoscaler.want(2, 0.0)
        second.exit(0)
        await asyncio.wait_for(world.launcher.started("generator-1", 2), 30)
        assert not controller.reporter.deaths
        RunApi(controller).change(ConfigChange({"generate.num_workers": 3}, "me"))
        assert autoscaler.scaler.wanted == 3


async def test_a_later_goal_is_refused_once_no_more_steps_are_taken_with_how_the_run_is_taken_further(tmp_path):
    async with running(tmp_path, eval={"at_start": False, "at_end": True}) as world:
        learner, reward, generator = await world.start()
        await generate(generator, reward, NUM_STEPS * B)
        await train(learner, range(NUM_STEPS))
        for phase, then in (("evaluating", PauseRequested()), ("paused", DrainRequested()), ("draining", None)):
            await world.until(phase)
            with pytest.raises(RunError, match=f"is {phase} and .* `asyncrl resume {tmp_path} --set num_steps=9`"):
                RunApi(world.controller).change(ConfigChange({"num_steps": 9}, "me"))
            if then is not None:
                world.controller.post(then)


@pytest.mark.parametrize("phase", ["paused", "warming"])
async def test_the_time_limit_holds_also_where_nothing_is_trained(tmp_path, phase):
    async with running(tmp_path, max_run_s=1e6) as world:
        if phase == "paused":
            await world.start()
            await world.until("running")
            world.controller.post(PauseRequested())
        else:
            await world.launcher.started("generator-0")
            for name in ("learner", "reward-0", "generator-0"):
                await world.join(name.partition("-")[0], name)
        await world.until(phase)
        world.controller.started_s -= 2e6
        await until(lambda: world.controller.lifecycle.phase in {"draining", "stopped"})


async def test_a_model_that_is_never_loaded_ends_the_run(tmp_path):
    async with running(tmp_path, supervision={"stall_timeout_s": 0.5}) as world:
        await world.launcher.started("generator-0")
        for name in ("learner", "reward-0", "generator-0"):
            await world.join(name.partition("-")[0], name)
        await asyncio.wait_for(world.controller.ending.wait(), 60)
        assert "nothing moved for" in world.controller.lifecycle.reason


async def test_a_process_that_is_started_again_has_time_for_it(tmp_path):
    async with running(tmp_path, supervision={"stall_timeout_s": 2.0, "backoff_s": 3.0}) as world:
        await world.start()
        (await world.launcher.started("learner")).exit(-9)
        await asyncio.wait_for(world.launcher.started("learner", 2), 30)
        assert world.controller.lifecycle.phase == "running"


async def test_who_changes_a_config_is_one_line_in_its_file(tmp_path):
    async with running(tmp_path) as world:
        (tmp_path / "config.toml").write_text(dump_config(world.config), encoding="utf-8")
        RunApi(world.controller).change(ConfigChange({"max_run_s": 999.0}, "me\nnum_steps = 7\a"))
        assert load_config(tmp_path / "config.toml").num_steps == NUM_STEPS


# -- a learner outside


async def test_a_step_that_was_taken_and_not_trained_gives_its_places_back_when_its_groups_are_released(tmp_path):
    async with running(tmp_path, learner={"kind": "driven"}, buffer={"max_staleness": 0}) as world:
        api = RunApi(world.controller)
        reward, generator = await world.start_outside()
        for first in (0, B):
            asked = tuple(GroupAsked(number, Prompt(f"q{number}", text="1=", answer="46")) for number in range(B))
            async with asyncio.timeout(30), asyncio.TaskGroup() as group:
                group.create_task(api.generate(GroupsAsked(f"stream {first}", asked, B)))
                await generate(generator, reward, B)
            await asyncio.wait_for(api.take_these(StepAsked((first, first + 1))), 30)
            api.release(Released(groups=(first,)))  # not all of them: the step stays
            assert world.buffer.state.steps[0].group_ids == (first, first + 1)
            if first == 0:
                api.release(Released(groups=(0, 1)))
        api.trained(ExternalStep(0))
        assert (world.buffer.counts().trained, world.buffer.counts().dropped) == (B, {RELEASED: B})


async def test_a_run_waits_for_an_outside_learner_as_long_as_that_takes_and_not_for_groups_that_never_come(tmp_path):
    async with running(tmp_path, learner={"kind": "external"}, supervision={"stall_timeout_s": 0.5}) as world:
        api, detector = RunApi(world.controller), world.controller.stall_detector
        await world.start_outside()
        await world.until("running")
        began_s = detector._since_s
        await until(lambda: detector._since_s > began_s + 1.0)
        taking = asyncio.get_running_loop().create_task(api.take())
        with pytest.raises(RunError, match="nothing moved for"):
            await asyncio.wait_for(taking, 60)


async def test_a_run_that_an_outside_learner_trains_keeps_its_newest_steps_and_goes_on_after_them(tmp_path):
    num_steps = 2 * KEPT_STEPS
    async with running(tmp_path, num_steps=num_steps + 1, learner={"kind": "external"}) as world:
        api = RunApi(world.controller)
        reward, generator = await world.start_outside()
        for step in range(num_steps):
            await generate(generator, reward, B, version=step)
            assert (await asyncio.wait_for(api.take(), 30)).step == step
            api.trained(ExternalStep(step))
            await generator.send(VersionLive(step + 1, "generator-0", 0.0, 0.0, 0.0), Lane.CONTROL)
        assert sorted(world.buffer.state.steps) == list(range(KEPT_STEPS, num_steps))
        world.buffer.check()
        samples, oldest = LedgerReader(tmp_path).sample, KEPT_STEPS * B
        assert [samples(group_id, 0).sample is None for group_id in (oldest - 1, oldest)] == [True, False]
    again = open_buffer(world.config, tmp_path)
    assert (again.state.next_step, again.state.steps_to_repeat()) == (num_steps, ())
    again.close()


async def test_a_run_that_has_ended_keeps_the_step_that_was_taken_whatever_its_caller_asks_for(tmp_path):
    async with running(tmp_path, learner={"kind": "driven"}) as world:
        api = RunApi(world.controller)
        reward, generator = await world.start_outside()
        asked = tuple(GroupAsked(number, Prompt(f"q{number}", text="1=", answer="46")) for number in range(2 * B))
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(api.generate(GroupsAsked("stream", asked, len(asked))))
            await generate(generator, reward, 2 * B)
        await asyncio.wait_for(api.take_these(StepAsked((0, 1))), 30)
        world.controller.post(StopRequested())
        await asyncio.wait_for(world.controller.ending.wait(), 30)
        with pytest.raises(RunError, match="the run has ended"):
            await api.take_these(StepAsked((2, 3)))
        assert world.buffer.state.steps[0].group_ids == (0, 1)
