"""The controller: accepts the run's processes, moves their messages, and carries out what the pure parts decide.

Owns the connections, the flow of groups (control/flow.py), the learner's feed (control/feed.py), the supervisor and the API of
one run. Invariants: one event loop, nothing here blocks it; every message kind has one handler; the run's end is decided by the
lifecycle alone and happens once: tell everyone, wait for them, close the ledger, write the report.

Called by pipeline.py, in a process of its own; spoken to through control/api.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.clock import Clock
from asyncrl.config.load import dump_config
from asyncrl.config.run import RunConfig
from asyncrl.control.api import serve_api
from asyncrl.control.checkpoints import Checkpoints
from asyncrl.control.elastic import Elastic
from asyncrl.control.evaluation import Evaluation
from asyncrl.control.feed import LearnerFeed
from asyncrl.control.flow import Flow
from asyncrl.control.launcher import Launcher
from asyncrl.control.life_events import (
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
from asyncrl.control.lifecycle import Lifecycle
from asyncrl.control.peers import Peer, Peers
from asyncrl.control.process_plan import plan_processes, spec_maker
from asyncrl.control.reporter import Reporter
from asyncrl.control.roster import Roster
from asyncrl.control.run_api import RunApi
from asyncrl.control.supervisor import Supervisor, SupervisorCallbacks
from asyncrl.control.switching import Switching
from asyncrl.control.waiting import all_waits, queue_depths
from asyncrl.control.watchdog import Wait, Watchdog, working_of
from asyncrl.errors import AsyncRLError, ConnectionClosed, LedgerError
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
from asyncrl.transport.channel import GOODBYE, Connection, Delivery, Lane, Listener

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
    flow: Flow
    feed: LearnerFeed
    reporter: Reporter
    held_out: list[Prompt]
    clock: Clock
    resumed: bool
    """The run goes on where it stopped: no first evaluation."""
    roster: Roster = field(default_factory=Roster)
    """The one that the listener asks."""


class Controller:
    """One run, from its first process to its last."""

    def __init__(self, parts: RunParts) -> None:
        self.config = config = parts.config
        self.run_folder = run_folder = parts.run_folder
        self.listener = parts.listener
        self.flow = parts.flow
        self.feed = parts.feed
        self.peers = parts.peers
        self.reporter = parts.reporter
        self.roster = parts.roster
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
        spec_for = spec_maker(config, run_folder)
        self.supervisor = Supervisor(
            self.lifecycle, parts.launcher, spec_for, config.supervision, callbacks, parts.clock, run_folder
        )
        self.elastic = Elastic(config, parts.flow, parts.peers, parts.roster, self.post, self.supervisor.terminate)
        self.watchdog = Watchdog(config.supervision.stall_timeout_s, self.started_s)
        self.model_folder = config.model.path if config.learner.kind == "external" and hasattr(config.model, "path") else ""
        self._weights: WeightsAvailable | None = None
        self.switching: Switching | None = None
        """Where learner and generators take turns on a device."""
        if config.placement.takes_turns:
            self.switching = Switching(parts.peers, parts.flow, parts.feed, parts.reporter, self.watchdog, parts.clock)
        self.checkpoints = Checkpoints(parts.peers)
        self.ending = asyncio.Event()
        self.over = asyncio.Event()
        self.moved = asyncio.Event()
        self._ok = False
        parts.feed.on_taken = parts.reporter.note_taken
        parts.flow.changed = parts.feed.wake
        self._handlers: dict[type, Callable[[Peer, Delivery], None]] = {
            Sample: self._on_sample,
            SampleFailure: self._on_failure,
            Score: self._on_score,
            InferResult: self._on_score,
            ModelsReady: self._on_models_ready,
            StepDone: self._on_step_done,
            WeightsAvailable: self._on_weights,
            VersionLive: self._on_version_live,
            Heartbeat: self._on_heartbeat,
            LearnerReady: self._on_learner_ready,
            EngineReady: self._on_engine_ready,
            EngineRoom: self._on_engine_room,
            CheckpointDone: self._on_checkpoint_done,
            PhaseReached: self._on_phase_reached,
            Fault: self._on_fault,
        }

    # -- life ------------------------------------------------------------------------------------------------------------

    async def run(self, owner_gone: asyncio.Event) -> bool:
        """Live through the whole run; return whether it ended well.

        Args:
            owner_gone: Set when whoever started the run has hung up; a run that is still on then stops at once.
        """
        async with serve_api(RunApi(self), self.run_folder):
            async with asyncio.TaskGroup() as group:
                self.flow.pick_up()
                supervising = group.create_task(self.supervisor.run(), name="supervisor")
                background = [
                    group.create_task(self._accept(group), name="accept"),
                    group.create_task(self._feed(), name="feed"),
                    group.create_task(self._tick(), name="tick"),
                    group.create_task(self._stop_when(owner_gone), name="owner"),
                ]
                await self.ending.wait()
                for peer in self.peers.all():
                    self._say_goodbye(peer)
                # A process that has not connected yet is still importing and holds nothing worth waiting for.
                everyone_heard = all(self.peers.get(name) is not None for name in self.supervisor.pids)
                await self.supervisor.shutdown(SHUTDOWN_S if everyone_heard else 1.0)
                await supervising
                for task in background:
                    task.cancel()
                await self.listener.close()
            await self._close_books()
            self.over.set()
            self.moved.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    await owner_gone.wait()
        return self._ok

    async def _feed(self) -> None:
        try:
            await self.feed.run()
        except AsyncRLError as error:
            self.post(ProcessFault("learner", f"its next step cannot be sent: {error}", fatal=True))

    def _say_goodbye(self, peer: Peer) -> None:
        peer.tell(Shutdown(self.lifecycle.reason))

    async def _close_books(self) -> None:
        await asyncio.to_thread(self.flow.buffer.check)
        await asyncio.to_thread(self.flow.buffer.close)
        await self.reporter.close(self.run_folder)

    async def _stop_when(self, owner_gone: asyncio.Event) -> None:
        await owner_gone.wait()
        if not self.lifecycle.over:
            log.warning("whoever started this run is gone: stopping")
            self.post(StopRequested("the process that started the run is gone"))

    async def _accept(self, group: asyncio.TaskGroup) -> None:
        while True:
            try:
                connection = await self.listener.accept()
            except ConnectionClosed:
                return
            before = self.peers.get(connection.peer.name)
            peer = self.peers.add(connection)
            if before is not None and self.roster.is_guest(peer.name):
                self._take_back(peer.name)
            elif before is not None:
                self.post(ProcessFault(peer.name, "its connection broke, and what was on its way is lost", fatal=False))
            group.create_task(self._serve_both(peer, connection), name=f"serve-{peer.name}")
            self._on_connected(peer)

    async def _serve_both(self, peer: Peer, connection: Connection) -> None:
        """Serve both lanes until the connection is over and all that came over it is dealt with."""
        async with asyncio.TaskGroup() as lanes:
            for lane in Lane:
                lanes.create_task(self._serve(peer, connection, lane), name=f"serve-{peer.name}-{lane.name}")
        if self.roster.is_guest(peer.name) and self.peers.remove(peer):
            self._guest_gone(peer)

    async def _serve(self, peer: Peer, connection: Connection, lane: Lane) -> None:
        """Hand every message of one lane to its handler until the connection ends."""
        while True:
            try:
                delivery = await connection.receive(lane)
            except ConnectionClosed:
                return
            self._dispatch(peer, delivery)

    def _dispatch(self, peer: Peer, delivery: Delivery) -> None:
        handler = self._handlers.get(type(delivery.message))
        if handler is None:
            log.warning("%s sent a %s, which is not for the controller", peer.name, type(delivery.message).__name__)
            delivery.ack()
            return
        handler(peer, delivery)

    async def _tick(self) -> None:
        """Do what no message sets off: windows that opened, evaluations that ended, stalls, the time limit."""
        while True:
            await self.clock.sleep(TICK_S)
            for peer in self.peers.all():
                peer.tell_rest()
            self.flow.pump()
            self._finish_evaluation()
            now = self.clock.now()
            await self._drop_silent_guests(now)
            self.elastic.tick(now, running=self.lifecycle.phase == "running", learner_idle=self._learner_idle)
            self.reporter.tick()
            self.watchdog.sampling_in_vain(bool(self.flow.fruitless))
            stall = self.watchdog.check(now, self.waits(now), queue_depths(self.flow), working_of(self.heartbeats().values()))
            if stall is not None:
                self.post(Stalled(stall.reason))
            limit_s = self.config.max_run_s
            if limit_s and now - self.started_s > limit_s and self.lifecycle.phase == "running":
                self.post(DrainRequested(f"max_run_s ({limit_s:g} s) is over"))

    # -- what the lifecycle wants ----------------------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        """Tell the lifecycle what happened, unless the run is over."""
        if not self.lifecycle.over:
            self.supervisor.post(event)

    # -- guests: generators that this run did not start ------------------------------------------------------------------

    def _welcome(self, peer: Peer) -> None:
        """Tell a guest what the run is; it loads the model like any generator."""
        self.roster.connected(peer.name, self.clock.now())
        peer.tell(JoinTerms(dump_config(self.config), str(self.run_folder.resolve()), platform.node()))

    def _guest_gone(self, peer: Peer) -> None:
        """Hand out again what a guest held, and give its place back. Its end is no death of ours."""
        why = peer.connection.closed_reason
        self.roster.gone(peer.name, said_goodbye=why == GOODBYE or self.ending.is_set())
        log.info("%s has left: %s", peer.name, why)
        if not self.ending.is_set():
            self._take_back(peer.name)

    def _take_back(self, name: str) -> None:
        self.reporter.forget(name)
        self.flow.generator_dead(name)

    async def _drop_silent_guests(self, now: float) -> None:
        """End the connection of guests that are there and say nothing; what follows is as if it had broken."""
        for name, silent_s in self.roster.overdue(now).items():
            peer = self.peers.get(name)
            if peer is not None:
                log.warning("%s sent no heartbeat for %.0f s: it is left out", name, silent_s)
                await peer.connection.close()

    def heartbeats(self) -> dict[str, Heartbeat]:
        """Return the newest heartbeat of every live process, guests among them, by name."""
        guests = (self.peers.get(name) for name in self.roster.guests)
        of_guests = {peer.name: peer.heartbeat for peer in guests if peer is not None and peer.heartbeat is not None}
        return {**self.supervisor.heartbeats, **of_guests}

    def _on_dead(self, name: str, kind: ProcessKind) -> None:
        peer = self.peers.get(name)
        if peer is not None:
            self.peers.remove(peer)
        if self.lifecycle.processes[name].state == "left":
            self.elastic.gone(name)
            self.reporter.forget(name)
        else:
            self.reporter.note_death(name, kind)
        if kind == "generator":
            self.flow.generator_dead(name)
        elif kind in {"reward", "inference"}:
            self.flow.judge_dead(name)
        elif kind == "learner":
            self.feed.learner_dead()
            self.checkpoints.fail("the learner died")
        if self.switching is not None:
            self.switching.leave(name)

    @property
    def _learner_idle(self) -> bool:
        """Return whether a learner is there and has nothing in hand."""
        return self.feed.idle and (self.config.learner.kind == "external" or bool(self.peers.of("learner")))

    def _on_leave(self, name: str) -> None:
        self.elastic.leaves(name, self.clock.now())

    def _on_phase(self, phase: Phase) -> None:
        self.moved.set()
        self.watchdog.hold(self.clock.now(), held=phase in {"paused", "starting", "warming"})
        # A run at its goal has only such steps to send as a learner that went back to a checkpoint must repeat.
        repeating = phase == "draining" and self.lifecycle.goal_reached
        self.feed.hold(phase not in {"running", "evaluating"} and not repeating)
        if phase == "paused":
            self.flow.hold(evaluation_too=True)
            self._tell_generators(Pause())
        elif phase == "running":
            self._tell_generators(Resume())
            self.flow.release()
            if self._reached_goal():
                self._goal()
        elif phase == "evaluating":
            self._tell_generators(Resume())
            self.flow.hold(evaluation_too=False)
            self._start_evaluation(self.feed.version)
        elif phase == "draining":
            self.flow.hold(evaluation_too=True)
            if self.config.learner.kind == "external" or self.feed.version < 0:
                # An outside learner's step stays taken for a resume; a learner that never was ready has nothing to save.
                self.post(Drained())
            else:
                self.feed.on_idle = self._write_last_checkpoint
        else:
            self.flow.hold(evaluation_too=True)

    def _on_end(self, ok: bool, reason: str) -> None:
        self._ok = ok
        self.checkpoints.fail(f"the run ended: {reason}")
        self.ending.set()

    def _reached_goal(self) -> bool:
        return self.feed.version >= self.config.num_steps

    def _write_last_checkpoint(self) -> None:
        """Called once the learner has nothing in hand while draining."""
        if self.checkpoints.version >= self.feed.version:
            self.post(Drained())
        else:
            self.checkpoints.ask(self.feed.version)

    # -- evaluation ------------------------------------------------------------------------------------------------------

    def _start_evaluation(self, version: int) -> None:
        if self.flow.evaluation is None and self._held_out:
            self.flow.start_evaluation(Evaluation(self.config, self._held_out, version, self.clock.now()))

    def _finish_evaluation(self) -> None:
        evaluation = self.flow.evaluation
        if evaluation is None or not evaluation.done or self.lifecycle.phase == "paused":
            return
        self.flow.evaluation = None
        report = evaluation.report(self.clock.now())
        self.reporter.note_evaluation(report)
        name, value = report.headline
        log.info("held-out %s at version %d: %.3f (%d samples)", name, report.version, value, report.num_samples)
        if self.lifecycle.phase == "evaluating":
            if report.version < self.feed.version:
                self._start_evaluation(self.feed.version)
            else:
                self.post(EvaluationDone())

    # -- messages --------------------------------------------------------------------------------------------------------

    def _on_connected(self, peer: Peer) -> None:
        log.info("%s connected (pid %d)", peer.name, peer.connection.peer.pid)
        if self.roster.is_guest(peer.name):
            self._welcome(peer)
        if self.ending.is_set():
            self._say_goodbye(peer)
        elif peer.kind == "reward":
            self.post(ProcessReady(peer.name))
            self.flow.pump()
        elif peer.kind in {"generator", "inference"} and self.model_folder:
            self._let_load(peer)

    def _on_sample(self, _: Peer, delivery: Delivery) -> None:
        sample = delivery.message
        assert isinstance(sample, Sample)
        self.watchdog.moved("evaluated" if sample.purpose == "eval" else "generated", self.clock.now())
        self.reporter.note_sample(sample)
        self.flow.take_sample(sample, delivery.ack)

    def _on_failure(self, peer: Peer, delivery: Delivery) -> None:
        failure = delivery.message
        assert isinstance(failure, SampleFailure)
        log.warning("g%d.%d failed at %s: %s", failure.group_id, failure.index, failure.stage, failure.reason)
        self.flow.take_failure(failure, peer.name, delivery.ack)

    def _on_score(self, _: Peer, delivery: Delivery) -> None:
        answer = delivery.message
        assert isinstance(answer, Score | InferResult)
        self.watchdog.moved("evaluated" if answer.purpose == "eval" else "scored", self.clock.now())
        self.reporter.note_judged(answer)
        score = self.flow.take_answer(answer, delivery.ack)
        if score is not None:
            self.reporter.note_score(score)

    def _on_models_ready(self, peer: Peer, delivery: Delivery) -> None:
        ready = delivery.message
        assert isinstance(ready, ModelsReady)
        delivery.ack()
        if self.peers.get(peer.name) is peer:
            log.info("%s: %s ready (%.1f MiB)", peer.name, ", ".join(ready.models), ready.num_bytes / 2**20)
            self.post(ProcessReady(peer.name))
            self.flow.pump()

    def _on_heartbeat(self, peer: Peer, delivery: Delivery) -> None:
        assert isinstance(delivery.message, Heartbeat)
        peer.heartbeat = delivery.message
        self.supervisor.note_heartbeat(delivery.message)
        self.roster.beat(peer.name, self.clock.now())
        delivery.ack()

    def _on_fault(self, peer: Peer, delivery: Delivery) -> None:
        fault = delivery.message
        assert isinstance(fault, Fault)
        delivery.ack()
        if self.roster.is_guest(peer.name):
            log.warning("%s cannot go on: %s", peer.name, fault.reason)
            return
        self.post(ProcessFault(fault.name, fault.reason, fault.fatal))

    def _on_learner_ready(self, peer: Peer, delivery: Delivery) -> None:
        ready = delivery.message
        assert isinstance(ready, LearnerReady)
        delivery.ack()
        if self.peers.get(peer.name) is not peer:
            return
        self.model_folder = ready.model_folder
        self.reporter.note_warm_start(ready.metrics)
        try:
            self.feed.learner_ready(peer.connection, ready.version)
        except LedgerError as error:
            self.post(ProcessFault(peer.name, str(error), fatal=True))
            return
        self.flow.buffer.version_published(ready.version)
        if self.switching is not None:
            self.switching.join(peer, self.model_folder)
        self.tell_model_folder()
        self.post(ProcessReady(peer.name))
        if self.lifecycle.phase == "draining":
            self.feed.on_idle = self._write_last_checkpoint
        if self._reached_goal():
            self._goal()

    def tell_model_folder(self) -> None:
        """Have everyone who waits for the model's folder open it; inference workers take being told twice."""
        for peer in self.peers.all():
            if peer.kind == "inference" or (peer.kind == "generator" and peer.num_slots == 0):
                self._let_load(peer)

    def _let_load(self, peer: Peer) -> None:
        """Have a process open the model, a generator on a shared device when it is its turn."""
        if self.switching is not None and peer.kind == "generator":
            self.switching.join(peer, self.model_folder)
        else:
            peer.tell(LoadModel(self.model_folder))

    def _on_phase_reached(self, peer: Peer, delivery: Delivery) -> None:
        reached = delivery.message
        assert isinstance(reached, PhaseReached)
        delivery.ack()
        if self.switching is not None and self.peers.get(peer.name) is peer:
            self.switching.reached(reached)

    def _on_engine_ready(self, peer: Peer, delivery: Delivery) -> None:
        ready = delivery.message
        assert isinstance(ready, EngineReady)
        delivery.ack()
        if self.peers.get(peer.name) is not peer or peer.num_slots:
            return  # it died meanwhile, or was told twice to load: taking it in again would forget the groups it was given
        peer.num_slots = ready.num_slots
        self.flow.generator_ready(peer.name, ready.num_slots, ready.version)
        if self.lifecycle.phase == "paused":
            peer.tell(Pause())
        if self._weights is not None:
            peer.tell(self._weights)
        if self.roster.is_guest(peer.name):
            self.roster.ready(peer.name)
        else:
            self.post(ProcessReady(peer.name))

    def _on_engine_room(self, peer: Peer, delivery: Delivery) -> None:
        room = delivery.message
        assert isinstance(room, EngineRoom)
        delivery.ack()
        if self.peers.get(peer.name) is peer and peer.num_slots:
            peer.num_slots = max(1, room.num_slots)
            self.flow.room_changed(peer.name, peer.num_slots)

    def _on_weights(self, _: Peer, delivery: Delivery) -> None:
        available = delivery.message
        assert isinstance(available, WeightsAvailable)
        delivery.ack()
        self.spread(available)
        if self.switching is not None:
            self.switching.announced(available.version)

    def spread(self, available: WeightsAvailable) -> None:
        """Tell every generator about a version, unless a newer one is out already."""
        if (
            self._weights is not None
            and available.version < self._weights.version
            and available.location == self._weights.location
        ):
            return
        self._weights = available
        self.reporter.note_published(available)
        self.flow.buffer.version_published(available.version)
        self._tell_generators(available)

    def _on_version_live(self, peer: Peer, delivery: Delivery) -> None:
        live = delivery.message
        assert isinstance(live, VersionLive)
        delivery.ack()
        self.watchdog.moved("live", self.clock.now())
        peer.live_version = live.version
        self.reporter.note_live(live, self._weights)
        if live.probe_error > self.config.broadcast.probe_tolerance:
            log.warning(
                "%s: probe logprobs of version %d differ by %.3g from the learner's (broadcast.probe_tolerance %g): engine and "
                "learner do not agree on the model; check dtypes", peer.name, live.version, live.probe_error,
                self.config.broadcast.probe_tolerance,
            )  # fmt: skip
        self.flow.version_live(peer.name, live.version)

    def _on_step_done(self, _: Peer, delivery: Delivery) -> None:
        done = delivery.message
        assert isinstance(done, StepDone)
        delivery.ack()
        self.step_done(done)

    def step_done(self, done: StepDone) -> None:
        """Note a finished step, whoever the learner is, and do what is due after it."""
        self.watchdog.moved("trained", self.clock.now())
        fresh = self.feed.step_done(done)
        self.flow.buffer.version_published(done.version)
        if fresh:
            done = done if self.switching is None else self.switching.figured(done)
            self.reporter.note_step(done, self.flow, self.peers, self.heartbeats())
            self.moved.set()
        checkpoint, evaluate = self.config.checkpoint.every_steps, self.config.eval.every_steps
        if self._reached_goal():
            self._goal()
        elif checkpoint and done.version % checkpoint == 0:
            self.checkpoints.ask(self.feed.version)
        if evaluate and done.version % evaluate == 0 and not self._reached_goal():
            self._start_evaluation(done.version)

    def _goal(self) -> None:
        if self.lifecycle.phase in {"running", "paused", "evaluating"}:
            self.checkpoints.ask(self.feed.version)
            self.post(StepsDone())

    def _on_checkpoint_done(self, _: Peer, delivery: Delivery) -> None:
        done = delivery.message
        assert isinstance(done, CheckpointDone)
        delivery.ack()
        log.info("checkpoint of version %d: %s (%.1f s)", done.version, done.folder, done.seconds)
        self.flow.buffer.forget(self.checkpoints.done(done), self.clock.now())
        if self.lifecycle.phase == "draining" and self.feed.idle:
            self._write_last_checkpoint()

    def _tell_generators(self, message: Message) -> None:
        for peer in self.peers.of("generator"):
            if peer.num_slots:
                peer.tell(message)

    def waits(self, now: float) -> list[Wait]:
        """Return who waits for what, the controller's own wait for a full step among them."""
        return all_waits(self.heartbeats().values(), self.flow, self.feed, self.peers, self.switching, now)
