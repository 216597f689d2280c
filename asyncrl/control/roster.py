"""Who may be a process of this run: those it starts itself, and guests, generators that others start and that come and go.

Guests are named `joined-HOST-PID-N` (control/joining.py), get work like any generator and are nobody's to restart: the lifecycle
and the supervisor do not know them, and their end is no death. The staleness bound needs nothing of them that it does not need of
every generator: admission issues by the version that is live on each.

Invariants:
- A name has one incarnation at a time; it is free again once its connection is over.
- At most `most_guests` guests are here at once; a place is taken when a guest is let in, before its connection is accepted.
- A guest that was let in is let in again (its link broke) while it holds its place.

Pure bookkeeping. `judge` is what the listener asks; the rest is called by control/controller.py, and `expect` and `forget` by
whoever starts and ends planned generators while the run goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from asyncrl.config.run import SupervisionConfig
from asyncrl.control.life_events import ProcessPlan, ProcessSilent
from asyncrl.control.signs_of_life import SignsOfLife
from asyncrl.schema.control import Hello, ProcessKind

GUEST_PREFIX = "joined-"
"""How every guest's name begins, and no other's."""


@dataclass(slots=True)
class Guest:
    """A generator that this run did not start."""

    name: str
    incarnation: str
    pid: int
    """On its own machine."""
    is_ready: bool = False
    """Its engine is up."""


class Roster:
    """The names a run knows.

    Example:
        >>> roster = Roster([ProcessPlan("generator-0", "generator")], most_guests=1)
        >>> roster.judge(Hello(1, "generator", "joined-elsewhere-7-0", "a", 7))
        ''
        >>> roster.judge(Hello(1, "generator", "joined-elsewhere-8-0", "b", 8))
        'all 1 places for joining generators are taken (placement.most_joining_generators)'
    """

    def __init__(
        self, planned: Iterable[ProcessPlan] = (), most_guests: int = 0, config: SupervisionConfig | None = None
    ) -> None:
        """Know the planned processes; nobody is here yet.

        Args:
            planned: What the run starts itself.
            most_guests: Guests at once.
            config: How long a guest may be silent.
        """
        self.most_guests = most_guests
        self.guests: dict[str, Guest] = {}
        self.num_came = self.num_left = self.num_lost = 0
        self._planned: dict[str, ProcessKind] = {item.name: item.kind for item in planned}
        self._signs = SignsOfLife(config or SupervisionConfig())

    def expect(self, name: str, kind: ProcessKind) -> None:
        """Let in a process that the run starts from now on."""
        self._planned[name] = kind

    def forget(self, name: str) -> None:
        """Let in no more a process that the run has ended for good."""
        self._planned.pop(name, None)

    def judge(self, hello: Hello) -> str:
        """Return why this peer may not come in, in words it is told; empty lets it in, and gives a guest its place."""
        if self._planned.get(hello.name) == hello.kind:
            return ""
        if hello.kind != "generator" or not hello.name.startswith(GUEST_PREFIX):
            return f"this run has no {hello.kind} named {hello.name!r}"
        return self._refusal(hello) or self._let_in(hello)

    def _refusal(self, hello: Hello) -> str:
        here = self.guests.get(hello.name)
        if here is not None and here.incarnation != hello.incarnation:
            return f"another generator named {hello.name!r} has joined; try again, under another process id"
        if here is None and self.most_guests == 0:
            return "this run lets no generator join: set placement.most_joining_generators and resume it"
        if here is None and len(self.guests) >= self.most_guests:
            return f"all {self.most_guests} places for joining generators are taken (placement.most_joining_generators)"
        return ""

    def _let_in(self, hello: Hello) -> str:
        if hello.name not in self.guests:
            self.guests[hello.name] = Guest(hello.name, hello.incarnation, hello.pid)
            self.num_came += 1
        return ""

    def is_guest(self, name: str) -> bool:
        """Return whether this is a guest that is here now."""
        return name in self.guests

    def ready(self, name: str) -> None:
        """Note that a guest's engine is up."""
        self.guests[name].is_ready = True

    def connected(self, name: str, now: float) -> None:
        """Expect signs of life of a guest from now on."""
        self._signs.started(name, now)
        self._signs.beat(name, now)

    def beat(self, name: str, now: float) -> None:
        """Note a guest's sign of life; of others it is ignored."""
        self._signs.beat(name, now)

    def overdue(self, now: float) -> dict[str, float]:
        """Return the guests that have been silent for too long, with the seconds; call it every heartbeat interval."""
        return {late.name: late.silent_s for late in self._signs.overdue(now) if isinstance(late, ProcessSilent)}

    def gone(self, name: str, *, said_goodbye: bool) -> None:
        """Give a guest's place back."""
        if self.guests.pop(name, None) is None:
            return
        self._signs.gone(name)
        self.num_left += said_goodbye
        self.num_lost += not said_goodbye

    def counts(self) -> dict[str, int]:
        """Return how many guests are here, may be, came, left in good order and were lost; empty where none may join."""
        if not self.most_guests:
            return {}
        here = len(self.guests)
        return {
            "here": here, "most": self.most_guests, "came": self.num_came, "left": self.num_left, "lost": self.num_lost,
        }  # fmt: skip

    def check_invariants(self) -> None:
        """Raise AssertionError where the books contradict themselves."""
        assert len(self.guests) <= max(self.most_guests, 0), f"{len(self.guests)} guests, {self.most_guests} places"
        assert self.num_came == len(self.guests) + self.num_left + self.num_lost, self.counts()
        assert not self.guests.keys() & self._planned.keys()
