"""Plans which components move when a phase begins, and checks whether phases fit: pure, from names, sizes and budgets.

A plan first moves components off the device, least needed first (those that no next phase names, then those named last; among
equals the larger), then brings what the phase needs, in the order of its list. Components that leave go to host memory if
`offload_to` says so and there is room, else to disk. A component moves at most once in a plan, and no move exceeds a budget.

The controller checks phases at start, so there is no torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Literal

from asyncrl.errors import ConfigError, ResidencyError
from asyncrl.schema.control import ComponentMove, Phase, Residence

GIB = 1 << 30
SWAP_FOLDER = "swap"
"""Subfolder of the run folder for components on disk."""
OffloadTo = Literal["host", "disk"]
WORKERS_REFERENCE = "workers' reference"
"""Name of the inference workers' reference in the sum of a phase."""
KNOBS = {
    "optimizer": 'learner.optimizer = "adamw_8bit" (a quarter of it) or learner.offload_optimizer = true (none of it)',
    "policy": 'learner.dtype = "bfloat16", or [learner.lora], which trains adapters only',
    "critic": 'algorithm.critic.kind = "head", which sits on the policy',
    WORKERS_REFERENCE: 'inference workers on a device of their own (inference.device), or inference.dtype = "bfloat16"',
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
"""How to reduce a component, by a word in its name; the first match is used."""


@dataclass(frozen=True, slots=True)
class Part:
    """The fields of a component that the planner needs."""

    name: str
    num_bytes: int
    residence: Residence


@dataclass(frozen=True, slots=True)
class PhaseNeeds:
    """The declared needs of a phase."""

    phase: Phase
    now: tuple[str, ...] = ()
    """Components that must be on the device."""
    soon: tuple[str, ...] = ()
    """Components needed next, soonest first."""
    working_bytes: int = 0
    """Other memory that it will use on the device: gradients, activations of a forward, memory of other processes."""
    gives_back: bool = False
    """Unneeded components always leave the device, because another process or a backward needs the memory."""


def plan_switch(
    parts: Iterable[Part], needs: PhaseNeeds, device_bytes: int | None, host_bytes: int | None, offload_to: OffloadTo
) -> tuple[ComponentMove, ...]:
    """Return the moves after which the phase can begin, in order.

    Args:
        parts: All components of this process.
        needs: Needs of the phase; names that are not in `parts` belong to other processes and are ignored.
        device_bytes: Device memory for all components together; None: no limit.
        host_bytes: The same for host memory.
        offload_to: Where components that leave the device go first.

    Raises:
        ResidencyError: The needs of the phase do not fit; the message shows the sum.
    """
    by_name = {part.name: part for part in parts}
    now = [by_name[name] for name in needs.now if name in by_name]
    sizes = {part.name: part.num_bytes for part in now}
    if needs.working_bytes:
        sizes["working memory"] = needs.working_bytes
    if device_bytes is not None and sum(sizes.values()) > device_bytes:
        raise ResidencyError(f"phase {needs.phase!r} does not fit the device:\n{sum_up(sizes, device_bytes)}")
    held = {place: sum(part.num_bytes for part in by_name.values() if part.residence == place) for place in ("device", "host")}
    wanted = needs.working_bytes + sum(part.num_bytes for part in now if part.residence != "device")
    moves = []
    nearness = {name: -number for number, name in enumerate(needs.soon)}
    leaving = [part for part in by_name.values() if part.residence == "device" and part not in now]
    for part in sorted(leaving, key=lambda part: (nearness.get(part.name, -len(nearness) - 1), -part.num_bytes, part.name)):
        if not needs.gives_back and (device_bytes is None or held["device"] + wanted <= device_bytes):
            break
        has_room = host_bytes is None or held["host"] + part.num_bytes <= host_bytes
        place: Residence = "host" if offload_to == "host" and has_room else "disk"
        moves.append(ComponentMove(part.name, "device", place, part.num_bytes))
        held["device"] -= part.num_bytes
        held["host"] += part.num_bytes if place == "host" else 0
    moves += [ComponentMove(part.name, part.residence, "device", part.num_bytes) for part in now if part.residence != "device"]
    return tuple(moves)


def check_phases(phases: Iterable[tuple[Phase, Mapping[str, int]]], budget_bytes: int) -> None:
    """Refuse phases that cannot fit.

    Args:
        phases: Each phase with the components of all processes on the device, bytes by name.
        budget_bytes: Memory of the device. Host memory is not checked: if it is full, components go to disk.

    Raises:
        ConfigError: A phase needs more than the budget; the message shows each such sum and what to change.
    """
    complaints = []
    for phase, sizes in phases:
        if sum(sizes.values()) <= budget_bytes:
            continue
        largest_first = sorted((name for name in sizes if sizes[name]), key=lambda name: -sizes[name])
        knobs = [next((knob for word, knob in KNOBS.items() if word in name), "") for name in largest_first]
        complaints.append(
            f"placement: phase {phase!r} does not fit the device:\n{sum_up(sizes, budget_bytes)}\n"
            f"  set placement.device_memory_gib to at least {gib(sum(sizes.values()), up=True)} if the device has it, or: "
            f"{'; '.join(dict.fromkeys(filter(None, knobs)))}"
        )
    if complaints:
        raise ConfigError("\n".join(complaints))


def sum_up(sizes: Mapping[str, int], limit: int) -> str:
    """Return the sum as text, one line per component, with the total and the limit."""
    total = sum(sizes.values())
    rows = [*sizes.items(), ("sum", total), ("budget", limit), ("too much" if total > limit else "left", abs(limit - total))]
    return "\n".join(f"  {name:<22}{num_bytes / GIB:>12.4f} GiB" for name, num_bytes in rows)


def gib(num_bytes: int, *, up: bool = False) -> str:
    """Return a number of bytes as text in GiB; `up`: not less than the number."""
    return f"{(ceil(num_bytes * 10_000 / GIB) / 10_000 if up else num_bytes / GIB):.4f} GiB"
