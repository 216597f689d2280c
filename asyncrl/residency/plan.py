"""Which components move where when a phase begins: pure, from names, sizes and budgets.

Order of a plan: first what leaves the device, least needed first (what no coming phase names, then what is named last; of equals
the larger), then what the phase needs, in the order it names them. What leaves goes to the first place in order of preference
that it may go to and that has room; where host memory is full, and something may go nowhere else, others that lie there go on to
disk. A component moves at most once in a plan, and no budget is exceeded after any move of it.

Called by residency/manager.py and, for the check at start (residency/fit.py), by the controller: no torch here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from asyncrl.errors import ResidencyError
from asyncrl.schema.control import ComponentMove, Phase, Residence

GIB = 1 << 30
SWAP_FOLDER = "swap"
"""In the run folder: components that are on disk."""
OffloadTo = Literal["host", "disk"]
_PREFERENCE: dict[OffloadTo, tuple[Residence, ...]] = {"host": ("host", "absent", "disk"), "disk": ("absent", "disk", "host")}


@dataclass(frozen=True, slots=True)
class Part:
    """A component as the planner sees it."""

    name: str
    num_bytes: int
    residence: Residence = "device"
    places: frozenset[Residence] = frozenset({"device", "host", "disk"})
    """Where it may be."""


@dataclass(frozen=True, slots=True)
class PhaseNeeds:
    """What a phase declares."""

    phase: Phase
    now: tuple[str, ...] = ()
    """Components that must be on the device."""
    soon: tuple[str, ...] = ()
    """Those that come next, soonest first."""
    working_bytes: int = 0
    """What else it will take on the device: gradients, activations, what other processes of the device hold then."""
    gives_back: bool = False
    """What it does not need leaves the device, whether or not there would be room: somebody else wants it."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of each memory there is for all components together; None: no limit."""

    device_bytes: int | None = None
    host_bytes: int | None = None


@dataclass(slots=True)
class _Draft:
    """A plan in the making: where everything is after the moves so far."""

    parts: dict[str, Part]
    budget: Budget
    working_bytes: int = 0
    moves: list[ComponentMove] = field(default_factory=list)

    def held(self, residence: Residence) -> int:
        return sum(part.num_bytes for part in self.parts.values() if part.residence == residence)

    def has_room(self, residence: Residence, num_bytes: int) -> bool:
        limit = {"device": self.budget.device_bytes, "host": self.budget.host_bytes}.get(residence)
        reserved = self.working_bytes if residence == "device" else 0
        return limit is None or self.held(residence) + reserved + num_bytes <= limit

    def move(self, name: str, to: Residence) -> None:
        part = self.parts[name]
        assert to in part.places, f"{name} may not go to {to}"
        self.moves.append(ComponentMove(name, part.residence, to, part.num_bytes))
        self.parts[name] = replace(part, residence=to)

    def has_moved(self, name: str) -> bool:
        return any(move.component == name for move in self.moves)


def plan_switch(
    parts: Iterable[Part], needs: PhaseNeeds, budget: Budget, offload_to: OffloadTo = "host"
) -> tuple[ComponentMove, ...]:
    """Return the moves after which the phase can begin, in order.

    Args:
        parts: Everything that this process moves.
        needs: Of the phase; names that are not among the parts are others' business.
        budget: Of this process.
        offload_to: Where what leaves is to go first.

    Raises:
        ResidencyError: What the phase needs does not fit, or what has to leave may go nowhere; the message adds up.
    """
    draft = _Draft({part.name: part for part in parts}, budget, needs.working_bytes)
    now = [name for name in needs.now if name in draft.parts]
    _check_fits(draft, now, needs)
    missing = sum(draft.parts[name].num_bytes for name in now if draft.parts[name].residence != "device")
    for name in _least_needed_first(draft, needs):
        if not needs.gives_back and draft.has_room("device", missing):
            break
        _offload(draft, name, needs, offload_to)
    for name in now:
        if draft.parts[name].residence != "device":
            draft.move(name, "device")
    return tuple(draft.moves)


