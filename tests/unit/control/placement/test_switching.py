"""The phases of a shared device between decision and process: who is told what, what is held meanwhile, what it all took."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from asyncrl.buffer import events as ev
from asyncrl.buffer.open import open_buffer
from asyncrl.clock import VirtualClock
from asyncrl.config.load import parse_config
from asyncrl.control.batch_feeder import BatchFeeder
from asyncrl.control.dispatcher import Dispatcher
from asyncrl.control.peers import Peer, Peers
from asyncrl.control.placement.switching import Switching
from asyncrl.control.reporter import Reporter
from asyncrl.control.stall_detector import StallDetector
from asyncrl.observe.sinks import open_sinks
from asyncrl.observe.spans import PHASE, read_spans
from asyncrl.schema.batches import StepBatch, StepDone
from asyncrl.schema.codec import Message
from asyncrl.schema.control import ComponentMove, LoadModel, PhaseReached, SetPhase
from asyncrl.schema.samples import GroupWork, InferResult, Prompt, Score
from asyncrl.tasks.sampler import PromptSequence
from asyncrl.transport.local import InProcessListener
from asyncrl.transport.protocol import Connection, Lane
from tests.builders import answer_to, hello

T = TypeVar("T", bound=Message)
B = G = 2
NUM_STEPS = 5


class Stage:
    """Switching with everything that it moves; the processes are the test."""

    def __init__(self, folder: Path, *, judges: bool, eta: int, ledger: str) -> None:
        judge = {"inference": {"reward_models": [{"name": "taste", "path": "taste"}]}, "reward": {"functions": []}}
        config = parse_config({
            "num_steps": NUM_STEPS, "algorithm": {"groups_per_step": B, "group_size": G}, "placement": {"kind": "colocated"},
            "buffer": {"max_staleness": eta, "ledger": ledger}, "generate": {"engine": {"kind": "fake", "num_slots": 64}},
            **(judge if judges else {}),
        })  # fmt: skip
        self.clock, self.peers = VirtualClock(100.0), Peers()
        self.buffer = open_buffer(config, folder, call_soon=asyncio.get_running_loop().call_soon_threadsafe)
        prompts = PromptSequence([Prompt(f"p{i}", text=f"{i}=", answer="46") for i in range(50)], seed=0)
        self.dispatcher = Dispatcher(config, self.buffer, prompts, self.peers, self.clock)
        self.feeder = BatchFeeder(config, self.dispatcher, self.clock)
        self.dispatcher.changed = self.wake_all
        self.reporter = Reporter(config, folder, open_sinks(config, folder), self.clock)
        self.stall_detector = StallDetector(600.0, self.clock.now())
        self.listener = InProcessListener(hello("controller", "controller"))
        self.switching = Switching(
            self.peers, self.dispatcher, self.feeder, self.reporter, self.stall_detector, self.clock, judges_too=judges
        )  # fmt: skip

    def wake_all(self) -> None:
        """Do what the controller's loops do."""
        self.dispatcher.issue()
        self.dispatcher.scores.dispatch(self.peers)
        self.feeder.woken.set()

    async def feed_learner(self) -> None:
        while True:
            await self.feeder.woken.wait()
            self.feeder.woken.clear()
            await self.feeder.send_possible()
            self.switching.consider()

    async def connect(self, kind: str, name: str) -> tuple[Peer, Connection]:
        far = await self.listener.connect(hello(kind, name))
        return self.peers.add(await self.listener.accept()), far

    async def join(self, kind: str, name: str, version: int | None = None) -> Connection:
        peer, far = await self.connect(kind, name)
        if kind == "learner":
            self.feeder.learner_ready(peer.connection, max(self.feeder.version, 0) if version is None else version)
        self.switching.join(peer, "model")
        return far

    async def reach(self, far: Connection, name: str, phase: str, number: int) -> None:
        assert await _next(far, SetPhase) == SetPhase(phase, number)  # type: ignore[arg-type]
        self.switching.reached(PhaseReached(name, phase, number))  # type: ignore[arg-type]

    def lose(self, name: str) -> None:
        """Do what the controller does about a death."""
        peer = self.peers.get(name)
        assert peer is not None
        self.peers.remove(peer)
        if name == "learner":
            self.feeder.learner_dead()
        self.switching.leave(name, peer.kind)

    async def until(self, phase: str) -> None:
        async with asyncio.timeout(30):
            while self.switching.phases.now != phase:
                await asyncio.sleep(0)

    async def in_rollout(self) -> tuple[Connection, Connection]:
        """Bring learner and generator to the first rollout."""
        learner = await self.join("learner", "learner")
        await self.reach(learner, "learner", "train", 0)
        generator = await self.join("generator", "generator-0")
        self.feeder.hold(False)
        await self.settled()
        self.switching.announced(0)
        await self.reach(learner, "learner", "rollout", 1)
        await self.load(generator)
        await self.reach(generator, "generator-0", "rollout", 1)
        return learner, generator

    async def load(self, generator: Connection) -> None:
        assert await _next(generator, LoadModel) == LoadModel("model")
        peer = self.peers.get("generator-0")
        assert peer is not None
        peer.num_slots, peer.live_version = 64, 0
        self.dispatcher.tell(ev.GeneratorReady("generator-0", 64, 0))
        self.dispatcher.tell(ev.VersionIsLive("generator-0", 0))

    async def generate(self, generator: Connection, groups: int, *, score: bool = False) -> None:
        for _ in range(groups):
            work = await _next(generator, GroupWork, Lane.DATA)
            for index in work.indices:
                self.dispatcher.take_samples([answer_to(work, index)], "generator-0")
                if score:
                    self.dispatcher.take_answers([Score(work.group_id, index, work.attempt, float(index))])
        await self.settled()

    def judge(self) -> None:
        """Answer all that models are asked."""
        for group in list(self.buffer.state.groups.values()):
            for index in group.unscored:
                answer = InferResult(group.group_id, index, group.attempt, b"", {"taste": float(index)}, "", "inference-0")
                self.dispatcher.take_answers([answer])

    async def settled(self) -> None:
        """Let the feed do what it can."""
        for _ in range(50):
            await asyncio.sleep(0.001)


