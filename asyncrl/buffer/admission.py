"""Admission: how far generation may run ahead, and which generator gets the next group.

The rule is AReaL's, with the version that is live on the generator: a group may start on generator g while
`(live_version_g + lead + 1) * B - (accepted + running) > 0`. The version is the generator's and not the learner's: the group's
oldest token will carry it, and only so does the staleness proof in docs/buffer.md hold while weights are on their way. The lead
is `max_staleness`, or less: `Lead` says how much of it the learner needs. The counts, and so the rule itself, are the buffer's
state machine's (state.py); nothing is counted twice.

The pool keeps the generators of each live version in one sorted list, by load and name. A change moves one entry, a question
looks at the first of as many lists as there are versions live. With hundreds of generators a scan would cost the controller more
than its sockets do.

Invariants: a generator gets one group beyond its slots, so that no slot waits for the controller. One whose room shrinks below
what it holds keeps that and gets no more until there is room again. Room never enters the staleness rule. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from asyncrl.buffer.group import BufferLimits

WAITING = 0.1
"""Share of the time for which the learner may wait for groups. Without, steps are a little faster and data is a version older."""
SMOOTHING, RATE = 0.3, 0.5
"""What a step counts in the mean of that share; and the relative change of the lead for each 1 that the mean is over WAITING."""


class Lead:
    """How many versions generation may be ahead of the learner: at most eta, and no more than keep the learner busy.

    Data that waits grows old and teaches less. With a bound of 1 there is nothing to choose: the next step's groups are generated
    while this one is trained.

    Example:
        >>> lead = Lead(BufferLimits(groups_per_step=4, max_staleness=8, as_needed=True))
        >>> lead.groups
        4
        >>> for _ in range(5):
        ...     lead.step_taken(waited=0.9)
        >>> lead.groups
        10
    """

    def __init__(self, limits: BufferLimits) -> None:
        self.versions = self._waiting = 0.0
        self.follow(limits)

    def follow(self, limits: BufferLimits) -> None:
        """Go on under these limits."""
        self._limits, self._least, self._most = limits, float(min(1, limits.max_staleness)), float(limits.max_staleness)
        self.versions = min(max(self.versions, self._least), self._most) if limits.as_needed else self._most

    @property
    def groups(self) -> int:
        """Return the lead in groups."""
        return int(self.versions * self._limits.groups_per_step)

    def step_taken(self, waited: float) -> None:
        """Learn for what share of the time since the step before the learner had nothing to train."""
        self._waiting += SMOOTHING * (waited - self._waiting)
        if self._limits.as_needed:
            self.versions = min(max(self.versions * (1.0 + RATE * (self._waiting - WAITING)), self._least), self._most)


@dataclass(slots=True)
class Generator:
    """A generator as admission knows it."""

    name: str
    num_slots: int
    version: int
    """Live on it; -1: none yet."""
    members: int = 0
    """That it holds, in slots or queued."""
    is_leaving: bool = False
    """It finishes what it holds and gets nothing more."""

    @property
    def rank(self) -> tuple[float, str]:
        """Return its place among those of its version: members a slot (infinite where it gets nothing more), then its name."""
        return math.inf if self.is_leaving else self.members / self.num_slots, self.name


@dataclass(eq=False)
class GeneratorPool:
    """Generators by name, and which of them is next.

    Example:
        >>> pool = GeneratorPool()
        >>> pool.put(Generator("a", num_slots=2, version=0, members=1))
        >>> pool.put(Generator("b", num_slots=4, version=0, members=1))
        >>> pool.best(0).name
        'b'
    """

    _by_name: dict[str, Generator] = field(default_factory=dict)
    _ranks: dict[int, list[tuple[float, str]]] = field(default_factory=dict)
    """By version, where there is a generator of it."""

    def __len__(self) -> int:
        """Return the number of generators."""
        return len(self._by_name)

    def members_on(self, name: str) -> int:
        """Return how many members this generator holds; 0 where it is unknown."""
        known = self._by_name.get(name)
        return known.members if known else 0

    def is_leaving(self, name: str) -> bool:
        """Return whether this generator gets nothing more."""
        known = self._by_name.get(name)
        return known is not None and known.is_leaving

    @property
    def newest_version(self) -> int:
        """Return the newest version live on any; -1 where there is none."""
        return max(self._ranks, default=-1)

    def put(self, generator: Generator) -> None:
        """Take a generator in, in place of one of that name."""
        assert generator.num_slots > 0, f"{generator.name} has {generator.num_slots} slots"
        self.remove(generator.name)
        self._enter(generator)

    def remove(self, name: str) -> Generator | None:
        """Forget a generator and return it; unknown ones are ignored."""
        generator = self._by_name.pop(name, None)
        if generator is not None:
            ranks = self._ranks[generator.version]
            del ranks[bisect_left(ranks, generator.rank)]
            if not ranks:
                del self._ranks[generator.version]
        return generator

    def change(
        self, name: str, *, add_members: int = 0, num_slots: int = 0, version: int | None = None, is_leaving: bool = False
    ) -> None:
        """Change what is given; unknown generators are ignored. One that is leaving gets nothing more.

        A late sample of the process that bore this name before must not make the count of members negative.
        """
        if (generator := self.remove(name)) is not None:
            generator.version = generator.version if version is None else version
            generator.members = max(0, generator.members + add_members)
            generator.num_slots = num_slots or generator.num_slots
            generator.is_leaving = generator.is_leaving or is_leaving
            self._enter(generator)

    def best(self, min_version: int) -> Generator | None:
        """Return the least loaded generator at `min_version` or above that has room; of equals the newest, then by name."""
        firsts = [(ranks[0], -version) for version, ranks in self._ranks.items() if version >= min_version and ranks[0][0] <= 1]
        chosen = min(firsts, key=lambda first: (first[0][0], first[1]), default=None)
        return None if chosen is None else self._by_name[chosen[0][1]]

    def _enter(self, generator: Generator) -> None:
        self._by_name[generator.name] = generator
        insort(self._ranks.setdefault(generator.version, []), generator.rank)
