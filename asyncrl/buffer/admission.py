"""Admission: how far generation may run ahead, and which generator gets the next group.

The rule is AReaL's, with the version that is live on the generator: a group may start on generator g while
`(live_version_g + lead + 1) * B - (accepted + running) > 0`. It uses the generator's version, not the learner's, because the
group's oldest token will have that version; otherwise the staleness proof in docs/buffer.md would not hold while weights are
being sent. The lead is `max_staleness` or less: `Lead` computes how much the learner needs. The state machine (state.py) keeps
the counts and applies the rule; nothing is counted twice.

The pool keeps the generators of each live version in one list, sorted by load and name. A change moves one entry; a lookup reads
the first entry of each live version's list. With hundreds of generators, a scan of all would cost the controller more time than
its sockets.

Invariants: a generator gets one group more than its slots, so that no slot waits for the controller. If its number of slots drops
below what it holds, it keeps its groups and gets no more until slots are free again. Slots never enter the staleness rule. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from asyncrl.buffer.group import BufferLimits

WAITING = 0.1
"""Share of the time that the learner may wait for groups. With 0, steps are a little faster and data is one version older."""
SMOOTHING, RATE = 0.3, 0.5
"""Weight of one step in the moving mean of that share; relative change of the lead per 1 that the mean exceeds WAITING."""


class Lead:
    """How many versions generation may be ahead of the learner: at most eta, and only as many as keep the learner busy.

    Waiting data becomes stale and is less useful. With a bound of 1 there is no choice: the next step's groups are generated
    while the current step is trained.

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
        """Use these limits from now on."""
        self._limits, self._least, self._most = limits, float(min(1, limits.max_staleness)), float(limits.max_staleness)
        self.versions = min(max(self.versions, self._least), self._most) if limits.as_needed else self._most

    @property
    def groups(self) -> int:
        """Return the lead in groups."""
        return int(self.versions * self._limits.groups_per_step)

    def step_taken(self, waited: float) -> None:
        """Adapt the lead to the share of the time since the last step in which the learner had nothing to train."""
        self._waiting += SMOOTHING * (waited - self._waiting)
        if self._limits.as_needed:
            self.versions = min(max(self.versions * (1.0 + RATE * (self._waiting - WAITING)), self._least), self._most)


@dataclass(slots=True)
class Generator:
    """A generator as admission knows it."""

    name: str
    num_slots: int
    version: int
    """The version live on it; -1: none yet."""
    members: int = 0
    """Members that it holds, in slots or queued."""
    is_leaving: bool = False
    """It finishes what it holds and gets nothing more."""

    @property
    def rank(self) -> tuple[float, str]:
        """Return its sort key among generators of its version: members per slot (infinite if it gets no more work), then name."""
        return math.inf if self.is_leaving else self.members / self.num_slots, self.name


@dataclass(eq=False)
class GeneratorPool:
    """Generators by name, and which of them gets the next group.

    Example:
        >>> pool = GeneratorPool()
        >>> pool.put(Generator("a", num_slots=2, version=0, members=1))
        >>> pool.put(Generator("b", num_slots=4, version=0, members=1))
        >>> pool.best(0).name
        'b'
    """

    _by_name: dict[str, Generator] = field(default_factory=dict)
    _ranks: dict[int, list[tuple[float, str]]] = field(default_factory=dict)
    """Sort keys by version, for versions that are live on some generator."""

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
        """Return the newest version live on any generator; -1 if there is none."""
        return max(self._ranks, default=-1)

    def put(self, generator: Generator) -> None:
        """Add a generator; it replaces one with the same name."""
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
        """Change the given fields; unknown generators are ignored. A generator that is leaving gets no more work.

        A late sample of an earlier process with the same name must not make the count of members negative.
        """
        if (generator := self.remove(name)) is not None:
            generator.version = generator.version if version is None else version
            generator.members = max(0, generator.members + add_members)
            generator.num_slots = num_slots or generator.num_slots
            generator.is_leaving = generator.is_leaving or is_leaving
            self._enter(generator)

    def best(self, min_version: int) -> Generator | None:
        """Return the least loaded generator with room and a version from `min_version` on; ties: newest version, then name."""
        firsts = [(ranks[0], -version) for version, ranks in self._ranks.items() if version >= min_version and ranks[0][0] <= 1]
        chosen = min(firsts, key=lambda first: (first[0][0], first[1]), default=None)
        return None if chosen is None else self._by_name[chosen[0][1]]

    def _enter(self, generator: Generator) -> None:
        self._by_name[generator.name] = generator
        insort(self._ranks.setdefault(generator.version, []), generator.rank)