@asynccontextmanager
async def _stage(folder: Path, *, judges: bool = False, eta: int = 0, ledger: str = "memory") -> AsyncIterator[Stage]:
    stage = Stage(folder, judges=judges, eta=eta, ledger=ledger)
    try:
        async with asyncio.timeout(100), asyncio.TaskGroup() as group:
            feeding = group.create_task(stage.feed_learner())
            yield stage
            feeding.cancel()
    finally:
        await stage.reporter.close(folder)
        stage.buffer.close()
        await stage.listener.close()


async def _next(connection: Connection, kind: type[T], lane: Lane = Lane.CONTROL) -> T:
    """Return the next message, which is of this kind."""
    async with asyncio.timeout(30):
        delivery = await connection.receive(lane)
    delivery.ack()
    assert isinstance(delivery.message, kind), delivery.message
    return delivery.message


async def test_before_its_turn_the_learner_is_sent_one_step_and_in_it_the_others_that_are_possible(tmp_path):
    async with _stage(tmp_path, eta=1) as stage:
        learner, generator = await stage.in_rollout()
        await stage.generate(generator, 2 * B, score=True)
        assert (await _next(learner, StepBatch, Lane.DATA)).step == 0
        assert learner.unacknowledged(Lane.DATA) == 0
        await stage.reach(generator, "generator-0", "train", 2)
        await stage.reach(learner, "learner", "train", 2)
        assert (await _next(learner, StepBatch, Lane.DATA)).step == 1


