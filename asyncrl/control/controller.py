"""The controller: one run's parts in one place, and what the pure ones decide carried out.

Owns the flow of groups (control/flow.py), the learner's feed (control/feed.py), the supervisor and the API of one run; who
comes in is control/reception.py's affair, what they say control/messages.py's. Invariants: one event loop, nothing blocks it; the
run's end is decided by the lifecycle alone and happens once: tell everyone, wait for them, close the ledger, write the report.

Called by pipeline.py, in a process of its own; spoken to through control/api.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.clock import Clock
from asyncrl.config.placement_rules import judges_take_turns
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
    Stalled,
    StepsDone,
    StopRequested,
)
from asyncrl.control.lifecycle import Lifecycle
from asyncrl.control.messages import Messages
from asyncrl.control.peers import Peer, Peers
from asyncrl.control.process_plan import plan_processes, spec_maker
from asyncrl.control.reception import Reception
from asyncrl.control.reporter import Reporter
from asyncrl.control.roster import Roster
from asyncrl.control.run_api import RunApi
from asyncrl.control.supervisor import Supervisor, SupervisorCallbacks
from asyncrl.control.switching import Switching
from asyncrl.control.waiting import all_waits, queue_depths
from asyncrl.control.watchdog import Wait, Watchdog, working_of
from asyncrl.errors import AsyncRLError
from asyncrl.schema.batches import StepDone
from asyncrl.schema.codec import Message
from asyncrl.schema.control import (
    Heartbeat,
    LoadModel,
    Pause,
    ProcessKind,
    Resume,
    Shutdown,
)
from asyncrl.schema.samples import Prompt
from asyncrl.schema.status import Phase
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.transport.channel import Listener

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
        self.weights: WeightsAvailable | None = None
        """The version that was announced last."""
        self.switching: Switching | None = None
        """Where processes take turns on a device."""
        if config.placement.takes_turns:
            self.switching = Switching(
                parts.peers, parts.flow, parts.feed, parts.reporter, self.watchdog, parts.clock,
                judges_too=judges_take_turns(config),
            )  # fmt: skip
        self.checkpoints = Checkpoints(parts.peers)
        self.ending = asyncio.Event()
        self.over = asyncio.Event()
        self.moved = asyncio.Event()
        self._ok = False
        parts.feed.on_taken = parts.reporter.note_taken
        parts.flow.changed = parts.feed.wake
        self._reception = Reception(self, Messages(self))

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
                    group.create_task(self._reception.accept(group), name="accept"),
                    group.create_task(self._feed(), name="feed"),
                    group.create_task(self._tick(), name="tick"),
                    group.create_task(self._stop_when(owner_gone), name="owner"),
                ]
                await self.ending.wait()
                for peer in self.peers.all():
                    self.say_goodbye(peer)
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

    def say_goodbye(self, peer: Peer) -> None:
        """Tell a process that the run is over, and why."""
        peer.tell(Shutdown(self.lifecycle.reason))

    async def _close_books(self) -> None:
        await asyncio.to_thread(self.flow.buffer.check)
        await asyncio.to_thread(self.flow.buffer.close)
        try:
            await self.reporter.close(self.run_folder)
        except OSError as error:  # on a full disk, say: the run's end and its reason are still to be told
            log.error("the pictures of the run could not be written: %s; `asyncrl report` draws them", error)  # noqa: TRY400

    async def _stop_when(self, owner_gone: asyncio.Event) -> None:
        await owner_gone.wait()
        if not self.lifecycle.over:
            log.warning("whoever started this run is gone: stopping")
            self.post(StopRequested("the process that started the run is gone"))

    async def _tick(self) -> None:
        """Do what no message sets off: windows that opened, evaluations that ended, stalls, the time limit."""
        while True:
            await self.clock.sleep(TICK_S)
            for peer in self.peers.all():
                peer.tell_rest()
            self.flow.pump()
            self._finish_evaluation()
            now = self.clock.now()
            await self._reception.drop_silent_guests(now)
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
            self.switching.leave(name, kind)

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
            if self.reached_goal:
                self.reach_goal()
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
                self.feed.on_idle = self.write_last_checkpoint
        else:
            self.flow.hold(evaluation_too=True)

    def _on_end(self, ok: bool, reason: str) -> None:
        self._ok = ok
        self.checkpoints.fail(f"the run ended: {reason}")
        self.ending.set()

    @property
    def reached_goal(self) -> bool:
        """Return whether the version that the run is for exists."""
        return self.feed.version >= self.config.num_steps

    def write_last_checkpoint(self) -> None:
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

    # -- versions and steps ----------------------------------------------------------------------------------------------

    def spread(self, available: WeightsAvailable) -> None:
        """Tell every generator about a version, unless a newer one is out already."""
        if self.weights is not None and available.version < self.weights.version and available.location == self.weights.location:
            return
        self.weights = available
        self.reporter.note_published(available)
        self.flow.buffer.version_published(available.version)
        self._tell_generators(available)

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
        if self.reached_goal:
            self.reach_goal()
        elif checkpoint and done.version % checkpoint == 0:
            self.checkpoints.ask(self.feed.version)
        if evaluate and done.version % evaluate == 0 and not self.reached_goal:
            self._start_evaluation(done.version)

    def reach_goal(self) -> None:
        """End the run in good order, if that is not under way."""
        if self.lifecycle.phase in {"running", "paused", "evaluating"}:
            self.checkpoints.ask(self.feed.version)
            self.post(StepsDone())

    def tell_model_folder(self) -> None:
        """Have everyone who waits for the model's folder open it; inference workers take being told twice."""
        for peer in self.peers.all():
            if peer.kind == "inference" or (peer.kind == "generator" and peer.num_slots == 0):
                self.let_load(peer)

    def let_load(self, peer: Peer) -> None:
        """Have a process open the model; one on a shared device when it is its turn."""
        if self.switching is not None and self.switching.takes_turns(peer.kind):
            self.switching.join(peer, self.model_folder)
        else:
            peer.tell(LoadModel(self.model_folder))

    def _tell_generators(self, message: Message) -> None:
        for peer in self.peers.of("generator"):
            if peer.num_slots:
                peer.tell(message)

    def waits(self, now: float) -> list[Wait]:
        """Return who waits for what, the controller's own wait for a full step among them."""
        return all_waits(self.heartbeats().values(), self.flow, self.feed, self.peers, self.switching, now)