def plan_prefetch(parts: Iterable[Part], needs: PhaseNeeds, coming: PhaseNeeds, budget: Budget) -> tuple[ComponentMove, ...]:
    """Return moves that bring what the coming phase needs nearer while there is room, and disturb nothing of the present one.

    Args:
        parts: Everything that this process moves.
        needs: Of the phase that is on; where it gives back, nothing goes to the device.
        coming: Of the next.
        budget: Of this process.
    """
    draft = _Draft({part.name: part for part in parts}, budget, max(needs.working_bytes, coming.working_bytes))
    for name in (name for name in coming.now if name in draft.parts):
        part = draft.parts[name]
        if part.residence == "device":
            continue
        if not needs.gives_back and draft.has_room("device", part.num_bytes):
            draft.move(name, "device")
        elif part.residence != "host" and "host" in part.places and draft.has_room("host", part.num_bytes):
            draft.move(name, "host")
    return tuple(draft.moves)


def plan_room(
    parts: Iterable[Part], keep: Collection[str], budget: Budget, offload_to: OffloadTo = "host"
) -> tuple[ComponentMove, ...]:
    """Return moves that take everything off the device but `keep`, as far as it may go anywhere."""
    draft = _Draft({part.name: part for part in parts}, budget)
    for part in list(draft.parts.values()):
        if part.residence == "device" and part.name not in keep:
            place = _place_for(draft, part, offload_to)
            if place is not None:
                draft.move(part.name, place)
    return tuple(draft.moves)


def _least_needed_first(draft: _Draft, needs: PhaseNeeds) -> list[str]:
    """Return what may leave the device, in the order in which it should."""
    nearness = {name: -number for number, name in enumerate(needs.soon)}
    leaving = [part for part in draft.parts.values() if part.residence == "device" and part.name not in needs.now]
    leaving.sort(key=lambda part: (nearness.get(part.name, -len(nearness) - 1), -part.num_bytes, part.name))
    return [part.name for part in leaving]


def _offload(draft: _Draft, name: str, needs: PhaseNeeds, offload_to: OffloadTo) -> None:
    part = draft.parts[name]
    place = _place_for(draft, part, offload_to)
    if place is None and "host" in part.places:
        _make_host_room(draft, part, needs)
        place = _place_for(draft, part, offload_to)
    if place is None:
        raise ResidencyError(
            f"{name} has to leave the device before phase {needs.phase!r} and has nowhere to go: it may be in "
            f"{', '.join(sorted(part.places))}, takes {gib(part.num_bytes)}, and host memory holds {gib(draft.held('host'))} of "
            f"{_limit(draft.budget.host_bytes)}"
        )
    draft.move(name, place)


def _place_for(draft: _Draft, part: Part, offload_to: OffloadTo) -> Residence | None:
    """Return the first place that would take a part, or None."""
    for place in _PREFERENCE[offload_to]:
        if place in part.places and draft.has_room(place, part.num_bytes):
            return place
    return None


def _make_host_room(draft: _Draft, wanting: Part, needs: PhaseNeeds) -> None:
    """Send parts on from host memory, those that this phase does not need first brought up, until `wanting` has room."""
    lying = [part for part in draft.parts.values() if part.residence == "host" and part.name not in needs.now]
    for part in sorted(lying, key=lambda part: (part.name in needs.soon, -part.num_bytes, part.name)):
        if draft.has_room("host", wanting.num_bytes) or draft.has_moved(part.name):
            continue
        further: tuple[Residence, ...] = ("absent", "disk")
        place = next((place for place in further if place in part.places), None)
        if place is not None:
            draft.move(part.name, place)


def _check_fits(draft: _Draft, now: Sequence[str], needs: PhaseNeeds) -> None:
    limit = draft.budget.device_bytes
    total = sum(draft.parts[name].num_bytes for name in now) + needs.working_bytes
    if limit is not None and total > limit:
        sizes = {name: draft.parts[name].num_bytes for name in now}
        raise ResidencyError(f"phase {needs.phase!r} does not fit the device:\n{sum_up(sizes, needs.working_bytes, limit)}")


def sum_up(sizes: Mapping[str, int], working_bytes: int, limit: int) -> str:
    """Return an addition, a line a component, and what it comes to against the limit."""
    lines = dict(sizes)
    if working_bytes:
        lines["working memory"] = working_bytes
    total = sum(lines.values())
    rows = [*lines.items(), ("sum", total), ("budget", limit), ("too much" if total > limit else "left", abs(limit - total))]
    return "\n".join(f"  {name:<22}{num_bytes / GIB:>12.4f} GiB" for name, num_bytes in rows)


def gib(num_bytes: int) -> str:
    """Return bytes as people read them."""
    return f"{num_bytes / GIB:.4f} GiB"


def _limit(num_bytes: int | None) -> str:
    return "no limit" if num_bytes is None else gib(num_bytes)
