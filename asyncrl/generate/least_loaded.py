"""The least loaded generator that may have a group, found without looking at all of them.

One heap for each live version, of (load, name) with stale entries left in until they come up or are too many: a change is one
push, a question looks at the top of as many heaps as there are versions live. With hundreds of generators a scan would cost the
controller more than its sockets do.

Pure; called by generate/admission.py.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_STALE_SHARE = 8
"""Entries a heap may hold for each generator at its version, before the stale ones are thrown out."""


@dataclass(slots=True)
class Candidate:
    """A generator as admission knows it."""

    name: str
    num_slots: int
    version: int
    members: int = 0
    is_leaving: bool = False
    """It finishes what it holds and gets nothing more."""
    stamp: int = -1
    """Another with every change, never given twice: entries of an older one are stale."""

    @property
    def load(self) -> float:
        """Return members a slot."""
        return self.members / self.num_slots


class LeastLoaded:
    """Generators by name, and who of them is next.

    Example:
        >>> generators = LeastLoaded(has_room=lambda generator: generator.members < generator.num_slots)
        >>> generators.put(Candidate("a", num_slots=2, version=0, members=1))
        >>> generators.put(Candidate("b", num_slots=4, version=0, members=1))
        >>> generators.best(0).name
        'b'
    """

    def __init__(self, has_room: Callable[[Candidate], bool]) -> None:
        """Note who may be chosen at all."""
        self._has_room = has_room
        self._by_name: dict[str, Candidate] = {}
        self._heaps: dict[int, list[tuple[float, str, int]]] = {}
        self._num_at: dict[int, int] = {}
        self._stamps = itertools.count()

    def __len__(self) -> int:
        """Return the number of generators."""
        return len(self._by_name)

    def __iter__(self) -> Iterator[Candidate]:
        """Go over all of them."""
        return iter(self._by_name.values())

    def get(self, name: str) -> Candidate | None:
        """Return a generator; None where it is unknown."""
        return self._by_name.get(name)

    @property
    def newest_version(self) -> int:
        """Return the newest version live on any; -1 where there is none."""
        return max(self._num_at, default=-1)

    def put(self, generator: Candidate) -> None:
        """Take a generator in, in place of one of that name."""
        self.remove(generator.name)
        self._by_name[generator.name] = generator
        self._num_at[generator.version] = self._num_at.get(generator.version, 0) + 1
        self._offer(generator)

    def remove(self, name: str) -> None:
        """Forget a generator; unknown ones are ignored."""
        generator = self._by_name.pop(name, None)
        if generator is not None:
            self._leave(generator.version)

    def change(
        self, generator: Candidate, *, members: int | None = None, num_slots: int | None = None, version: int | None = None
    ) -> None:
        """Set what is given."""
        if version is not None and version != generator.version:
            self._leave(generator.version)
            self._num_at[version] = self._num_at.get(version, 0) + 1
            generator.version = version
        generator.members = generator.members if members is None else members
        generator.num_slots = generator.num_slots if num_slots is None else num_slots
        self._offer(generator)

    def best(self, min_version: int) -> Candidate | None:
        """Return the least loaded generator at `min_version` or above that has room; of equals the newest, then by name."""
        tops = [top for version in self._num_at if version >= min_version and (top := self._top(version)) is not None]
        return min(tops, key=lambda generator: (generator.load, -generator.version, generator.name)) if tops else None

    def _top(self, version: int) -> Candidate | None:
        heap = self._heaps.get(version, [])
        while heap:
            _, name, stamp = heap[0]
            generator = self._by_name.get(name)
            if generator is not None and generator.stamp == stamp:
                return generator
            heapq.heappop(heap)
        return None

    def _offer(self, generator: Candidate) -> None:
        generator.stamp = next(self._stamps)
        if not self._has_room(generator):
            return
        heap = self._heaps.setdefault(generator.version, [])
        heapq.heappush(heap, (generator.load, generator.name, generator.stamp))
        if len(heap) > _STALE_SHARE * self._num_at[generator.version] + _STALE_SHARE:
            heap[:] = [entry for entry in heap if (known := self._by_name.get(entry[1])) is not None and known.stamp == entry[2]]
            heapq.heapify(heap)

    def _leave(self, version: int) -> None:
        self._num_at[version] -= 1
        if not self._num_at[version]:
            del self._num_at[version]
            self._heaps.pop(version, None)
