"""The state machine for a device that learner, generators and inference workers share: which process holds it. Pure.

A switch of phase has two halves. First every process that holds the device in the ending phase is told to release it. When all
have answered, every process that needs the device in the next phase is told to take it. When these have answered, the phase has
begun.

Invariants (check_invariants, after every event in tests):
- No process is told to take the device before all processes that release it have answered: no two phases overlap.
- A process owes at most one answer; the next switch begins when no process owes one. A process that died owes none.
- A process that joins is told the phase in its turn, not before. A learner always loads its model when it starts. So while there
  is no learner, or one joined during a rollout, the device belongs to the learner and generation stops.
- When a learner joins, earlier requests for a phase are discarded: it restarts from its checkpoint and may have to train steps
  again.

At the start the device belongs to the learner. switching.py carries out the instructions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.observe.machine import Machine, Value
from asyncrl.schema.control import Phase, ProcessKind, SetPhase

Stage = Literal["settled", "giving", "taking"]
HOLDER: dict[Phase, ProcessKind] = {"rollout": "generator", "inference": "inference", "train": "learner"}
"""The role that holds the device in each phase."""


class Joined(Value, frozen=True):
    """A process joined and can take orders. A learner has its model on the device already; the others have nothing there yet."""

    name: str
    role: ProcessKind


class Left(Value, frozen=True):
    """A process left or died."""

    name: str


class Reached(Value, frozen=True):
    """A process has carried out its order."""

    name: str
    number: int


class Wanted(Value, frozen=True):
    """The run needs this phase next."""

    phase: Phase


class LeavePhase(Value, frozen=True):
    """The phase is over: hold back its work."""

    phase: Phase


class Tell(Value, frozen=True):
    """Send this order to this process."""

    name: str
    order: SetPhase


class EnterPhase(Value, frozen=True):
    """The phase has begun: release its work."""

    phase: Phase


PhaseEvent = Joined | Left | Reached | Wanted
PhaseInstruction = LeavePhase | Tell | EnterPhase


@dataclass(slots=True)
class _Member:
    role: ProcessKind
    told: int = -1
    """Number of the last switch that it was told of; -1: none yet."""
    owes: bool = False
    """It has not answered the last order."""


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
        """The current phase, or the target of the switch in progress."""
        self.before: Phase = "train"
        """The phase that the last switch ended."""
        self.stage: Stage = "taking"
        self.wanted: Phase = "train"
        self.number = 0
        self._members: dict[str, _Member] = {}

    @property
    def now(self) -> Phase | None:
        """Return the current phase; None during a switch."""
        return self.phase if self.stage == "settled" else None

    def with_role(self, role: ProcessKind) -> list[str]:
        """Return the names of the present processes of that role."""
        return sorted(name for name, member in self._members.items() if member.role == role)

    def has_newcomer(self, role: ProcessKind) -> bool:
        """Return whether a process of that role has not been told a phase yet."""
        return any(self._members[name].told < 0 for name in self.with_role(role))

    @property
    def owing(self) -> list[str]:
        """Return the names of the processes that have not answered."""
        return sorted(name for name, member in self._members.items() if member.owes)

    @property
    def waiting_for(self) -> str:
        """Return in words what the switch in progress waits for; empty without a switch."""
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
                    self.wanted = "train"  # discard earlier requests: the new learner may have to train steps again
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
        """Raise AssertionError if the state contradicts itself."""
        teller = HOLDER[self.before if self.stage == "giving" else self.phase]
        for name, member in self._members.items():
            assert not member.owes or member.told == self.number, f"{name} owes an answer to an old order"
            assert not member.owes or member.role == teller, f"{name} was told out of its turn"
        assert self.stage != "giving" or self.owing, "a switch waits for nobody"

    def _advance(self, instructions: list[PhaseInstruction]) -> bool:
        """Take the next possible step; return False if there is none."""
        if self.owing:
            return False
        # Whatever is wanted, the device belongs to the learner while there is none, or while one has just started.
        is_learners = not self.with_role("learner") or self.has_newcomer("learner")
        if self.stage == "giving":
            if is_learners and self.phase != "train":  # no process takes the device only to release it at once
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
