"""Carries out what the phases decide (control/phases.py): orders out, answers in, and what it all took, for logs and metrics.

Owns the phases of one run whose placement takes turns. Invariants: groups and evaluation prompts go out only in `rollout`, steps
but the next one, which the learner keeps for its turn, only in `train`, and inference workers on the device judge in `inference`
only; a generator or an inference worker is told to load its model when the device is first its own. What a switch waits for is
somebody's wait, so that a process which never answers is a stall with a name.

    phase       ends when                                                       then comes
    rollout     the learner is sent a step                                      train
                models are to judge, and a step's groups or all are generated   inference
    inference   every request is answered, or the learner is sent a step        train where it is, else rollout
    train       every step that was possible is done and its weights are out    inference where a worker must load, else rollout

Called by control/controller.py, on its event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from asyncrl.clock import Clock
from asyncrl.control.feed import LearnerFeed
from asyncrl.control.flow import Flow
from asyncrl.control.peers import Peer, Peers
from asyncrl.control.phases import (
    EnterPhase,
    Joined,
    LeavePhase,
    Left,
    PhaseEvent,
    PhaseInstruction,
    Phases,
    Reached,
    Role,
    Tell,
    Wanted,
)
from asyncrl.control.reporter import Reporter
from asyncrl.control.watchdog import Wait, Watchdog
from asyncrl.observe.spans import move_spans, phase_span
from asyncrl.schema.batches import StepDone
from asyncrl.schema.control import LoadModel, Phase, PhaseReached, ProcessKind, SetPhase

log = logging.getLogger(__name__)

MIB = 1 << 20
Page = Phase | Literal["start", "switch"]
PAGES: dict[Page, str] = {
    "rollout": "placement/rollout_s",
    "inference": "placement/inference_s",
    "train": "placement/train_s",
    "switch": "placement/switch_s",
}
ROLES: dict[ProcessKind, Role] = {"learner": "learner", "generator": "generator", "inference": "inference"}


class Switching:
    """Phases on their way from decision to process and back."""

    def __init__(
        self,
        peers: Peers,
        flow: Flow,
        feed: LearnerFeed,
        reporter: Reporter,
        watchdog: Watchdog,
        clock: Clock,
        *,
        judges_too: bool = False,
    ) -> None:
        """Begin with the device in nobody's hands.

        Args:
            peers: Of the run; orders go to them.
            flow: Held but in `rollout`.
            feed: One step ahead, but in `train`.
            reporter: Told of switches, for spans.
            watchdog: Told that things move.
            clock: Times phases.
            judges_too: Inference workers take turns too.
        """
        self.phases = Phases()
        self._judges_too = judges_too
        self._peers = peers
        self._flow = flow
        self._feed = feed
        self._reporter = reporter
        self._watchdog = watchdog
        self._clock = clock
        self._announced = -1
        """The version whose weights were announced last."""
        self._model_folder = ""
        self._told_to_load: set[str] = set()
        """Inference workers that are there and know where their models are."""
        self._answers: list[PhaseReached] = []
        self._book = _Book(clock.now())
        flow.take_turn(False)
        feed.take_turn(False)
        feed.on_rest = self.consider

    # -- what happens ----------------------------------------------------------------------------------------------------

    def takes_turns(self, kind: ProcessKind) -> bool:
        """Return whether processes of this kind are on the shared device."""
        return kind in {"learner", "generator"} or (kind == "inference" and self._judges_too)

    def join(self, peer: Peer, model_folder: str) -> None:
        """Take in a learner that is ready, or somebody else who takes turns and may load this model."""
        self._model_folder = model_folder
        self._handle(Joined(peer.name, ROLES[peer.kind]))
        self.consider()

    def leave(self, name: str, kind: ProcessKind) -> None:
        """Note that a process is gone, one that never joined too."""
        self._told_to_load.discard(name)
        self._handle(Left(name))
        if kind == "learner":
            self._announced = -1  # the next learner may stand at the same version, and has to put it where it can be had
        self.consider()

    def reached(self, answer: PhaseReached) -> None:
        """Take in a process's answer."""
        self._watchdog.moved(f"phase {answer.phase}", self._clock.now())
        self._answers.append(answer)
        self._reporter.note_spans(move_spans(answer))
        self._handle(Reached(answer.name, answer.number))
        self.consider()

    def announced(self, version: int) -> None:
        """Note that a version's weights can be had."""
        self._announced = version
        self.consider()

    def consider(self) -> None:
        """Want another phase, where the one that is on has nothing left to do."""
        now, feed = self.phases.now, self._feed
        if now in {"rollout", "inference"} and feed.wants_turn:
            self._handle(Wanted("train"))
        elif now == "rollout" and self._is_judging_next:
            self._handle(Wanted("inference"))
        elif now == "inference" and feed.is_at_rest and not self._num_unjudged:
            self._handle(Wanted("rollout"))
        elif now == "train" and feed.is_at_rest and 0 <= feed.version == self._announced:
            self._handle(Wanted("inference" if self.phases.has_newcomer("inference") else "rollout"))

    @property
    def _num_unjudged(self) -> int:
        return self._flow.desk.num_open("inference")

    @property
    def _is_judging_next(self) -> bool:
        """Return whether generation has made what a step needs, or all it can, and models have not judged it."""
        if not self.phases.has("inference"):
            return False
        if self._num_unjudged and self._flow.has_generated_a_step:
            return True
        return bool(self._num_unjudged or self.phases.has_newcomer("inference")) and self._flow.has_generated_all

    # -- what is said ----------------------------------------------------------------------------------------------------

    def waits(self) -> list[Wait]:
        """Return whom a switch under way waits for."""
        what = self.phases.waiting_for
        return [Wait("controller", what, self._book.began_s)] if what else []

    @property
    def why_nothing_goes_out(self) -> str:
        """Return in words why no group is issued; empty in a rollout."""
        return "" if self.phases.now == "rollout" else f"the device: phase {self.phases.phase}"

    @property
    def may_judge(self) -> bool:
        """Return whether inference workers may work now: it is their turn, or they take none."""
        return not self._judges_too or self.phases.now == "inference"

    def figured(self, done: StepDone) -> StepDone:
        """Return a step's report with what phases and switches took since the step before."""
        spent = self._book.take(self._clock.now())
        return replace(done, metrics=done.metrics | {metric: spent.get(page, 0.0) for page, metric in PAGES.items()})

    # -- carrying out ----------------------------------------------------------------------------------------------------

    def _handle(self, event: PhaseEvent) -> None:
        self._follow(self.phases.handle(event))

    def _follow(self, instructions: Iterable[PhaseInstruction]) -> None:
        for item in instructions:
            match item:
                case LeavePhase(phase):
                    self._give_turn(phase, False)
                    self._turn_page("switch")
                case Tell(name, order):
                    peer = self._peers.get(name)
                    if peer is not None:
                        self._tell(peer, order)
                case EnterPhase(phase):
                    self._say(phase, self._turn_page(phase))
                    self._give_turn(phase, True)

    def _tell(self, peer: Peer, order: SetPhase) -> None:
        """Give an order, and where it is the first that puts something of the process on the device, the model before it."""
        if peer.kind == "generator" and peer.num_slots == 0:
            peer.tell(LoadModel(self._model_folder))
        elif peer.kind == "inference" and peer.name not in self._told_to_load:
            self._told_to_load.add(peer.name)
            peer.tell(LoadModel(self._model_folder))
        peer.tell(order)

    def _give_turn(self, phase: Phase, has_turn: bool) -> None:
        if phase == "rollout":
            self._flow.take_turn(has_turn)
        elif phase == "train":
            self._feed.take_turn(has_turn)

    def _turn_page(self, page: Page) -> float:
        """Begin a phase or a switch; return what the one before took, and write that down."""
        now, before = self._clock.now(), self._book
        self._reporter.note_spans([phase_span(before.page, before.number, before.began_s, now)])
        took_s = before.turn(page, self.phases.number, now)
        self._watchdog.moved(f"phase {page}", now)
        return took_s

    def _say(self, phase: Phase, switch_s: float) -> None:
        answers, self._answers = self._answers, []
        log.info(
            "phase %s (switch %d, %.3f s): %s", phase, self.phases.number, switch_s, "; ".join(map(_told, answers)) or "alone"
        )