async def test_a_learner_that_dies_once_all_is_trained_trains_it_again_before_generators_have_the_device(tmp_path):
    async with _stage(tmp_path, ledger="disk") as stage:
        learner, generator = await stage.in_rollout()
        await stage.generate(generator, B, score=True)
        await stage.reach(generator, "generator-0", "train", 2)
        await stage.reach(learner, "learner", "train", 2)
        await stage.settled()
        stage.feeder.step_done(StepDone(0, 1, {}, 0.0, 1.0))
        stage.switching.announced(1)
        stage.lose("learner")
        await stage.settled()
        again = await stage.join("learner", "learner", version=0)
        await stage.settled()
        await stage.reach(again, "learner", "train", 2)
        assert (await _next(again, StepBatch, Lane.DATA)).step == 0
        await stage.settled()
        assert stage.switching.phases.now == "train"


async def test_models_judge_between_rollout_and_train_once_all_is_generated(tmp_path):
    async with _stage(tmp_path, judges=True) as stage:
        learner, generator = await stage.in_rollout()
        await stage.generate(generator, B - 1)
        judge = await stage.join("inference", "inference-0")
        assert stage.switching.phases.now == "rollout"  # a group is still being generated
        await stage.generate(generator, 1)
        await stage.reach(generator, "generator-0", "inference", 2)
        assert not stage.switching.may_judge
        assert await _next(judge, LoadModel) == LoadModel("model")
        await stage.reach(judge, "inference-0", "inference", 2)
        assert stage.switching.may_judge
        assert stage.switching.why_nothing_goes_out == "the device: phase inference"
        await stage.settled()
        assert stage.switching.phases.now == "inference"  # not all is judged
        stage.judge()
        await stage.reach(judge, "inference-0", "train", 3)
        await stage.reach(learner, "learner", "train", 3)
        assert (await _next(learner, StepBatch, Lane.DATA)).step == 0


async def test_what_a_switch_waits_for_is_the_controllers_wait_since_it_began(tmp_path):
    async with _stage(tmp_path) as stage:
        learner = await stage.join("learner", "learner")
        await stage.reach(learner, "learner", "train", 0)
        await stage.settled()
        assert stage.switching.waits() == []
        stage.clock.advance(5.0)
        stage.switching.announced(0)
        stage.clock.advance(2.0)
        (wait,) = stage.switching.waits()
        assert (wait.what, stage.clock.now() - wait.since_s) == ("learner to give the device back for phase rollout", 2.0)
        stage.switching.leave("learner", "learner")
        (wait,) = stage.switching.waits()
        assert wait.what == "a learner to be ready"


async def test_a_steps_report_says_where_the_time_went(tmp_path):
    async with _stage(tmp_path) as stage:
        learner = await stage.join("learner", "learner")
        await stage.reach(learner, "learner", "train", 0)
        await stage.settled()
        stage.switching.figured(StepDone(0, 1, {}, 0.0, 1.0))
        stage.clock.advance(3.0)
        stage.switching.announced(0)
        stage.clock.advance(0.5)
        move = ComponentMove("policy", "device", "host", 1 << 20, 0.25)
        assert await _next(learner, SetPhase) == SetPhase("rollout", 1)
        stage.switching.reached(PhaseReached("learner", "rollout", 1, (move,), {}, 1 << 20, stage.clock.now()))
        stage.clock.advance(4.0)
        figured = stage.switching.figured(StepDone(0, 1, {"reward/mean": 1.0}, 0.0, 1.0)).metrics
        assert figured == {
            "reward/mean": 1.0, "placement/train_s": 3.0, "placement/switch_s": 0.5, "placement/rollout_s": 4.0,
            "placement/inference_s": 0.0,
        }  # fmt: skip
        assert set(stage.switching.figured(StepDone(1, 2, {}, 0.0, 1.0)).metrics.values()) == {0.0}
    phases = [span for span in read_spans(tmp_path) if span.name == PHASE]
    assert ("controller", "train", 3.0) in [
        (span.process, span.attributes["phase"], span.end_s - span.start_s) for span in phases
    ]  # fmt: skip
    (moved,) = [span for span in phases if span.process == "learner"]
    assert (moved.attributes["component"], moved.end_s - moved.start_s) == ("policy", 0.25)
