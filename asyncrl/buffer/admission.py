"""Admission: how far generation may run ahead, and which generator gets the next group.

The rule is AReaL's, with the version that is live on the generator: a group may start on generator g while
`(live_version_g + lead + 1) * B - (accepted + running) > 0`. The version is the generator's and not the learner's: the group's
oldest token will carry it, and only so does the staleness proof in docs/buffer.md hold while weights are on their way. The lead
is `max_staleness`, or less: `Lead` says how much of it the learner needs. The counts, and so the rule itself, are the buffer's
state machine's (state.py); nothing is counted twice.

The pool keeps one heap for each live version, of (load, name); what is another load by now stays in it until it comes up or there
is too much of it. A change is one push, a question looks at the top of as many heaps as there are versions live. With hundreds of
generators a scan would cost the controller more than its sockets do.

Invariants: a generator gets one group beyond its slots, so that no slot waits for the controller. One whose room shrinks below
what it holds keeps that and gets no more until there is room again. Room never enters the staleness rule. Pure.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from asyncrl.buffer.group import BufferLimits

_STALE_SHARE = 8
"""Entries a heap may hold for each generator at its version, before the stale ones are thrown out."""
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
    def load(self) -> float:
        """Return members a slot."""
        return self.members / self.num_slots


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
    _heaps: dict[int, list[tuple[float, str]]] = field(default_factory=dict)
    _num_at: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of generators."""
        return len(self._by_name)

    def members_on(self, name: str) -> int:
        """Return how many members this generator holds; 0 where it is unknown."""
        known = self._by_name.get(name)
        return known.members if known else 0

    @property
    def newest_version(self) -> int:
        """Return the newest version live on any; -1 where there is none."""
        return max(self._num_at, default=-1)

    def put(self, generator: Generator) -> None:
        """Take a generator in, in place of one of that name."""
        assert generator.num_slots > 0, f"{generator.name} has {generator.num_slots} slots"
        self.remove(generator.name)
        self._by_name[generator.name] = generator
        self._num_at[generator.version] = self._num_at.get(generator.version, 0) + 1
        self._offer(generator)

    def remove(self, name: str) -> None:
        """Forget a generator; unknown ones are ignored."""
        generator = self._by_name.pop(name, None)
        if generator is not None:
            self._one_less_at(generator.version)

    def change(
        self, name: str, *, add_members: int = 0, num_slots: int = 0, version: int | None = None, is_leaving: bool = False
    ) -> None:
        """Change what is given; unknown generators are ignored. One that is leaving gets nothing more.

        A late sample of the process that bore this name before must not make the count of members negative.
        """
        generator = self._by_name.get(name)
        if generator is None:
            return
        if version is not None and version != generator.version:
            self._one_less_at(generator.version)
            self._num_at[version] = self._num_at.get(version, 0) + 1
            generator.version = version
        generator.members = max(0, generator.members + add_members)
        generator.num_slots = num_slots or generator.num_slots
        generator.is_leaving = generator.is_leaving or is_leaving
        self._offer(generator)

    def best(self, min_version: int) -> Generator | None:
        """Return the least loaded generator at `min_version` or above that has room; of equals the newest, then by name."""
        tops = []
        for version in self._num_at:
            heap = self._heaps.get(version, []) if version >= min_version else []
            while heap and self._is_stale(version, *heap[0]):
                heapq.heappop(heap)
            if heap:
                tops.append(self._by_name[heap[0][1]])
        return min(tops, key=lambda generator: (generator.load, -generator.version, generator.name), default=None)

    def _is_stale(self, version: int, load: float, name: str) -> bool:
        known = self._by_name.get(name)
        return known is None or known.is_leaving or (known.version, known.load) != (version, load)

    def _offer(self, generator: Generator) -> None:
        if generator.load > 1:
            return
        heap = self._heaps.setdefault(generator.version, [])
        heapq.heappush(heap, (generator.load, generator.name))
        if len(heap) > _STALE_SHARE * self._num_at[generator.version] + _STALE_SHARE:
            heap[:] = [entry for entry in set(heap) if not self._is_stale(generator.version, *entry)]
            heapq.heapify(heap)

    def _one_less_at(self, version: int) -> None:
        self._num_at[version] -= 1
        if not self._num_at[version]:
            del self._num_at[version]
            self._heaps.pop(version, None)