@dataclass(slots=True)
class _Book:
    """What time was spent on."""

    began_s: float
    page: Page = "start"
    number: int = 0
    _counted_s: float = 0.0
    _spent_s: dict[Page, float] = field(default_factory=dict)

    def turn(self, page: Page, number: int, now: float) -> float:
        """Begin something else; return how long the last took."""
        self._count(now)
        took_s, self.began_s, self.page, self.number = now - self.began_s, now, page, number
        return took_s

    def take(self, now: float) -> dict[Page, float]:
        """Return the seconds since this was asked last, by what they were spent on."""
        self._count(now)
        spent, self._spent_s = self._spent_s, {}
        return spent

    def _count(self, now: float) -> None:
        self._spent_s[self.page] = self._spent_s.get(self.page, 0.0) + now - max(self._counted_s, self.began_s)
        self._counted_s = now


def _told(answer: PhaseReached) -> str:
    """Return an answer in words."""
    seconds, num_bytes = sum(move.seconds for move in answer.moves), sum(move.num_bytes for move in answer.moves)
    moved = f"moved {num_bytes / MIB:.1f} MiB in {seconds:.3f} s" if answer.moves else "moved nothing"
    return f"{answer.name} {moved}, holds {sum(answer.resident.values()) / MIB:.1f} MiB"
