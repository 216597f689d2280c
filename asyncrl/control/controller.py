"""The controller: one run's parts in one place, and the loops that move its data.

    loop             consumes                     produces                    waits for                unblocked by
    issue_groups     places, prompts              GroupWork                   a place, a slot          VersionLive, a ready group
    receive          Sample, Score, StepDone ...  events, acknowledgements    a message                any peer
    dispatch_scores  members without a score      ScoreRequest, InferRequest  a worker with room       Sample, Score
    feed_learner     ready groups                 StepBatch                   B groups, the learner    Score, StepDone
    follow_weights   WeightsAvailable             WeightsAvailable            a newer version          the learner, EngineReady
    supervise        heartbeats, time             events of the lifecycle     the clock

Every process of the run has one connection, to here. What it says is checked at the edge (edge.py), then handled by `handle`,
which returns at once; the loops do what becomes possible by it. The pure machines decide: the buffer's state which group goes
where, the lifecycle which process lives, the phases who has a shared device. Invariants: one event loop, nothing blocks it; the
run's end is decided by the lifecycle alone and happens once: tell everyone, wait for them, close the ledger, write the report.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from asyncrl.clock import Clock
from asyncrl.config.load import dump_config
from asyncrl.config.placement_rules import inference_takes_turns
from asyncrl.config.run import RunConfig
from asyncrl.control.autoscaler import Autoscaler
from asyncrl.control.batch_feeder import BatchFeeder, Checkpoints
from asyncrl.control.dispatcher import Dispatcher
from asyncrl.control.edge import Edge, vocabulary_of
from asyncrl.control.evaluation import Evaluation
from asyncrl.control.join import Membership
from asyncrl.control.launch.local import Launcher
from asyncrl.control.launch.processes import plan_processes, spec_maker
from asyncrl.control.lifecycle.events import (
    Drained,
    DrainRequested,
    EvaluationDone,
    Event,
    ProcessFault,
    ProcessReady,
    Stalled,
    StepsDone,
    StopRequested,
)
from asyncrl.control.lifecycle.state import Lifecycle
from asyncrl.control.lifecycle.supervisor import Supervisor, SupervisorCallbacks
from asyncrl.control.peers import Peer, Peers
from asyncrl.control.placement.switching import Switching
from asyncrl.control.reporter import Reporter
from asyncrl.control.stall_detector import StallDetector, Wait, all_waits, queue_depths, working_of
from asyncrl.errors import AsyncRLError, ConnectionClosed, LedgerError, RunError
from asyncrl.schema.batches import StepDone
from asyncrl.schema.codec import Message
from asyncrl.schema.control import (
    CheckpointDone,
    EngineReady,
    EngineRoom,
    Fault,
    Heartbeat,
    JoinTerms,
    LearnerReady,
    LoadModel,
    ModelsReady,
    Pause,
    PhaseReached,
    ProcessKind,
    Resume,
    Shutdown,
)
from asyncrl.schema.samples import InferResult, Prompt, Sample, SampleFailure, Score
from asyncrl.schema.status import Phase
from asyncrl.schema.weights import VersionLive, WeightsAvailable
from asyncrl.transport.protocol import GOODBYE, Delivery, Lane, Listener

log = logging.getLogger(__name__)

TICK_S = 0.25
SHUTDOWN_S = 10.0
"""For processes to end by themselves once they are told to."""
LINGER_S = 30.0
"""How long an ended run still answers questions when its owner does not hang up."""


@dataclass(frozen=True, slots=True)
class RunParts:
    """What pipeline.py has wired for one run."""

    config: RunConfig
    run_folder: Path
    listener: Listener
    launcher: Launcher
    peers: Peers
    dispatcher: Dispatcher
    feeder: BatchFeeder
    reporter: Reporter
    held_out: list[Prompt]
    clock: Clock
    resumed: bool
    """The run goes on where it stopped: no first evaluation."""
    membership: Membership = field(default_factory=Membership)
    """The one that the listener asks."""


class Controller:
    """One run, from its first process to its last."""

    def __init__(self, parts: RunParts) -> None:
        self.config = config = parts.config
        self.run_folder = run_folder = parts.run_folder
        self.listener, self.peers, self.membership = parts.listener, parts.peers, parts.membership
        self.dispatcher, self.feeder, self.reporter = parts.dispatcher, parts.feeder, parts.reporter
        self.buffer = parts.dispatcher.buffer
        self.clock = parts.clock
        self.started_s = parts.clock.now()
        self._held_out = parts.held_out
        self.lifecycle = Lifecycle(
            plan_processes(config),
            config.supervision,
            evaluate_first=config.eval.at_start and bool(parts.held_out) and not parts.resumed,
            evaluate_last=config.eval.at_end and bool(parts.held_out),
            logs_folder=str(run_folder / "logs"),
        )
        callbacks = SupervisorCallbacks(self._on_dead, self._on_phase, self._on_end, self._on_leave)
        self.supervisor = Supervisor(
            self.lifecycle, parts.launcher, spec_maker(config, run_folder), config.supervision, callbacks, parts.clock, run_folder
        )
        self.autoscaler = Autoscaler(
            config, parts.dispatcher, parts.peers, parts.membership, self.post, self.supervisor.terminate
        )
        self.stall_detector = StallDetector(config.supervision.stall_timeout_s, self.started_s)
        self.weights: WeightsAvailable | None = None
        """The version that was announced last."""
        self.switching: Switching | None = None
        """Where processes take turns on a device."""
        if config.placement.takes_turns:
            self.switching = Switching(
                parts.peers, parts.dispatcher, parts.feeder, parts.reporter, self.stall_detector, parts.clock,
                judges_too=inference_takes_turns(config),
            )  # fmt: skip
        self.checkpoints = Checkpoints(parts.peers)
        self.edge = Edge(run_folder, parts.dispatcher, parts.feeder)
        self.model_folder = ""
        if config.learner.kind == "external" and hasattr(config.model, "path"):
            self.know_model(config.model.path)
        self.ending = asyncio.Event()
        self.over = asyncio.Event()
        self.moved = asyncio.Event()
        self._ok = False
        self._work_changed, self._scores_changed, self._weights_changed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        parts.feeder.on_taken = parts.reporter.note_taken
        parts.dispatcher.changed = self._wake_all

    def _wake_all(self) -> None:
        self._work_changed.set()
        self._scores_changed.set()
        self.feeder.wake()

    async def run(self, owner_gone: asyncio.Event) -> bool:
        """Live through the whole run; return whether it ended well.

        Args:
            owner_gone: Set when whoever started the run has hung up; a run that is still on then stops at once.
        """
        async with asyncio.TaskGroup() as group:
            self.dispatcher.pick_up()
            supervising = group.create_task(self.supervisor.run(), name="supervisor")
            background = [
                group.create_task(self.accept(group), name="accept"),
                group.create_task(self.issue_groups(), name="issue"),
                group.create_task(self.dispatch_scores(), name="scores"),
                group.create_task(self.feed_learner(), name="feed"),
                group.create_task(self.follow_weights(), name="weights"),
                group.create_task(self.supervise(), name="supervise"),
                group.create_task(self._stop_when(owner_gone), name="owner"),
            ]
            await self.ending.wait()
            for peer in self.peers.all():
                peer.tell(Shutdown(self.lifecycle.reason))
            # A process that has not connected yet is still importing and holds nothing worth waiting for.
            everyone_heard = all(self.peers.get(name) is not None for name in self.supervisor.pids)
            await self.supervisor.shutdown(SHUTDOWN_S if everyone_heard else 1.0)
            await supervising
            for task in background:
                task.cancel()
            await self.listener.close()
        await asyncio.to_thread(self.buffer.check)
        await asyncio.to_thread(self.buffer.close)
        try:
            await self.reporter.close(self.run_folder)
        except OSError as error:  # on a full disk, say: the run's end and its reason are still to be told
            log.error("the pictures of the run could not be written: %s; `asyncrl report` draws them", error)  # noqa: TRY400
        self.over.set()
        self.moved.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await owner_gone.wait()
        return self._ok

    async def _stop_when(self, owner_gone: asyncio.Event) -> None:
        await owner_gone.wait()
        if not self.lifecycle.over:
            log.warning("whoever started this run is gone: stopping")
            self.post(StopRequested("the process that started the run is gone"))

    # -- the loops -------------------------------------------------------------------------------------------------------

    async def issue_groups(self) -> None:
        """Hand out groups and evaluation prompts while there are places and slots, and send what the windows take."""
        while True:
            await self._work_changed.wait()
            self._work_changed.clear()
            self.dispatcher.issue()

    async def accept(self, group: asyncio.TaskGroup) -> None:
        """Take in whoever connects, until the listener is closed; each lane is received by a task of the group."""
        while True:
            try:
                connection = await self.listener.accept()
            except ConnectionClosed:
                return
            # Asked again: one that greeted while its place was being given up had a place then, and has none by now.
            if refusal := self.membership.refusal(connection.peer):
                log.warning("%s is turned away: %s", connection.peer.name, refusal)
                await connection.close(refusal)
                continue
            before = self.peers.get(connection.peer.name)
            peer = self.peers.add(connection)
            if before is not None and self.membership.is_joined(peer.name):
                self._hand_out_again(peer.name)
            elif before is not None:
                self.post(ProcessFault(peer.name, "its connection broke, and what was on its way is lost", fatal=False))
            group.create_task(self._receive_all(peer), name=f"receive-{peer.name}")
            self._connected(peer)

    async def _receive_all(self, peer: Peer) -> None:
        """Receive both lanes until the connection is over and all that came over it is dealt with."""
        async with asyncio.TaskGroup() as lanes:
            for lane in Lane:
                lanes.create_task(self.receive(peer, lane), name=f"receive-{peer.name}-{lane.name}")
        self.edge.forget(peer)
        if self.membership.is_joined(peer.name) and self.peers.remove(peer):
            why = peer.connection.closed_reason
            self.membership.gone(peer.name, said_goodbye=why == GOODBYE or self.ending.is_set())
            log.info("%s has left: %s", peer.name, why)
            if not self.ending.is_set():
                self._hand_out_again(peer.name)

    async def receive(self, peer: Peer, lane: Lane) -> None:
        """Handle every message of one lane that the edge lets in, until the connection ends."""
        while True:
            try:
                delivery = await peer.connection.receive(lane)
            except ConnectionClosed:
                return
            refusal = self.edge.refusal(peer, delivery.message)
            if not refusal:
                self.handle(peer, delivery)
                continue
            delivery.ack()
            log.debug("refused a %s of %s: %s", type(delivery.message).__name__, peer.name, refusal)
            if self.edge.count(peer, delivery.message, self.clock.now()):
                reason = f"its messages were refused, the last, a {type(delivery.message).__name__}: {refusal}"
                log.warning("the connection of %s is ended: %s", peer.name, reason)
                if self.peers.get(peer.name) is peer and not self.membership.is_joined(peer.name):
                    self.post(ProcessFault(peer.name, reason, fatal=False))
                await peer.connection.close(reason)
                return

    async def dispatch_scores(self) -> None:
        """Ask reward and inference workers for scores, each as long as it has room."""
        while True:
            await self._scores_changed.wait()
            self._scores_changed.clear()
            self.dispatcher.send_score_requests()

    async def feed_learner(self) -> None:
        """Send the learner one step after the other, as they become possible; while draining, finish what was taken."""
        while True:
            await self.feeder.woken.wait()
            self.feeder.woken.clear()
            try:
                await self.feeder.send_possible()
            except AsyncRLError as error:
                self.post(ProcessFault("learner", f"its next step cannot be sent: {error}", fatal=True))
                return
            if self.lifecycle.phase == "draining" and self.feeder.has_learner and self.feeder.idle:
                self._write_last_checkpoint()
            if self.switching is not None:
                self.switching.consider()

    async def follow_weights(self) -> None:
        """Tell every generator that is ready about the newest version."""
        while True:
            await self._weights_changed.wait()
            self._weights_changed.clear()
            for peer in self.peers.of("generator"):
                if peer.num_slots and self.weights is not None and peer.told_weights is not self.weights:
                    peer.told_weights = self.weights
                    peer.tell(self.weights)

    async def supervise(self) -> None:
        """Do what no message sets off: windows that opened, evaluations that ended, stalls, the time limit."""
        while True:
            await self.clock.sleep(TICK_S)
            now, running = self.clock.now(), self.lifecycle.phase == "running"
            for peer in self.peers.all():
                peer.tell_rest()
            self._wake_all()
            self._finish_evaluation()
            for name, reason in self.membership.overdue(now).items():
                if (silent := self.peers.get(name)) is not None:
                    log.warning("%s: its connection is closed", reason)
                    await silent.connection.close()
            learner_is_there = self.config.learner.kind == "external" or bool(self.peers.of("learner"))
            self.autoscaler.tick(now, running=running, learner_idle=self.feeder.idle and learner_is_there)
            self.reporter.tick()
            self.stall_detector.sampling_in_vain(bool(self.dispatcher.fruitless))
            working = working_of(self.heartbeats().values())
            stall = self.stall_detector.check(now, self.waits(now), queue_depths(self.dispatcher), working)
            if stall is not None:
                self.post(Stalled(stall.reason))
            elif self.dispatcher.failures.verdict:
                self.post(Stalled(self.dispatcher.failures.verdict))
            limit_s = self.config.max_run_s
            if limit_s and now - self.started_s > limit_s and running:
                self.post(DrainRequested(f"max_run_s ({limit_s:g} s) is over"))

    # -- messages --------------------------------------------------------------------------------------------------------

    def handle(self, peer: Peer, delivery: Delivery) -> None:
        """Take in a message that the edge has let in, and acknowledge it once what it brought is safe."""
        message, now = delivery.message, self.clock.now()
        match message:
            case Sample():
                self.stall_detector.moved("evaluated" if message.purpose == "eval" else "generated", now)
                self.reporter.note_sample(message)
                self.dispatcher.take_sample(message, delivery.ack)
            case SampleFailure():
                is_awaited = self.dispatcher.take_failure(message, peer.name, delivery.ack)
                told = (message.group_id, message.index, message.stage, message.reason, "" if is_awaited else " (not awaited)")
                log.debug("g%d.%d failed at %s: %s%s", *told)
            case Score() | InferResult():
                self.stall_detector.moved("evaluated" if message.purpose == "eval" else "scored", now)
                self.reporter.note_judged(message)
                score = self.dispatcher.take_answer(message, delivery.ack)
                if score is not None:
                    self.reporter.note_score(score)
            case _:
                self._handle_control(peer, message, is_current=self.peers.get(peer.name) is peer)
                delivery.ack()

    def _handle_control(self, peer: Peer, message: Message, *, is_current: bool) -> None:
        """Take in what a process says of itself; `is_current`: no other connection has taken its name."""
        now = self.clock.now()
        match message:
            case Heartbeat():
                peer.heartbeat = message
                self.supervisor.note_heartbeat(message)
                self.membership.beat(peer.name, now)
            case Fault() if self.membership.is_joined(peer.name):
                log.warning("%s cannot go on: %s", peer.name, message.reason)
            case Fault():
                self.post(ProcessFault(peer.name, message.reason, message.fatal))
            case LearnerReady() if is_current:
                self._learner_ready(peer, message)
            case EngineReady() if is_current:
                self._engine_ready(peer, message)
            case EngineRoom() if is_current and peer.num_slots:
                peer.num_slots = max(1, message.num_slots)
                self.dispatcher.room_changed(peer.name, peer.num_slots)
            case ModelsReady() if is_current:
                log.info("%s: %s ready (%.1f MiB)", peer.name, ", ".join(message.models), message.num_bytes / 2**20)
                self.post(ProcessReady(peer.name))
                self._scores_changed.set()
            case VersionLive() if is_current:
                self._version_live(peer, message)
            case StepDone():
                self.step_done(message)
            case WeightsAvailable():
                self.spread(message)
                if self.switching is not None:
                    self.switching.announced(message.version)
            case CheckpointDone():
                log.info("checkpoint of version %d: %s (%.1f s)", message.version, message.folder, message.seconds)
                self.buffer.forget(min(self.checkpoints.done(message), max(self.feeder.version, 0)), now)
                if self.lifecycle.phase == "draining" and self.feeder.idle:
                    self._write_last_checkpoint()
            case PhaseReached() if is_current and self.switching is not None:
                self.switching.reached(message)
            case _:
                pass  # its process has been replaced meanwhile

    def _connected(self, peer: Peer) -> None:
        log.info("%s connected (pid %d)", peer.name, peer.connection.peer.pid)
        if self.membership.is_joined(peer.name):
            self.membership.connected(peer.name, self.clock.now())
            peer.tell(JoinTerms(dump_config(self.config), str(self.run_folder.resolve()), platform.node()))
        if self.ending.is_set():
            peer.tell(Shutdown(self.lifecycle.reason))
        elif peer.kind == "reward":
            self.post(ProcessReady(peer.name))
            self._scores_changed.set()
        elif peer.kind in {"generator", "inference"} and self.model_folder:
            self._let_load(peer)

    def _hand_out_again(self, generator: str) -> None:
        self.reporter.forget(generator)
        self.dispatcher.generator_dead(generator)

    def _learner_ready(self, peer: Peer, ready: LearnerReady) -> None:
        peer.is_ready = True
        self.know_model(ready.model_folder)
        self.reporter.note_warm_start(ready.metrics)
        try:
            self.feeder.learner_ready(peer.connection, ready.version)
        except LedgerError as error:
            self.post(ProcessFault(peer.name, str(error), fatal=True))
            return
        self.buffer.version_published(ready.version)
        if self.switching is not None:
            self.switching.join(peer, self.model_folder)
        self.tell_model_folder()
        self.post(ProcessReady(peer.name))
        if self.reached_goal:
            self._reach_goal()

    def _engine_ready(self, peer: Peer, ready: EngineReady) -> None:
        if peer.num_slots:
            return  # it was told twice to load: taking it in again would forget the groups it was given
        self.stall_detector.moved("ready", self.clock.now())
        peer.num_slots = ready.num_slots
        self.dispatcher.generator_ready(peer.name, ready.num_slots, ready.version)
        is_joined = self.membership.is_joined(peer.name)
        if self.lifecycle.phase == "paused":
            peer.tell(Pause())
        elif is_joined:
            peer.tell(Resume())  # the run may have been paused when it was cut off
        self._weights_changed.set()
        if is_joined:
            self.membership.ready(peer.name)
        else:
            self.post(ProcessReady(peer.name))

    def _version_live(self, peer: Peer, live: VersionLive) -> None:
        self.stall_detector.moved("live", self.clock.now())
        peer.live_version = live.version
        self.reporter.note_live(live, self.weights)
        tolerance = self.config.broadcast.probe_tolerance
        if live.probe_error > tolerance:
            log.warning(
                "%s: probe logprobs of version %d differ by %.3g from the learner's (broadcast.probe_tolerance %g): engine and "
                "learner do not agree on the model; check dtypes", peer.name, live.version, live.probe_error, tolerance,
            )  # fmt: skip
        self.dispatcher.version_live(peer.name, live.version)

    # -- versions and steps ----------------------------------------------------------------------------------------------

    def spread(self, available: WeightsAvailable) -> None:
        """Have every generator told about a version, unless a newer one is out already.

        Raises:
            RunError: There can be no such version: its step was never taken.
        """
        if not 0 <= available.version <= self.buffer.state.next_step:
            raise RunError(f"there is no version {available.version}: {self.buffer.state.next_step} steps were taken")
        if self.weights is not None and available.version < self.weights.version and available.location == self.weights.location:
            return
        self.weights = available
        self.reporter.note_published(available)
        self.buffer.version_published(available.version)
        self._weights_changed.set()

    def step_done(self, done: StepDone) -> None:
        """Note a finished step, whoever the learner is, and do what is due after it."""
        self.stall_detector.moved("trained", self.clock.now())
        fresh = self.feeder.step_done(done)
        self.buffer.version_published(done.version)
        if fresh:
            done = done if self.switching is None else self.switching.figured(done)
            self.reporter.note_step(done, self.dispatcher, self.peers, self.heartbeats())
            self.moved.set()
        checkpoint, evaluate = self.config.checkpoint.every_steps, self.config.eval.every_steps
        if self.reached_goal:
            self._reach_goal()
        elif checkpoint and done.version % checkpoint == 0:
            self.checkpoints.ask(self.feeder.version)
        if evaluate and done.version % evaluate == 0 and not self.reached_goal:
            self._start_evaluation(done.version)

    @property
    def reached_goal(self) -> bool:
        """Return whether the version that the run is for exists."""
        return self.feeder.version >= self.config.num_steps

    def _reach_goal(self) -> None:
        if self.lifecycle.phase in {"running", "paused", "evaluating"}:
            self.checkpoints.ask(self.feeder.version)
            self.post(StepsDone())

    def _write_last_checkpoint(self) -> None:
        if self.checkpoints.version >= self.feeder.version:
            self.post(Drained())
        elif not self.checkpoints.is_asked(self.feeder.version):
            self.checkpoints.ask(self.feeder.version)

    def know_model(self, folder: str) -> None:
        """Note where the model is, and how large its vocabulary is: token ids beyond that are refused from now on."""
        self.model_folder = folder
        if size := vocabulary_of(folder):
            for group_id in self.buffer.know_vocabulary(size, self.clock.now()):
                log.warning("group %d is dropped: it has token ids beyond the model's vocabulary of %d", group_id, size)

    def tell_model_folder(self) -> None:
        """Have everyone who waits for the model's folder open it; inference workers take being told twice."""
        for peer in self.peers.all():
            if peer.kind == "inference" or (peer.kind == "generator" and peer.num_slots == 0):
                self._let_load(peer)

    def _let_load(self, peer: Peer) -> None:
        """Have a process open the model; one on a shared device when it is its turn."""
        if self.switching is not None and self.switching.takes_turns(peer.kind):
            self.switching.join(peer, self.model_folder)
        else:
            peer.tell(LoadModel(self.model_folder))

    def _start_evaluation(self, version: int) -> None:
        if self.dispatcher.evaluation is None and self._held_out:
            self.dispatcher.start_evaluation(Evaluation(self.config, self._held_out, version, self.clock.now()))

    def _finish_evaluation(self) -> None:
        evaluation = self.dispatcher.evaluation
        if evaluation is None or not evaluation.done or self.lifecycle.phase == "paused":
            return
        self.dispatcher.evaluation = None
        report = evaluation.report(self.clock.now())
        self.reporter.note_evaluation(report)
        name, value = report.headline
        log.info("held-out %s at version %d: %.3f (%d samples)", name, report.version, value, report.num_samples)
        if self.lifecycle.phase == "evaluating":
            if report.version < self.feeder.version:
                self._start_evaluation(self.feeder.version)
            else:
                self.post(EvaluationDone())

    # -- what the lifecycle wants ----------------------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        """Tell the lifecycle what happened, unless the run is over."""
        if not self.lifecycle.over:
            self.supervisor.post(event)

    def heartbeats(self) -> dict[str, Heartbeat]:
        """Return the newest heartbeat of every live process, joined generators among them, by name."""
        peers = (self.peers.get(name) for name in self.membership.joined)
        joined = {peer.name: peer.heartbeat for peer in peers if peer is not None and peer.heartbeat is not None}
        return {**self.supervisor.heartbeats, **joined}

    def waits(self, now: float) -> list[Wait]:
        """Return who waits for what, the controller's own wait for a full step among them."""
        device = self.switching
        return all_waits(
            self.heartbeats().values(), self.dispatcher, self.feeder, self.peers, now,
            device_waits=device.waits() if device is not None else (),
            why_held=device.why_nothing_goes_out if device is not None else "",
            judges=("reward", "inference") if device is None or device.may_judge else ("reward",),
        )  # fmt: skip

    def _on_dead(self, name: str, kind: ProcessKind) -> None:
        peer = self.peers.get(name)
        if peer is not None:
            self.peers.remove(peer)
        if self.lifecycle.processes[name].state == "left":
            self.autoscaler.gone(name)
            self.reporter.forget(name)
        else:
            self.reporter.note_death(name, kind)
        if kind == "generator":
            self.dispatcher.generator_dead(name)
        elif kind in {"reward", "inference"}:
            self.dispatcher.judge_dead(name)
        elif kind == "learner":
            self._set_aside_what_kills()
            self.checkpoints.fail("the learner died")
        if self.switching is not None:
            self.switching.leave(name, kind)

    def _set_aside_what_kills(self) -> None:
        """Stop feeding; keep the batch that the learner died over, where that is now dropped, in the run's folder."""
        over = self.feeder.learner_dead()
        if over is None:
            return
        step, groups = over
        path = self.run_folder / "set_aside" / f"step-{step}.msgpack"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(msgspec.msgpack.encode(groups))
        log.error(
            "the learner died twice over step %d: groups %s are set aside in %s and not trained",
            step, ", ".join(str(group.group_id) for group in groups), path,
        )  # fmt: skip

    def _on_leave(self, name: str) -> None:
        self.autoscaler.leaves(name, self.clock.now())

    def _on_phase(self, phase: Phase) -> None:
        self.moved.set()
        self.stall_detector.hold(self.clock.now(), held=phase in {"paused", "starting", "warming"})
        # While draining, a step that was taken is still trained: also those that a learner from a checkpoint must repeat.
        self.feeder.hold(phase not in {"running", "evaluating"}, finish_taken=phase == "draining")
        if phase == "running":
            self._tell_generators(Resume())
            self.dispatcher.release()
            if self.reached_goal:
                self._reach_goal()
            return
        self.dispatcher.hold(evaluation_too=phase != "evaluating")
        if phase == "paused":
            self._tell_generators(Pause())
        elif phase == "evaluating":
            self._tell_generators(Resume())
            self._start_evaluation(self.feeder.version)
        elif phase == "draining" and (self.config.learner.kind == "external" or self.feeder.version < 0):
            # An outside learner's step stays taken for a resume; a learner that never was ready has nothing to save.
            self.post(Drained())

    def _tell_generators(self, message: Message) -> None:
        for peer in self.peers.of("generator"):
            if peer.num_slots:
                peer.tell(message)

    def _on_end(self, ok: bool, reason: str) -> None:
        self._ok = ok
        self.checkpoints.fail(f"the run ended: {reason}")
        self.ending.set()
