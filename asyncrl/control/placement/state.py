"""Which process holds a device that learner, generators and inference workers share, decided purely.

A switch of phase has two halves. First every process that holds the device for the phase that ends is told to give it back.
When all of them have answered, every process that takes it for the phase that begins is told to. When those have answered, the
phase has begun.

Invariants (check_invariants, after every event in tests):
- Nobody is told to take the device while one who gives it back has not answered: no two phases overlap.
- A process owes at most one answer; the next switch begins when nobody owes one. A process that died owes none.
- A process that joins is told the phase when it is its turn, and not before. A learner cannot be kept from loading its model
  when it starts, so while there is none, or one that came in during a rollout, the device is the learner's and generation
  stands still.
- What was wanted before a learner came in is void: it goes back to its checkpoint, and has steps to train again.

At the beginning the device is the learner's to take. switching.py carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.observe.decisions import Machine, Value
from asyncrl.schema.control import Phase, ProcessKind, SetPhase

Stage = Literal["settled", "giving", "taking"]
HOLDER: dict[Phase, ProcessKind] = {"rollout": "generator", "inference": "inference", "train": "learner"}
"""Which role has the device in a phase."""


class Joined(Value, frozen=True):
    """A process is there and can be told. A learner has everything on the device, the others have nothing there yet."""

    name: str
    role: ProcessKind


class Left(Value, frozen=True):
    """A process is gone."""

    name: str


class Reached(Value, frozen=True):
    """A process has done what it was told."""

    name: str
    number: int


class Wanted(Value, frozen=True):
    """The run would go on in this phase."""

    phase: Phase


class LeavePhase(Value, frozen=True):
    """The phase is over: hold what belongs to it."""

    phase: Phase


class Tell(Value, frozen=True):
    """Send this order."""

    name: str
    order: SetPhase


class EnterPhase(Value, frozen=True):
    """The phase has begun: let go what belongs to it."""

    phase: Phase


PhaseEvent = Joined | Left | Reached | Wanted
PhaseInstruction = LeavePhase | Tell | EnterPhase


@dataclass(slots=True)
class _Member:
    role: ProcessKind
    told: int = -1
    """Number of the switch it was told of last; -1: of none yet."""
    owes: bool = False
    """It has not answered that."""


class Phases(Machine[PhaseEvent, PhaseInstruction]):
    """The state machine of one shared device.

    Example:
        >>> phases = Phases()
        >>> phases.handle(Joined("learner", "learner"), now=0.0)
        [Tell(name='learner', order=SetPhase(phase='train', number=0))]
        >>> phases.handle(Reached("learner", 0), now=1.0)
        [EnterPhase(phase='train')]
        >>> phases.handle(Wanted("rollout"), now=2.0)
        [LeavePhase(phase='train'), Tell(name='learner', order=SetPhase(phase='rollout', number=1))]
        >>> phases.handle(Reached("learner", 1), now=3.0)
        [EnterPhase(phase='rollout')]
    """

    name = "phases"

    def __init__(self) -> None:
        self.phase: Phase = "train"
        """The phase that is on, or that the switch under way leads to."""
        self.before: Phase = "train"
        """The phase that the last switch ended."""
        self.stage: Stage = "taking"
        self.wanted: Phase = "train"
        self.number = 0
        self._members: dict[str, _Member] = {}

    @property
    def now(self) -> Phase | None:
        """Return the phase that is on; None during a switch."""
        return self.phase if self.stage == "settled" else None

    def with_role(self, role: ProcessKind) -> list[str]:
        """Return the names of those of that role who are there."""
        return sorted(name for name, member in self._members.items() if member.role == role)

    def has_newcomer(self, role: ProcessKind) -> bool:
        """Return whether somebody of that role is there who has not been told a phase yet."""
        return any(self._members[name].told < 0 for name in self.with_role(role))

    @property
    def owing(self) -> list[str]:
        """Return the names of those whose answer has not come."""
        return sorted(name for name, member in self._members.items() if member.owes)

    @property
    def waiting_for(self) -> str:
        """Return in words what a switch under way waits for; empty where there is none."""
        names = ", ".join(self.owing)
        if self.stage == "giving":
            return f"{names} to give the device back for phase {self.phase}"
        if self.stage == "taking":
            return f"{names} to take the device for phase {self.phase}" if names else "a learner to be ready"
        return ""

    def _decide(self, event: PhaseEvent, _: float) -> list[PhaseInstruction]:
        instructions: list[PhaseInstruction] = []
        match event:
            case Joined(name, role) if name not in self._members:
                self._members[name] = _Member(role)
                if role == "learner":
                    self.wanted = "train"  # what was wished for before it was there: it may have steps to train again
                if role == HOLDER[self.phase] and self.stage != "giving":
                    self._tell([name], instructions)
            case Left(name):
                member = self._members.pop(name, None)
                if member is not None and member.role == "learner":
                    self.wanted = "train"
            case Reached(name, number):
                member = self._members.get(name)
                if member is not None and member.told == number:
                    member.owes = False
            case Wanted(phase):
                self.wanted = phase
        while self._advance(instructions):
            pass
        return instructions

    def check_invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        teller = HOLDER[self.before if self.stage == "giving" else self.phase]
        for name, member in self._members.items():
            assert not member.owes or member.told == self.number, f"{name} owes an answer to an old order"
            assert not member.owes or member.role == teller, f"{name} was told out of its turn"
        assert self.stage != "giving" or self.owing, "a switch waits for nobody"

    def _advance(self, instructions: list[PhaseInstruction]) -> bool:
        """Do the next thing that can be done; return False where there is none."""
        if self.owing:
            return False
        # Whatever is wanted, the device is the learner's while there is none, or one that has just started.
        is_learners = not self.with_role("learner") or self.has_newcomer("learner")
        if self.stage == "giving":
            if is_learners and self.phase != "train":  # nobody takes the device only to give it back at once
                self.phase, self.number = "train", self.number + 1
            self.stage = "taking"
            self._tell(self.with_role(HOLDER[self.phase]), instructions)
            return True
        if self.stage == "taking":
            if self.phase == "train" and not self.with_role("learner"):
                return False
            self.stage = "settled"
            instructions.append(EnterPhase(self.phase))
            return True
        target: Phase = "train" if is_learners else self.wanted
        if target == self.phase:
            return False
        instructions.append(LeavePhase(self.phase))
        self.before, self.phase, self.stage, self.number = self.phase, target, "giving", self.number + 1
        self._tell(self.with_role(HOLDER[self.before]), instructions)
        return True

    def _tell(self, names: list[str], instructions: list[PhaseInstruction]) -> None:
        for name in names:
            member = self._members[name]
            member.told, member.owes = self.number, True
            instructions.append(Tell(name, SetPhase(self.phase, self.number)))
