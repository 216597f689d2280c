"""Which components move where when a phase begins, and whether a set of phases fits at all: pure, from names, sizes and budgets.

Order of a plan: first what leaves the device, least needed first (what no coming phase names, then what is named last; of equals
the larger), then what the phase needs, in the order it names them. What leaves goes to the first place in order of preference
that it may go to and that has room. Where host memory is full, and something may go nowhere else, others that lie there go on to
disk. A component moves at most once in a plan, and no budget is exceeded after any move of it.

The controller checks phases at start: no torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from asyncrl.errors import ConfigError, ResidencyError
from asyncrl.schema.control import ComponentMove, Phase, Residence

GIB = 1 << 30
SWAP_FOLDER = "swap"
"""In the run folder: components that are on disk."""
OffloadTo = Literal["host", "disk"]
_PREFERENCE: dict[OffloadTo, tuple[Residence, ...]] = {"host": ("host", "disk"), "disk": ("disk", "host")}
KNOBS = {
    "optimizer": 'learner.optimizer = "adamw_8bit" (a quarter of it) or learner.offload_optimizer = true (none of it)',
    "policy": 'learner.dtype = "bfloat16", or [learner.lora], which trains adapters only',
    "critic": 'algorithm.critic.kind = "head", which sits on the policy',
    "reference": 'algorithm.reference.where = "worker"',
    "reward": "reward models on a device of their own (inference.device)",
    "KV cache": "generate.engine.kv_cache_gib, or fewer generate.engine.num_slots",
    "engine weights": 'placement.kind = "hybrid", where engine and learner share one copy',
    "batch": "smaller inference.tokens_per_batch",
    "activations": "smaller packing.tokens_per_row, or learner.gradient_checkpointing = true",
    "backward": "smaller packing.tokens_per_row, or learner.gradient_checkpointing = true",
    "logits": "smaller learner.logprob_chunk_tokens",
    "gradients": 'learner.dtype = "bfloat16", or [learner.lora], which trains adapters only',
}
"""What makes a component smaller, by a word of its name; the first that fits is said."""


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


class _Draft:
    """A plan in the making: where everything is after the moves so far."""

    def __init__(self, parts: Iterable[Part], budget: Budget, working_bytes: int) -> None:
        self.parts = {part.name: part for part in parts}
        self.budget, self.working_bytes = budget, working_bytes
        self.moves: list[ComponentMove] = []

    def held(self, residence: Residence) -> int:
        return sum(part.num_bytes for part in self.parts.values() if part.residence == residence)

    def has_room(self, residence: Residence, num_bytes: int) -> bool:
        limit = {"device": self.budget.device_bytes, "host": self.budget.host_bytes}.get(residence)
        reserved = self.working_bytes if residence == "device" else 0
        return limit is None or self.held(residence) + reserved + num_bytes <= limit

    def move(self, part: Part, to: Residence) -> None:
        self.moves.append(ComponentMove(part.name, part.residence, to, part.num_bytes))
        self.parts[part.name] = replace(part, residence=to)

    def place_for(self, part: Part, places: Iterable[Residence]) -> Residence | None:
        """Return the first of these places that would take a part, or None."""
        return next((place for place in places if place in part.places and self.has_room(place, part.num_bytes)), None)


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
    draft = _Draft(parts, budget, needs.working_bytes)
    now = [draft.parts[name] for name in needs.now if name in draft.parts]
    sizes = {part.name: part.num_bytes for part in now}
    if needs.working_bytes:
        sizes["working memory"] = needs.working_bytes
    if budget.device_bytes is not None and sum(sizes.values()) > budget.device_bytes:
        raise ResidencyError(f"phase {needs.phase!r} does not fit the device:\n{sum_up(sizes, budget.device_bytes)}")
    missing = sum(part.num_bytes for part in now if part.residence != "device")
    nearness = {name: -number for number, name in enumerate(needs.soon)}
    leaving = [part for part in draft.parts.values() if part.residence == "device" and part not in now]
    for part in sorted(leaving, key=lambda part: (nearness.get(part.name, -len(nearness) - 1), -part.num_bytes, part.name)):
        if not needs.gives_back and draft.has_room("device", missing):
            break
        _offload(draft, part, needs, offload_to)
    for part in now:
        if part.residence != "device":
            draft.move(part, "device")
    return tuple(draft.moves)


def plan_prefetch(parts: Iterable[Part], needs: PhaseNeeds, coming: PhaseNeeds, budget: Budget) -> tuple[ComponentMove, ...]:
    """Return moves that bring what the coming phase needs nearer while there is room, and disturb nothing of the present one.

    Args:
        parts: Everything that this process moves.
        needs: Of the phase that is on; where it gives back, nothing goes to the device.
        coming: Of the next.
        budget: Of this process.
    """
    draft = _Draft(parts, budget, max(needs.working_bytes, coming.working_bytes))
    for part in (draft.parts[name] for name in coming.now if name in draft.parts):
        if part.residence == "device":
            continue
        if not needs.gives_back and draft.has_room("device", part.num_bytes):
            draft.move(part, "device")
        elif part.residence != "host" and draft.place_for(part, ["host"]):
            draft.move(part, "host")
    return tuple(draft.moves)


def _offload(draft: _Draft, part: Part, needs: PhaseNeeds, offload_to: OffloadTo) -> None:
    place = draft.place_for(part, _PREFERENCE[offload_to])
    if place is None and "host" in part.places:
        # Parts go on from host memory until there is room: first those that are not needed soon, of equals the larger.
        moved = {move.component for move in draft.moves}
        lying = [each for each in draft.parts.values() if each.residence == "host" and each.name not in {*needs.now, *moved}]
        for each in sorted(lying, key=lambda each: (each.name in needs.soon, -each.num_bytes, each.name)):
            if "disk" in each.places and not draft.has_room("host", part.num_bytes):
                draft.move(each, "disk")
        place = draft.place_for(part, ["host"])
    if place is None:
        limit = "no limit" if draft.budget.host_bytes is None else gib(draft.budget.host_bytes)
        raise ResidencyError(
            f"{part.name} has to leave the device before phase {needs.phase!r} and has nowhere to go: it may be in "
            f"{', '.join(sorted(part.places))}, takes {gib(part.num_bytes)}, and host memory holds {gib(draft.held('host'))} of "
            f"{limit}"
        )
    draft.move(part, place)


def check_phases(phases: Iterable[tuple[Phase, Mapping[str, int]]], budget_bytes: int) -> None:
    """Refuse phases that cannot fit.

    Args:
        phases: Each with what is on the device in it, of all processes, in bytes by name.
        budget_bytes: Of the device. Host memory is in no sum: what finds it full goes to disk.

    Raises:
        ConfigError: Some phase needs more than there is; the message shows each such sum and what to change.
    """
    complaints = []
    for phase, sizes in phases:
        if sum(sizes.values()) <= budget_bytes:
            continue
        largest_first = sorted((name for name in sizes if sizes[name]), key=lambda name: -sizes[name])
        knobs = [next((knob for word, knob in KNOBS.items() if word in name), "") for name in largest_first]
        complaints.append(
            f"placement: phase {phase!r} does not fit the device:\n{sum_up(sizes, budget_bytes)}\n"
            f"  set placement.device_memory_gib to at least {gib(sum(sizes.values()))} if the device has it, or: "
            f"{'; '.join(dict.fromkeys(filter(None, knobs)))}"
        )
    if complaints:
        raise ConfigError("\n".join(complaints))


def sum_up(sizes: Mapping[str, int], limit: int) -> str:
    """Return an addition, a line a component, and what it comes to against the limit."""
    total = sum(sizes.values())
    rows = [*sizes.items(), ("sum", total), ("budget", limit), ("too much" if total > limit else "left", abs(limit - total))]
    return "\n".join(f"  {name:<22}{num_bytes / GIB:>12.4f} GiB" for name, num_bytes in rows)


def gib(num_bytes: int) -> str:
    """Return bytes as people read them."""
    return f"{num_bytes / GIB:.4f} GiB"
