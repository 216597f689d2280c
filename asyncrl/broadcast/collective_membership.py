"""Who takes part in which broadcast of a version, decided purely: gathering, epochs, losses, late joiners.

An epoch is one process group: the learner, rank 0, and the members in order. It lasts while the same members want the next
version; somebody new, missing, lost or failed makes a new one. One attempt at a time sends one version to its members.

Invariants:
- An attempt ends: everyone answered, or no progress for `timeout_s`, or somebody failed; in the last two cases the others are
  told, have ANSWER_S to say that they are out, and whoever says nothing is dropped. The rest ask again and go on in a new epoch.
- Members gather for `gather_s` at most, and not at all once everyone who is behind is ready and nobody is new. Whoever was waited
  for in vain is not waited for again until it asks.
- Every member that asked is told to begin or is refused; a version is attempted at most MAX_ATTEMPTS times before it is refused.
- A dropped member is welcome to ask again.

Called by collective_writer.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

ANSWER_S = 2.0
MAX_ATTEMPTS = 4
MAX_MEMBERS = 1024


@dataclass(frozen=True, slots=True)
class Offered:
    """The version can be sent."""

    version: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The version can be sent no more."""

    version: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A member is ready to receive the version."""

    member: str
    version: int


@dataclass(frozen=True, slots=True)
class Answered:
    """A member is through with an attempt."""

    member: str
    epoch: int
    failure: str = ""
    """Empty: it has the whole version."""


@dataclass(frozen=True, slots=True)
class Left:
    """A member said goodbye."""

    member: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Our own end got further."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Sent:
    """Our own end is through."""

    epoch: int
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Offered | Withdrawn | Asked | Answered | Left | Progress | Sent | Tick


@dataclass(frozen=True, slots=True)
class Start:
    """Tell `members` (ranks 1, 2, ...) to begin, and send."""

    epoch: int
    version: int
    members: tuple[str, ...]
    is_new: bool
    """Whether the epoch's group is yet to be opened."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Tell `members` that the epoch is over, and leave its group."""

    epoch: int
    members: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell the member that it will not get the version."""

    member: str
    version: int
    reason: str
    is_gone: bool


@dataclass(frozen=True, slots=True)
class Dropped:
    """The member said nothing; nobody waits for it any more."""

    member: str
    reason: str


Instruction = Start | Stop | Refuse | Dropped


@dataclass(slots=True)
class _Attempt:
    epoch: int
    version: int
    silent: set[str]
    """Members that have not answered."""
    deadline_s: float
    is_sending: bool = True
    is_stopped: bool = False


@dataclass(slots=True)
class Membership:
    """The learner's view of a collective medium.

    Example:
        >>> membership = Membership(timeout_s=30.0, gather_s=1.0)
        >>> membership.handle(Offered(1), 0.0), membership.handle(Asked("a", 1), 0.0)
        ([], [])
        >>> membership.handle(Tick(), 1.0)
        [Start(epoch=1, version=1, members=('a',), is_new=True)]
    """

    timeout_s: float
    gather_s: float
    offered: set[int] = field(default_factory=set)
    _waiting: dict[str, int] = field(default_factory=dict)
    """Members that asked, and for which version."""
    _served: dict[str, int] = field(default_factory=dict)
    """Members that asked before, and the newest version each got, -1 for none: a newer one is held back for them, a moment."""
    _gathering_since_s: float | None = None
    _epoch: int = 0
    _group: tuple[str, ...] = ()
    """Members of the present epoch; empty: there is no group."""
    _attempt: _Attempt | None = None
    _num_attempts: dict[int, int] = field(default_factory=dict)
    """Failed ones, of each version on offer."""
    _story: deque[str] = field(default_factory=lambda: deque(maxlen=20))

    @property
    def version_in_use(self) -> int | None:
        """Return the version that is being sent or about to be."""
        if self._attempt is not None:
            return self._attempt.version
        return max(self._waiting.values(), default=None)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take `event` in and return what to do now, in order."""
        self._story.append(f"{now:.3f} {event}")
        return [*self._take(event, now), *self._next_attempt(now)]

    def _take(self, event: Event, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        match event:
            case Offered(version):
                self.offered.add(version)
                self._num_attempts[version] = 0
            case Withdrawn(version):
                instructions = self._withdraw(version, now)
            case Asked(member, version):
                instructions = self._ask(member, version, now)
            case Answered(member, epoch, failure):
                instructions = self._answer(member, epoch, failure, now)
            case Left(member):
                instructions = self._leave(member, now)
            case Progress(epoch) if self._is_running(epoch):
                assert self._attempt is not None
                self._attempt.deadline_s = now + self.timeout_s
            case Sent(epoch, failure):
                instructions = self._sent(epoch, failure, now)
            case Tick():
                instructions = self._check_deadline(now)
        return instructions

    def _ask(self, member: str, version: int, now: float) -> list[Instruction]:
        if version not in self.offered:
            self._waiting.pop(member, None)
            held = ", ".join(map(str, sorted(self.offered))) or "none"
            return [Refuse(member, version, f"the learner holds {held}", is_gone=True)]
        attempt = self._attempt
        if attempt is not None and member in attempt.silent:
            # It asks while it should receive: the order to begin was lost, or is still on its way. The deadline decides.
            return []
        if member not in self._waiting and len(self._waiting) >= MAX_MEMBERS:
            return [Refuse(member, version, f"{MAX_MEMBERS} members wait already", is_gone=False)]
        self._waiting[member] = version
        self._served.setdefault(member, -1)
        if self._gathering_since_s is None:
            self._gathering_since_s = now
        return []

    def _answer(self, member: str, epoch: int, failure: str, now: float) -> list[Instruction]:
        attempt = self._attempt
        if attempt is None or attempt.epoch != epoch or member not in attempt.silent:
            # Somebody who left a group that is kept for the next version: it cannot be used again.
            if failure and epoch == self._epoch and member in self._group and attempt is None:
                return self._dissolve(f"{member} left: {failure}")
            return []
        attempt.silent.discard(member)
        if failure:
            return [*self._stop(f"{member}: {failure}", now), *self._finish_if_over()]
        self._served[member] = attempt.version
        attempt.deadline_s = max(attempt.deadline_s, now + (ANSWER_S if attempt.is_stopped else self.timeout_s))
        return self._finish_if_over()

    def _leave(self, member: str, now: float) -> list[Instruction]:
        self._waiting.pop(member, None)
        self._served.pop(member, None)
        attempt = self._attempt
        if attempt is not None and member in attempt.silent:
            attempt.silent.discard(member)
            return [*self._stop(f"{member} left", now), *self._finish_if_over()]
        if attempt is None and member in self._group:
            return self._dissolve(f"{member} left")
        return []

    def _sent(self, epoch: int, failure: str, now: float) -> list[Instruction]:
        attempt = self._attempt
        if attempt is None or attempt.epoch != epoch:
            return []
        attempt.is_sending = False
        if failure:
            return [*self._stop(f"the learner: {failure}", now), *self._finish_if_over()]
        if not attempt.is_stopped:
            attempt.deadline_s = now + self.timeout_s
        return self._finish_if_over()

    def _withdraw(self, version: int, now: float) -> list[Instruction]:
        self.offered.discard(version)
        self._num_attempts.pop(version, None)
        stopped: list[Instruction] = []
        if self._attempt is not None and self._attempt.version == version:
            stopped = self._stop(f"version {version} was overwritten", now)
        return [*stopped, *self._refuse_waiting(version, "the learner went on to newer versions", is_gone=True)]

    def _check_deadline(self, now: float) -> list[Instruction]:
        attempt = self._attempt
        if attempt is None or now < attempt.deadline_s:
            return []
        if not attempt.is_stopped:
            silent = ", ".join(sorted(attempt.silent)) or "nobody"
            return self._stop(f"no progress for {self.timeout_s:g} s; silent: {silent}", now)
        dropped = [Dropped(member, f"said nothing in epoch {attempt.epoch}") for member in sorted(attempt.silent)]
        for member in attempt.silent:
            self._served.pop(member, None)
        attempt.silent.clear()
        attempt.is_sending = False
        return [*dropped, *self._finish_if_over()]

    def _stop(self, reason: str, now: float) -> list[Instruction]:
        """End the attempt and its group; whoever has not answered has a moment to say that it is out."""
        attempt = self._attempt
        if attempt is None or attempt.is_stopped:
            return []
        attempt.is_stopped, attempt.deadline_s = True, now + ANSWER_S
        if attempt.version in self._num_attempts:
            self._num_attempts[attempt.version] += 1
        return self._dissolve(reason)

    def _dissolve(self, reason: str) -> list[Instruction]:
        members, self._group = self._group, ()
        return [Stop(self._epoch, members, reason)]

    def _finish_if_over(self) -> list[Instruction]:
        attempt = self._attempt
        if attempt is None or attempt.silent or attempt.is_sending:
            return []
        self._attempt = None
        if attempt.is_stopped and self._num_attempts.get(attempt.version, 0) >= MAX_ATTEMPTS:
            self._num_attempts[attempt.version] = 0
            reason = f"version {attempt.version} could not be sent in {MAX_ATTEMPTS} attempts"
            return self._refuse_waiting(attempt.version, reason, is_gone=False)
        return []

    def _refuse_waiting(self, version: int, reason: str, is_gone: bool) -> list[Instruction]:
        refused = [member for member, wanted in self._waiting.items() if wanted == version]
        for member in refused:
            del self._waiting[member]
        return [Refuse(member, version, reason, is_gone) for member in refused]

    def _next_attempt(self, now: float) -> list[Instruction]:
        """Send the newest version that is waited for, once its members have gathered."""
        if not self._waiting:
            self._gathering_since_s = None
            return []
        if self._attempt is not None or not self._has_gathered(now):
            return []
        version = max(self._waiting.values())
        members = tuple(sorted(member for member, wanted in self._waiting.items() if wanted == version))
        for member in self._behind(version) - self._waiting.keys():
            del self._served[member]
        for member in members:
            del self._waiting[member]
        # Whoever waits for another version is next, without gathering once more: the clock of this gathering runs on.
        is_new = members != self._group
        ended: list[Instruction] = self._dissolve("the members changed") if is_new and self._group else []
        self._epoch += is_new
        self._group = members
        self._attempt = _Attempt(self._epoch, version, set(members), now + self.timeout_s)
        return [*ended, Start(self._epoch, version, members, is_new)]

    def _has_gathered(self, now: float) -> bool:
        assert self._gathering_since_s is not None
        if now - self._gathering_since_s >= self.gather_s:
            return True
        anyone_new = any(self._served[member] < 0 for member in self._waiting)
        return not anyone_new and self._behind(max(self._waiting.values())) <= self._waiting.keys()

    def _behind(self, version: int) -> set[str]:
        return {member for member, served in self._served.items() if served < version}

    def _is_running(self, epoch: int) -> bool:
        return self._attempt is not None and self._attempt.epoch == epoch and not self._attempt.is_stopped

    def check_invariants(self) -> None:
        """Assert what must hold between events."""
        assert all(version in self.offered for version in self._waiting.values()), self._told("waits for what is gone")
        assert self._num_attempts.keys() == self.offered, self._told("attempts of what is not on offer")
        assert all(count < MAX_ATTEMPTS for count in self._num_attempts.values()) or self._attempt is not None, self._told(
            "attempted too often"
        )
        if self._attempt is not None:
            attempt = self._attempt
            assert attempt.silent or attempt.is_sending, self._told("an attempt that is over goes on")
            assert attempt.is_stopped or set(attempt.silent) <= set(self._group), self._told("waits for who is in no group")
            assert not attempt.silent & self._waiting.keys(), self._told("receives and waits")
        assert self._waiting.keys() <= self._served.keys(), self._told("waits and is unknown")
        assert bool(self._waiting) <= (self._gathering_since_s is not None), self._told("waits and nobody gathers")

    def _told(self, what: str) -> str:
        return f"{what}: {self._attempt}; waiting {self._waiting}; group {self._group}; " + " | ".join(self._story)


def ranks_of(members: Iterable[str]) -> dict[str, int]:
    """Return the rank of each member; 0 is the learner's."""
    return {member: rank for rank, member in enumerate(members, start=1)}
