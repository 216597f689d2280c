"""The controller: one run's parts in one place, and the loops that move its data.

    loop             consumes                     produces                    waits for                unblocked by
    issue_groups     places, prompts              GroupWork                   a place, a slot          VersionLive, a ready group
    receive          Samples, Scores ...          events, acknowledgements    a message                any peer
    dispatch_scores  members without a score      ScoreRequest, InferRequest  a worker with room       Sample, Score
    feed_learner     ready groups                 StepBatch                   B groups, the learner    Score, StepDone
    follow_weights   WeightsAvailable             WeightsAvailable            a newer version          the learner, EngineReady
    supervise        heartbeats, time             events of the lifecycle     the clock

Every process of the run has one connection, to the controller. edge.py checks each message, then `handle` handles it and returns
at once; the loops do what the message made possible. Pure state machines decide: the buffer's state decides which group goes
where, the lifecycle which processes run, the phases which process has a shared device. Invariants: one event loop, and nothing
blocks it; only the lifecycle ends the run, once: tell every process, wait for them, close the ledger, write the report.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.buffer import events as buffer_events
from asyncrl.buffer.buffer import Buffer, TakenStep
from asyncrl.clock import Clock
from asyncrl.config.live import CONFIG_BEFORE, undo_resume
from asyncrl.config.load import dump_config, parse_config
from asyncrl.config.places import inference_takes_turns
from asyncrl.config.run import RunConfig
from asyncrl.control.autoscaler import Autoscaler
from asyncrl.control.batch_feeder import MOST_DEATHS, BatchFeeder, Checkpoints, RecordedStep, keep_set_aside
from asyncrl.control.dispatcher import Dispatcher
from asyncrl.control.edge import Edge
from asyncrl.control.evaluation import Evaluation
from asyncrl.control.join import Membership
from asyncrl.control.launch.process_main import Ownership
from asyncrl.control.launch.processes import Launcher, plan_processes, spec_of
from asyncrl.control.lifecycle import events as ev
from asyncrl.control.lifecycle.failure_watch import CALLER_HOLDS, SILENT_AFTER_BEATS, StallDetector, Wait, wait_chain
from asyncrl.control.lifecycle.state import Lifecycle
from asyncrl.control.lifecycle.supervisor import Supervisor
from asyncrl.control.peers import Peer, Peers
from asyncrl.control.placement.memory import number_of_model
from asyncrl.control.placement.switching import Switching
from asyncrl.control.reporter import Reporter
from asyncrl.control.scoring import JUDGES, Caller
from asyncrl.errors import AsyncRLError, ConfigError, ConnectionClosed, LedgerError, RunError, shown
from asyncrl.observe.decisions import Beginning, Recorder
from asyncrl.observe.sinks import open_sinks, without_secrets
from asyncrl.observe.spans import IDLE, span, spans_of
from asyncrl.schema import control as msg
from asyncrl.schema.codec import Message
from asyncrl.schema.samples import InferResult, Progress, SampleFailure, Samples, Scores, StepDone
from asyncrl.schema.status import Alarm, Phase
from asyncrl.schema.weights import VersionLive, WeightsAvailable
from asyncrl.tasks.task import PromptSequence, TaskData
from asyncrl.transport.protocol import GOODBYE, Lane, Listener

log = logging.getLogger(__name__)

TICK_S = 0.25
SHUTDOWN_S = 10.0
"""How long processes have to end by themselves once they are told to."""
LINGER_S = 30.0
"""How long an ended run still answers questions when its owner does not hang up."""
KEPT_STEPS = 16
"""With an outside learner: at least this many of the newest steps are kept, so that people can read their samples; they are never
repeated. Older steps are forgotten once every KEPT_STEPS steps, because each time the ledger looks through all its samples."""


@dataclass(eq=False)
class Controller:
    """One run, from its first process to its last; pipeline.py opens what it is made of."""

    config: RunConfig
    run_folder: Path
    buffer: Buffer
    task: TaskData
    listener: Listener
    launcher: Launcher
    membership: Membership
    clock: Clock
    recorder: Recorder | None = None
    """None where observe.record is off. It already knows what the ledger held at the start."""

    def __post_init__(self) -> None:
        config, clock, self._held_out = self.config, self.clock, list(self.task.held_out)
        self.started_s = clock.now()
        self.peers = Peers()
        self.dispatcher = Dispatcher(config, self.buffer, PromptSequence(self.task.train, config.seed), self.peers, clock)
        self.feeder = BatchFeeder(config, self.dispatcher, clock)
        self.checkpoints = Checkpoints(self.peers)
        self.reporter = Reporter(config, self.run_folder, open_sinks(config, self.run_folder), clock)
        self._judged_before = len(self.reporter.evaluations)
        self.caller = Caller(config.supervision.heartbeat_timeout_s / 2, self.started_s) if config.reward.is_caller else None
        self.edge = Edge(self.run_folder, self.dispatcher, self.feeder)
        self.stall_detector = StallDetector(config.supervision.stall_timeout_s, self.started_s)
        self._step_open_s = self.started_s
        self._is_resumed = self.buffer.counts().issued > 0
        self.resumed = ""
        self.lifecycle = Lifecycle(
            plan_processes(config),
            config.supervision,
            evaluate_first=config.eval.at_start and bool(self._held_out) and not self._is_resumed,
            evaluate_last=config.eval.at_end and bool(self._held_out),
            logs_folder=str(self.run_folder / "logs"),
        )
        if (recorder := self.recorder) is not None:
            if config.observe.records_batches:
                self.feeder.record = lambda taken: RecordedStep(
                    taken.step, recorder.life, taken.groups, taken.params
                ).write(recorder.folder)  # fmt: skip
            evaluates = self.lifecycle.evaluate_first, self.lifecycle.evaluate_last
            recorder.begin(Beginning(config, *evaluates, str(self.run_folder / "logs")))
        self.supervisor = Supervisor(
            self.lifecycle, self.launcher, partial(spec_of, config, self.run_folder), config.supervision, clock, self.run_folder,
            on_dead=self._on_dead, on_phase=self._on_phase, on_end=self._on_end,
            on_restart=lambda one: self.reporter.note_event(
                "restart", one.name, f"incarnation {one.incarnation}, pid {one.pid}", self.feeder.version
            ),
            on_leave=lambda name: self.autoscaler.leaves(name, clock.now()),
        )  # fmt: skip
        self.autoscaler = Autoscaler(
            config, self.dispatcher, self.peers, self.membership, self.post, self.supervisor.terminate
        )  # fmt: skip
        self.switching: Switching | None = None
        if config.placement.takes_turns:
            self.switching = Switching(
                self.peers, self.dispatcher, self.feeder, self.reporter, self.stall_detector, clock,
                judges_too=inference_takes_turns(config),
            )  # fmt: skip
        for machine in (self.lifecycle, self.autoscaler.scaler, self.switching.phases if self.switching else None):
            if machine is not None and recorder is not None:
                machine.watchers = (recorder.note,)
        self.weights: WeightsAvailable | None = None
        """The version announced last."""
        self.model_folder = ""
        if config.learner.kind != "builtin" and hasattr(config.model, "path"):
            self.know_model(config.model.path)
        self.ending, self.over = asyncio.Event(), asyncio.Event()
        self.moved = asyncio.Event()
        """Set at every finished step and every change of phase."""
        self._work_changed, self._scores_changed, self._weights_changed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.feeder.on_taken = self.reporter.note_taken
        self.buffer.state.watchers += (self.reporter.bias.note,)
        self.dispatcher.changed = self._wake_all

    def _wake_all(self) -> None:
        self._work_changed.set()
        self._scores_changed.set()
        self.feeder.woken.set()

    async def run(self, owner: Ownership) -> bool:
        """Control the run from start to end; return whether it ended well."""
        async with asyncio.TaskGroup() as group:
            if self.dispatcher.asked is not None:  # groups that callers asked for before a resume are dropped
                self.dispatcher.release(list(self.buffer.state.groups))
            self.dispatcher.follow(self.buffer.state.unscored())
            supervising = group.create_task(self.supervisor.run(), name="supervisor")
            loops = {
                "accept": self.accept(group), "issue": self.issue_groups(), "scores": self.dispatch_scores(),
                "feed": self.feed_learner(), "weights": self.follow_weights(), "supervise": self.supervise(),
                "owner": self.end_without_owner(owner),
            }  # fmt: skip
            background = [group.create_task(loop, name=name) for name, loop in loops.items()]
            await self.ending.wait()
            for peer in self.peers.values():
                peer.tell(msg.Shutdown(self.lifecycle.reason))
            # A process that has not connected yet is still importing and holds nothing worth waiting for.
            everyone_heard = self.supervisor.live.keys() <= self.peers.keys()
            await self.supervisor.shutdown(SHUTDOWN_S if everyone_heard else 1.0)
            await supervising
            for task in background:
                task.cancel()
            await self.listener.close()
        await asyncio.to_thread(self.buffer.check)
        await asyncio.to_thread(self.buffer.close)
        try:
            await self.reporter.close()
        except OSError as error:  # on a full disk, for example: the run's end and its reason must still be reported
            log.error("the plots of the run could not be written: %s; draw them with `asyncrl report`", error)  # noqa: TRY400
        self.over.set()
        self.moved.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await owner.nobody.wait()
        return self.lifecycle.phase == "stopped"

    # -- the loops -------------------------------------------------------------------------------------------------------

    async def issue_groups(self) -> None:
        """Hand out groups and evaluation prompts.

        Consumes prompts, and places under the staleness bound. Produces GroupWork. Waits for a place and a generator with free
        slots; unblocked by VersionLive, a group that is ready or dropped, or a window with room again.
        """
        while True:
            await self._work_changed.wait()
            self._work_changed.clear()
            self.dispatcher.issue()

    async def accept(self, group: asyncio.TaskGroup) -> None:
        """Accept connections until the listener is closed; a task of `group` receives the messages of each."""
        while True:
            try:
                connection = await self.listener.accept()
            except ConnectionClosed:
                return
            # Checked again: a peer that said hello while its place was being given up had a place then, and has none now.
            if refusal := self.membership.refusal(connection.peer):
                log.warning("%s is refused: %s", connection.peer.name, refusal)
                await connection.close(refusal)
                continue
            before = self.peers.get(connection.peer.name)
            peer = self.peers.add(connection)
            if before is not None and peer.name in self.membership.joined:
                self.reporter.forget(peer.name)
                self.dispatcher.generator_dead(peer.name)
            elif before is not None:
                self.post(ev.ProcessFault(peer.name, "its connection broke, and messages on the way were lost", fatal=False))
            group.create_task(self._receive_all(peer), name=f"receive-{peer.name}")
            log.info("%s connected (pid %d)", peer.name, connection.peer.pid)
            if before is None and peer.kind != "learner":  # it has a model to make first
                self._note_start(peer.name)
            if peer.name in self.membership.joined:
                self.membership.heartbeats.expect(peer.name, self.clock.now())
                self.membership.heartbeats.beat(peer.name, self.clock.now())
                self.reporter.note_event("joined", peer.name, version=self.feeder.version)
                told = dump_config(parse_config(without_secrets(self.config)))
                peer.tell(msg.JoinTerms(told, str(self.run_folder.resolve()), platform.node()))
            if self.ending.is_set():
                peer.tell(msg.Shutdown(self.lifecycle.reason))
            elif peer.kind == "reward":
                self.post(ev.ProcessReady(peer.name))
                self._scores_changed.set()
            elif peer.kind in {"generator", "inference"} and self.model_folder:
                self._let_load(peer)

    async def _receive_all(self, peer: Peer) -> None:
        """Receive both lanes until the connection has ended and everything received is handled."""
        async with asyncio.TaskGroup() as lanes:
            for lane in Lane:
                lanes.create_task(self.receive(peer, lane), name=f"receive-{peer.name}-{lane.name}")
        if peer.name in self.membership.joined and self.peers.remove(peer):
            why = peer.connection.closed_reason
            self.membership.gone(peer.name, said_goodbye=why == GOODBYE or self.ending.is_set())
            log.info("%s has left: %s", peer.name, why)
            self.reporter.note_event("left", peer.name, why, self.feeder.version)
            if not self.ending.is_set():
                self.reporter.forget(peer.name)
                self.dispatcher.generator_dead(peer.name)

    async def receive(self, peer: Peer, lane: Lane) -> None:
        """Handle the messages of one lane of one peer, until its connection ends.

        Consumes every message that the edge lets in; all samples and scores that are there are handled together. Produces events
        for the state machines, and acknowledgements once the messages are in the ledger. Waits for a message from the peer.
        """
        while True:
            try:
                # A control message may depend on the one before it; samples and scores do not.
                arrival = await (peer.connection.receive_all() if lane is Lane.DATA else peer.connection.receive(lane))
            except ConnectionClosed:
                return
            messages, reason = self.edge.let_in(peer, arrival.messages, self.clock.now())
            for kind, alike in itertools.groupby(messages, type):
                self.handle(peer, kind, list(alike))
            if lane is Lane.DATA:
                self.buffer.when_committed(arrival.ack)
            else:
                arrival.ack()
            if peer.name in self.membership.joined:
                faults = [f"it cannot go on: {shown(each.reason)}" for each in messages if isinstance(each, msg.Fault)]
                reason = reason or next(iter(faults), "") or self.dispatcher.why_unfit(peer.name)
            if reason:
                log.warning("the connection of %s is ended: %s", peer.name, reason)
                if self.peers.get(peer.name) is peer and peer.name not in self.membership.joined:
                    self.post(ev.ProcessFault(peer.name, reason, fatal=False))
                await peer.connection.close(reason)
                return

    async def dispatch_scores(self) -> None:
        """Ask reward and inference workers for scores.

        Consumes members without a score. Produces ScoreRequest and InferRequest. Waits for a worker with room; unblocked by
        Sample, an answered request, a worker that is ready.
        """
        while True:
            await self._scores_changed.wait()
            self._scores_changed.clear()
            self.dispatcher.scores.dispatch(self.peers)
            if self.caller is not None:
                self.moved.set()

    async def feed_learner(self) -> None:
        """Send the learner one step after the other; while draining, finish the steps already taken, then request a checkpoint.

        Consumes ready groups. Produces StepBatch. Waits for the groups of a step and for a learner that is at most a step behind;
        unblocked by Score, StepDone, LearnerReady.
        """
        while True:
            await self.feeder.woken.wait()
            self.feeder.woken.clear()
            try:
                await self.feeder.send_possible()
            except AsyncRLError as error:
                self.post(ev.ProcessFault("learner", f"its next step cannot be sent: {error}", fatal=True))
                return
            if self.feeder.learner is not None:
                self._finish_drain()
            if self.switching is not None:
                self.switching.consider()

    async def follow_weights(self) -> None:
        """Tell every generator that is ready about the newest version.

        Consumes and produces WeightsAvailable. Waits for a newer version; unblocked by the learner, EngineReady.
        """
        while True:
            await self._weights_changed.wait()
            self._weights_changed.clear()
            for peer in self.peers.of("generator"):
                if peer.num_slots and self.weights is not None and peer.told_weights is not self.weights:
                    peer.told_weights = self.weights
                    peer.tell(self.weights)

    async def supervise(self) -> None:
        """Do what no message triggers: check for windows with room again, finished evaluations, stalls and the time limit.

        Consumes heartbeats and time. Produces events of the lifecycle. Waits for the clock.
        """
        while True:
            await self.clock.sleep(TICK_S)
            now, running = self.clock.now(), self.lifecycle.phase == "running"
            for peer in self.peers.values():
                peer.tell()
            self._wake_all()
            self._finish_evaluation()
            for name, reason in self.membership.heartbeats.overdue(now).items():
                if (silent := self.peers.get(name)) is not None:
                    log.warning("%s: its connection is closed", reason)
                    await silent.connection.close(reason)
            learner_idle = self.feeder.idle and (self.config.learner.kind != "builtin" or bool(self.peers.of("learner")))
            self.autoscaler.tick(now, running=running, learner_idle=learner_idle)
            self.reporter.note_second(self.dispatcher, self.peers, learner_idle=learner_idle)
            waits = self.waits(now)
            self.reporter.tick(waits, self.heartbeats())
            asked = self.dispatcher.asked
            is_callers_turn = asked is not None and (not asked.num_waiting or self._caller_holds_all())
            if self.config.learner.kind == "external" and not self.lifecycle.goal_reached:
                is_callers_turn = not self.feeder.is_asked
            if is_callers_turn or (self.caller is not None and self.caller.is_lost(now)):
                self.stall_detector.moved("waited for its caller", now)
            self.stall_detector.in_vain = bool(self.dispatcher.fruitless)
            counts, scores = self.buffer.counts(), self.dispatcher.scores
            queues = {
                "ready": counts.ready, "running": counts.running, "scoring": counts.scoring, "scores asked for": len(scores),
                **{f"of {kind} workers": len(scores.open[kind]) for kind in JUDGES},
            }  # fmt: skip
            if running and self.config.learner.kind == "builtin":  # else its caller says when the next step is
                open_s = now - self._step_open_s
                for alarm in self.reporter.note_open_step(open_s, self.feeder.version, wait_chain(waits, now)):
                    self._act_on(alarm)
            working = [beat.name for beat in self.heartbeats() if not beat.waiting_for]
            working += [one.name for one in self.lifecycle.processes.values() if one.is_coming]
            stall = self.stall_detector.check(now, waits, queues, working, is_warming=self.lifecycle.phase == "warming")
            holding = [name for name in self.membership.joined if not self.dispatcher.holds_nothing(name)] if stall else []
            for name in holding:  # it may be theirs, and a run does not end for that
                if (guest := self.peers.get(name)) is not None:
                    log.warning("the connection of %s is ended: it holds groups while %s", name, stall)
                    await guest.connection.close("it holds groups, and nothing in the run moved for too long")
            if holding:
                stall = ""
                self.stall_detector.moved("sent joined generators away", now)
            if stall or self.dispatcher.failures.verdict:
                self.post(ev.Stalled(stall or self.dispatcher.failures.verdict))
            limit_s = self.config.max_run_s
            may_drain = self.lifecycle.phase in {"warming", "evaluating", "running", "paused"} and not self.lifecycle.goal_reached
            if limit_s and now - self.started_s > limit_s and may_drain:
                self.post(ev.DrainRequested(f"max_run_s ({limit_s:g} s) is over"))

    async def end_without_owner(self, owner: Ownership) -> None:
        """End the run once it has no owner any more."""
        await owner.gone.wait()
        drain = ev.DrainRequested(owner.why)
        drains = owner.then == "drain" and not self.lifecycle.refusal(drain)
        log.warning("nobody holds this run: %s", "draining" if drains else "stopping")
        self.post(drain if drains else ev.StopRequested(owner.why))

    # -- messages --------------------------------------------------------------------------------------------------------

    def handle(self, peer: Peer, kind: type[Message], messages: Sequence[Any]) -> None:
        """Handle messages of one kind that arrived together and passed the edge's checks."""
        now = self.clock.now()
        if kind is Samples:
            awaited = self.dispatcher.take_samples(messages, peer.name)
            self.reporter.spans.write(*(one for samples in awaited for one in spans_of(samples)))
            for purpose in {samples.purpose for samples in awaited}:
                self.stall_detector.moved("evaluated" if purpose == "eval" else "generated", now)
        elif kind is Scores or kind is InferResult:
            self.take_answers(messages)
        elif kind is Progress:
            if (asked := self.dispatcher.asked) is not None:
                for piece in messages:
                    asked.progress(piece)
        elif kind is SampleFailure:
            for failure in messages:
                self.dispatcher.take_failure(failure, peer.name)
        else:
            for message in messages:
                self._handle_control(peer, message)

    def take_answers(self, answers: Sequence[Scores | InferResult]) -> None:
        """Enter scores, whichever process gave them."""
        self.dispatcher.take_answers(answers)
        self.reporter.note_answers(answers)
        for purpose in {answer.purpose for answer in answers}:
            self.stall_detector.moved("evaluated" if purpose == "eval" else "scored", self.clock.now())

    def _handle_control(self, peer: Peer, message: Message) -> None:
        """Handle a process's message about itself; ignore it where a newer connection has taken the same name."""
        now, is_current = self.clock.now(), self.peers.get(peer.name) is peer
        match message:
            case msg.Heartbeat():
                peer.heartbeat, peer.heard_s = message, now
                if peer.name in self.lifecycle.processes:
                    self.post(ev.Heard(peer.name))
                self.membership.heartbeats.beat(peer.name, now)
            case msg.Fault() if peer.name not in self.membership.joined:
                self.post(ev.ProcessFault(peer.name, message.reason, message.fatal))
            case msg.LearnerReady() if is_current:
                self._learner_ready(peer, message)
            case msg.EngineReady() if is_current:
                self._engine_ready(peer, message)
            case msg.EngineRoom() if is_current and peer.num_slots:
                peer.num_slots = max(1, message.num_slots)
                self.dispatcher.tell(buffer_events.RoomChanged(peer.name, peer.num_slots))
            case msg.ModelsReady() if is_current:
                log.info("%s: %s ready (%.1f MiB)", peer.name, ", ".join(message.models), message.num_bytes / 2**20)
                self.post(ev.ProcessReady(peer.name))
                self._scores_changed.set()
            case VersionLive() if is_current:
                if message.version > peer.live_version and peer.name not in self.membership.joined:
                    self.stall_detector.moved("live", now)
                peer.live_version = message.version
                self.reporter.note_live(message, self.peers)
                self.dispatcher.tell(buffer_events.VersionIsLive(peer.name, message.version))
            case StepDone():
                self.step_done(message)
            case WeightsAvailable():
                self.spread(message)
                if self.switching is not None:
                    self.switching.announced(message.version)
            case msg.CheckpointDone():
                self.reporter.note_checkpoint(message)
                log.info("checkpoint of version %d: %s (%.1f s)", message.version, message.folder, message.seconds)
                self.buffer.forget(min(self.checkpoints.done(message), max(self.feeder.version, 0)), now)
                self._finish_drain()
            case msg.PhaseReached() if is_current and self.switching is not None:
                self.switching.reached(message)

    def _note_start(self, name: str) -> None:
        if name in self.supervisor.live:
            since_s = self.supervisor.live[name].pid.started_s
            self.reporter.spans.write(span(IDLE, since_s, self.clock.now(), name, why="its start"))

    def _learner_ready(self, peer: Peer, ready: msg.LearnerReady) -> None:
        peer.is_ready = True
        self._note_start(peer.name)
        if self.lifecycle.phase == "warming":  # a warm start is done
            self.stall_detector.hold(self.clock.now(), held=False)
        if ready.metrics:
            log.info("warm start: %s", ", ".join(f"{name} {value:.4g}" for name, value in ready.metrics.items()))
        try:
            self.know_model(ready.model_folder)
            self.feeder.learner_ready(peer.connection, ready.version)
        except (ConfigError, LedgerError) as error:
            self.post(ev.ProcessFault(peer.name, str(error), fatal=True))
            return
        self.buffer.version_published(ready.version)
        has_resumed = self._is_resumed and not self.resumed
        if has_resumed:
            self.resumed = f"resumed at step {ready.version} from {ready.checkpoint or 'the model as the run began'}"
            self.reporter.note_event("restart", "run", self.resumed, ready.version)
        if self.switching is not None:
            self.switching.join(peer, self.model_folder)
        self.tell_model_folder()
        self.post(ev.ProcessReady(peer.name))
        every, version = self.config.eval.every_steps, ready.version
        is_judged = any(report.version == version for report in self.reporter.evaluations)
        if not self.reach_goal() and has_resumed and every and version > 0 and version % every == 0 and not is_judged:
            self._start_evaluation(version)  # it was under way as the run ended

    def _engine_ready(self, peer: Peer, ready: msg.EngineReady) -> None:
        if peer.num_slots:
            return  # it was told twice to load: taking it in again would forget the groups it was given
        peer.num_slots, is_guest = ready.num_slots, peer.name in self.membership.joined
        self.dispatcher.tell(buffer_events.GeneratorReady(peer.name, ready.num_slots, ready.version))
        if self.lifecycle.phase == "paused":
            peer.tell(msg.Pause())
        elif is_guest:
            peer.tell(msg.Resume())  # the run may have been paused when it was cut off
        self._weights_changed.set()
        if not is_guest:
            self.stall_detector.moved("ready", self.clock.now())
            self.post(ev.ProcessReady(peer.name))

    # -- versions, steps, evaluations ------------------------------------------------------------------------------------

    def spread(self, available: WeightsAvailable) -> None:
        """Have every generator told about a version, unless a newer one was announced already.

        Raises:
            RunError: The version cannot exist: its step was never taken.
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
        """Note a finished step, of any kind of learner, and do what is due after it."""
        self._step_open_s = self.clock.now()
        self.stall_detector.moved("trained", self._step_open_s)
        fresh = self.feeder.step_done(done)
        self.buffer.version_published(done.version)
        if self.config.learner.kind != "builtin" and done.version % KEPT_STEPS == 0:
            # An outside learner never goes back, and reports no checkpoints.
            self.buffer.forget(done.version - KEPT_STEPS, self.clock.now())
        if fresh:
            every = self.config.checkpoint.every_steps
            if every > 0 and done.version % every == 0:
                self.checkpoints.due = done.version
            if self.recorder is not None:
                self.recorder.end_chunk(done.step)
            done = done if self.switching is None else self.switching.figured(done)
            for alarm in self.reporter.note_step(done, self.dispatcher, self.peers):
                self._act_on(alarm)
            self.moved.set()
        evaluate = self.config.eval.every_steps
        if self.reach_goal():
            return
        # A learner that went back to a checkpoint makes versions again that this controller has evaluated already.
        judged = [each.version for each in self.reporter.evaluations[self._judged_before :]]
        if evaluate and done.version % evaluate == 0 and done.version > max(judged, default=-1):
            self._start_evaluation(done.version)

    def _act_on(self, alarm: Alarm) -> None:
        """Pause or drain the run where the config (observe.alarms) says so for this alarm; a hung one cannot drain, and stops."""
        reason = f"alarm {alarm.rule}: {alarm.text}"
        stop = ev.StopRequested(reason) if alarm.rule == "stall.early" else ev.DrainRequested(reason)
        acts: dict[str, ev.Event] = {"pause": ev.PauseRequested(reason), "stop": stop}
        event = acts.get(self.config.observe.alarms.get(alarm.rule, "warn"))  # type: ignore[call-overload]
        if event is not None and not self.lifecycle.refusal(event):
            log.warning("because of alarm %s: %s", alarm.rule, type(event).__name__)
            self.post(event)

    def reach_goal(self) -> bool:
        """Return whether the run's last version exists; if so, request its checkpoint and tell the lifecycle."""
        if self.feeder.version < self.config.num_steps:
            return False
        if self.lifecycle.phase in {"running", "paused", "evaluating"}:
            self.checkpoints.ask(self.feeder.version)
            self.post(ev.StepsDone())
        return True

    def _finish_drain(self) -> None:
        """While draining, once every taken step is done: have a checkpoint of the newest version written, then end."""
        if self.lifecycle.phase == "draining" and self.feeder.idle:
            if self.checkpoints.version >= self.feeder.version:
                self.post(ev.Drained())
            else:
                self.checkpoints.ask(self.feeder.version, again=False)

    def _start_evaluation(self, version: int) -> None:
        if self.dispatcher.evaluation is None and self._held_out:
            self.dispatcher.evaluation = Evaluation(self.config, self._held_out, version, self.clock.now())
            self._wake_all()

    def _finish_evaluation(self) -> None:
        evaluation = self.dispatcher.evaluation
        if evaluation is None or not evaluation.done or self.lifecycle.phase == "paused":
            return
        self.dispatcher.evaluation = None
        report = evaluation.report(self.clock.now())
        self.reporter.note_evaluation(report)
        name, value = report.headline
        log.info("held-out %s at version %d: %.3f (%d samples%s)", name, report.version, value, report.num_samples, report.failed)
        if self.lifecycle.phase == "evaluating":
            if report.version < self.feeder.version:
                self._start_evaluation(self.feeder.version)
            else:
                self.post(ev.EvaluationDone())

    # -- the model -------------------------------------------------------------------------------------------------------

    def know_model(self, folder: str) -> None:
        """Note the model's folder and the size of its vocabulary: token ids beyond it are refused from now on.

        Raises:
            ConfigError: `generate.sampling.stop_token_ids` has an id beyond it.
        """
        if size := number_of_model(folder, "vocab_size"):
            if (highest := max(self.config.generate.sampling.stop_token_ids, default=0)) >= size:
                allowed = f"must be under {size}, the size of the model's vocabulary"
                raise ConfigError(f"generate.sampling.stop_token_ids {allowed}, got {highest}")
            for group_id in self.buffer.know_vocabulary(size, self.clock.now()):
                log.warning("group %d is dropped: it has token ids beyond the model's vocabulary of size %d", group_id, size)
        self.model_folder = folder

    def tell_model_folder(self) -> None:
        """Tell every process that waits for the model's folder to load it; telling an inference worker twice is harmless."""
        for peer in self.peers.values():
            if peer.kind == "inference" or (peer.kind == "generator" and peer.num_slots == 0):
                self._let_load(peer)

    def _let_load(self, peer: Peer) -> None:
        """Tell a process to load the model; a process on a shared device does so when its turn comes."""
        if self.switching is not None and (peer.kind == "generator" or self.switching.judges_too):
            self.switching.join(peer, self.model_folder)
        else:
            peer.tell(msg.LoadModel(self.model_folder))

    # -- what the lifecycle wants ----------------------------------------------------------------------------------------

    def post(self, event: ev.Event) -> None:
        """Tell the lifecycle what happened, unless the run is over."""
        if not self.lifecycle.over:
            self.supervisor.post(event)

    def heartbeats(self) -> list[msg.Heartbeat]:
        """Return the newest heartbeat of every connected process, joined generators included."""
        return [peer.heartbeat for peer in self.peers.values() if peer.heartbeat is not None]

    def waits(self, now: float) -> list[Wait]:
        """Return which process waits for what, including the controller's own waits: a full step, a phase switch, scores."""
        switching = self.switching
        long_ago = now - SILENT_AFTER_BEATS * self.config.supervision.heartbeat_s
        heard = [(beat, peer.heard_s) for peer in self.peers.values() if (beat := peer.heartbeat) is not None]
        waits = [
            Wait(beat.name, beat.waiting_for, beat.waiting_since_s)
            for beat, at_s in heard
            if beat.waiting_for and at_s > long_ago
        ]
        waits += [Wait(beat.name, "", at_s) for beat, at_s in heard if at_s <= long_ago]
        own = (self.feeder.waiting, self.dispatcher.fruitless)
        waits += [Wait("controller", what, self.feeder.waiting_since_s or now) for what in own if what]
        waits += switching.waits() if switching is not None else ()
        held = self.buffer.state.why_nothing_is_issued()
        if switching is not None and switching.phases.now != "rollout":
            held = f"the device: phase {switching.phases.phase}"
        elif held == "paused" and self.lifecycle.phase != "paused":
            held = f"the end of {self.lifecycle.phase}"
        if not held and (asked := self.dispatcher.asked) is not None and not asked.queue:
            held = "prompts of its caller"
        elif self._caller_holds_all():
            held = f"{CALLER_HOLDS}: {held}"
        if held and any(wait.what and wait.who.startswith("generator") for wait in waits):
            waits.append(Wait("admission", held, now))
        if self.caller is not None and self.caller.is_lost(now):
            waits.append(Wait("controller", "a program that judges (Run(reward=f), or `score` of a client)", self.caller.heard_s))
        judges = JUDGES if switching is None or switching.may_judge else JUDGES[:1]
        caller = "" if self.caller is None else "its caller's reward function"
        return waits + self.dispatcher.scores.waits(judges, self.peers, caller, now)

    def _caller_holds_all(self) -> bool:
        """Return whether the caller of a driven run holds all places: nothing is generated until it trains or releases groups."""
        if self.dispatcher.asked is None or not self.buffer.state.is_full:
            return False
        counts = self.buffer.counts()
        return counts.ready + counts.taken > 0 and not counts.running + counts.scoring

    def _on_dead(self, dead: ev.AnnounceDead) -> None:
        name, kind = dead.name, dead.kind
        if (peer := self.peers.get(name)) is not None:
            self.peers.remove(peer)
        self.reporter.forget(name)
        if dead.was_leaving:
            self.autoscaler.leaving.pop(name, None)
        else:
            self.reporter.deaths[kind] += 1
            self.reporter.note_event("death", name, dead.reason, self.feeder.version)
        if kind == "generator":
            self.dispatcher.generator_dead(name)
        elif kind in {"reward", "inference"}:
            self.dispatcher.judge_dead(name)
        elif kind == "learner":
            self._learner_dead()
        if self.switching is not None:
            self.switching.leave(name, kind)

    def _learner_dead(self) -> None:
        """Set a step aside if the learner died on it too often; end the run if it died on one checkpoint too often."""
        version = self.feeder.version
        # A checkpoint requested in the middle of a step is written after the step.
        over_checkpoint = self.feeder.learner is not None and self.checkpoints.due >= max(0, version - 1)
        if (taken := self.feeder.learner_dead(over_checkpoint=over_checkpoint)) is not None:
            self._set_aside(taken)
        self.checkpoints.fail("the learner died")
        if over_checkpoint:
            self.checkpoints.deaths[version] += 1
            reason = f"it died {self.checkpoints.deaths[version]} times while a checkpoint of version {version} was due"
            log.error("the learner: %s", reason)
            # However far apart the deaths are: each time it repeats the steps before.
            if self.checkpoints.deaths[version] > self.config.supervision.max_deaths:
                reason = f"{reason}; see {self.lifecycle.logs_folder}/learner.log"
                self.post(ev.ProcessFault("learner", reason, fatal=True))

    def _set_aside(self, taken: TakenStep) -> None:
        """Write the groups of a step to a file, then drop them."""
        step, named = taken.step, ", ".join(str(group.group_id) for group in taken.groups)
        file, where = keep_set_aside(self.run_folder, taken)
        self.buffer.set_aside(step, f"the learner died over it {MOST_DEATHS} times", self.clock.now())
        self.reporter.note_event("set_aside", file, f"the learner died twice on groups {named}", step)
        log.error("the learner died twice on step %d: groups %s are set aside %s, not trained", step, named, where)

    def _on_phase(self, phase: Phase) -> None:
        self.reporter.note_event("phase", phase, self.lifecycle.reason, self.feeder.version)
        self.moved.set()
        self._step_open_s = self.clock.now()
        # An outside learner brings its model, and a warm start takes its steps, however long that is.
        warms_up = getattr(self.config.model, "warm_start", None) is not None and not self._is_resumed
        may_take_long = self.config.learner.kind != "builtin" or warms_up
        held = phase in {"paused", "starting"} or (phase == "warming" and may_take_long)
        self.stall_detector.hold(self.clock.now(), held=held)
        # While draining, taken steps are still trained, also those that a learner back from a checkpoint must repeat.
        self.feeder.hold(phase not in {"running", "evaluating"}, finish_taken=phase == "draining")
        self.dispatcher.hold(groups=phase != "running", evaluation=phase not in {"running", "evaluating"})
        order = {"running": msg.Resume(), "evaluating": msg.Resume(), "paused": msg.Pause()}.get(phase)
        for peer in self.peers.of("generator"):
            if peer.num_slots and order is not None:
                peer.tell(order)
        if phase == "running":
            with contextlib.suppress(OSError):
                (self.run_folder / CONFIG_BEFORE).unlink()
            self.reach_goal()
        elif phase == "evaluating":
            self._start_evaluation(self.feeder.version)
        elif phase == "draining" and (self.config.learner.kind != "builtin" or self.feeder.version < 0):
            # An outside learner's step stays taken, for a resume; a learner that was never ready has nothing to save.
            self.post(ev.Drained())

    def _on_end(self, ok: bool, reason: str) -> None:
        if not ok and undo_resume(self.run_folder):
            log.warning("config.toml is the one before this resume again")
        self.checkpoints.fail(f"the run ended: {reason}")
        self.ending.set()
        if self.dispatcher.asked is not None:
            self.dispatcher.asked.wake()
