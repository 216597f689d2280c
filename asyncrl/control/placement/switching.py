"""Carries out the phases of a shared device (state.py): sends orders, takes answers, and times each phase and switch.

Invariants: groups and evaluation prompts are sent only in `rollout`. Steps are sent only in `train`, except the next one, which
the learner keeps for its turn. Inference workers on the device score in `inference` only. A generator or an inference worker is
told to load its model when it first holds the device. A waiting switch is reported as a wait, so a stall names the process that
does not answer.

    phase       ends when                                                       then comes
    rollout     the learner is sent a step                                      train
                models are to score, and a step's groups or all are generated   inference
    inference   every request is answered, or the learner is sent a step        train where it is, else rollout
    train       every step that was possible is done and its weights are out    inference where a worker must load, else rollout
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from asyncrl.clock import Clock
from asyncrl.control.batch_feeder import BatchFeeder
from asyncrl.control.dispatcher import Dispatcher
from asyncrl.control.lifecycle.failure_watch import StallDetector, Wait
from asyncrl.control.peers import Peer, Peers
from asyncrl.control.placement import state as st
from asyncrl.control.reporter import Reporter
from asyncrl.observe.spans import PHASE, span, spans_of
from asyncrl.schema.control import LoadModel, Phase, PhaseReached, ProcessKind
from asyncrl.schema.samples import StepDone

log = logging.getLogger(__name__)

Activity = Phase | Literal["start", "switch"]
FIGURED: tuple[Activity, ...] = ("rollout", "inference", "train", "switch")


@dataclass(eq=False)
class Switching:
    """The phases of one run whose placement takes turns; at first no process holds the device."""

    peers: Peers
    dispatcher: Dispatcher
    feeder: BatchFeeder
    reporter: Reporter
    stall_detector: StallDetector
    clock: Clock
    judges_too: bool = False
    """Whether inference workers take turns too."""

    def __post_init__(self) -> None:
        self.phases = st.Phases()
        self._announced = -1
        """The version whose weights were announced last."""
        self._model_folder = ""
        self._told_to_load: set[str] = set()
        """Inference workers that have joined and know where their models are."""
        self._activity: Activity = "start"
        self._activity_number = 0
        self._began_s = self._counted_s = self.clock.now()
        self._spent_s: defaultdict[Activity, float] = defaultdict(float)
        """Seconds by activity since the last step's report."""
        self.dispatcher.take_turn(False)
        self.feeder.take_turn(False)

    # -- what happens ----------------------------------------------------------------------------------------------------

    def join(self, peer: Peer, model_folder: str) -> None:
        """Add a learner that is ready, or another process that takes turns and may load this model."""
        self._model_folder = model_folder
        self._handle(st.Joined(peer.name, peer.kind))
        self.consider()

    def leave(self, name: str, kind: ProcessKind) -> None:
        """Note that a process is gone, also if it never joined."""
        self._told_to_load.discard(name)
        self._handle(st.Left(name))
        if kind == "learner":
            self._announced = -1  # the next learner may be at the same version, and must publish it again
        self.consider()

    def reached(self, answer: PhaseReached) -> None:
        """Take in a process's answer."""
        self.stall_detector.moved(f"phase {answer.phase}", self.clock.now())
        self.reporter.spans.write(*spans_of(answer))
        self._handle(st.Reached(answer.name, answer.number))
        self.consider()

    def announced(self, version: int) -> None:
        """Note that a version's weights are available."""
        self._announced = version
        self.consider()

    def consider(self) -> None:
        """Request another phase if the current one has no more work."""
        now, feed, unjudged = self.phases.now, self.feeder, len(self.dispatcher.scores.open["inference"])
        is_at_rest = feed.idle and not feed.woken.is_set()
        if now in {"rollout", "inference"} and feed.next_step > max(feed.version, 0):  # a step waits for its turn
            self._handle(st.Wanted("train"))
        elif now == "rollout" and self.phases.with_role("inference") and (unjudged or self.phases.has_newcomer("inference")):
            # Models score once generation has produced what a step needs, or all it can.
            counts, needed = self.dispatcher.buffer.counts(), self.dispatcher.state.limits.groups_per_step
            is_step_made = bool(unjudged) and counts.ready < needed <= counts.ready + counts.scoring
            if is_step_made or all(self.dispatcher.holds_nothing(peer.name) for peer in self.peers.of("generator")):
                self._handle(st.Wanted("inference"))
        elif now == "inference" and is_at_rest and not unjudged:
            self._handle(st.Wanted("rollout"))
        elif now == "train" and is_at_rest and 0 <= feed.version == self._announced:
            self._handle(st.Wanted("inference" if self.phases.has_newcomer("inference") else "rollout"))

    # -- what is said ----------------------------------------------------------------------------------------------------

    def waits(self) -> list[Wait]:
        """Return the processes that a switch in progress waits for."""
        what = self.phases.waiting_for
        return [Wait("controller", what, self._began_s)] if what else []

    @property
    def may_judge(self) -> bool:
        """Return whether inference workers may score now: it is their turn, or they do not take turns."""
        return not self.judges_too or self.phases.now == "inference"

    def figured(self, done: StepDone) -> StepDone:
        """Return a step's report with the seconds of each phase and of switches since the previous step."""
        self._count()
        seconds = {f"placement/{activity}_s": self._spent_s[activity] for activity in FIGURED}
        self._spent_s.clear()
        return replace(done, metrics=done.metrics | seconds)

    # -- carrying out ----------------------------------------------------------------------------------------------------

    def _handle(self, event: st.PhaseEvent) -> None:
        for item in self.phases.handle(event, self.clock.now()):
            match item:
                case st.LeavePhase(phase):
                    self._give_turn(phase, False)
                    self._begin("switch")
                case st.Tell(name, order):
                    peer = self.peers.get(name)
                    if peer is None:
                        continue
                    # A process is told its model before the first order that puts something of it on the device.
                    if (peer.kind == "generator" and peer.num_slots == 0) or (
                        peer.kind == "inference" and name not in self._told_to_load
                    ):
                        self._told_to_load.add(name)
                        peer.tell(LoadModel(self._model_folder))
                    peer.tell(order)
                case st.EnterPhase(phase):
                    log.info("phase %s (switch %d, %.3f s)", phase, self.phases.number, self._begin(phase))
                    self._give_turn(phase, True)

    def _give_turn(self, phase: Phase, has_turn: bool) -> None:
        if phase == "rollout":
            self.dispatcher.take_turn(has_turn)
        elif phase == "train":
            self.feeder.take_turn(has_turn)

    def _begin(self, activity: Activity) -> float:
        """Begin a phase or a switch; return how long the previous activity took."""
        now = self._count()
        took_s = now - self._began_s
        of_phase = span(PHASE, self._began_s, now, "controller", phase=self._activity, number=self._activity_number)
        self.reporter.spans.write(of_phase)
        self._activity, self._activity_number, self._began_s = activity, self.phases.number, now
        self.stall_detector.moved(f"phase {activity}", now)
        return took_s

    def _count(self) -> float:
        """Count the time of the current phase or switch, and return the clock's time."""
        now = self.clock.now()
        self._spent_s[self._activity] += now - self._counted_s
        self._counted_s = now
        return now
