"""Whether every phase of a shared device fits its budget, said before anything is started: sums from the config alone.

First-order (control/memory_estimate.py): weights, gradients, optimizer state, KV cache; no activations. The learner checks again
with what it really holds (learner/residents.py), and a GPU's own size is known there only. Called by client.py and preview.py.
"""

from __future__ import annotations

from asyncrl.config.run import RunConfig
from asyncrl.control.memory_estimate import generator_parts, learner_parts
from asyncrl.residency.fit import check_phases
from asyncrl.residency.plan import GIB, Budget, Part, PhaseNeeds

TRAINED = ("policy", "critic")


def check_phase_room(config: RunConfig) -> None:
    """Refuse a shared device on which some phase has no room; without `placement.device_memory_gib` nothing is known here.

    Raises:
        ConfigError: With the sum that is too large, and what makes it smaller.
    """
    placement = config.placement
    if not placement.takes_turns or not placement.device_memory_gib:
        return
    parts, gradients = _learner(config)
    parts += _generators(config)
    names = [part.name for part in parts]
    shared = ("policy",) if placement.kind == "hybrid" else ()
    engine = tuple(name for name in names if name.startswith(("engine", "KV")))
    trained = tuple(name for name in names if name.startswith(TRAINED))
    phases = [PhaseNeeds("rollout", now=(*shared, *engine)), PhaseNeeds("train", now=trained, working_bytes=gradients)]
    if "reference" in names:
        phases.append(PhaseNeeds("inference", now=(*shared, "reference")))
    check_phases(parts, phases, Budget(int(placement.device_memory_gib * GIB)))


def _learner(config: RunConfig) -> tuple[list[Part], int]:
    """Return the learner's components on the device, and its gradients."""
    parts: list[Part] = []
    gradients = 0
    for model, pieces in learner_parts(config).items():
        on_device = {piece.name: piece.num_bytes for piece in pieces if piece.place == "device"}
        weights = _sum_of(on_device, "weights")
        gradients += _sum_of(on_device, "gradients")
        state = _sum_of(on_device, "masters") + _sum_of(on_device, "moments")
        parts += [Part(name, size) for name, size in ((model, weights), (f"{model} optimizer", state)) if size]
    return parts, gradients


def _generators(config: RunConfig) -> list[Part]:
    """Return what all generators hold; in hybrid their weights are the policy."""
    sizes = {"KV cache" if part.name.startswith("KV") else "engine weights": part.num_bytes for part in generator_parts(config)}
    if config.placement.kind == "hybrid":
        sizes.pop("engine weights", None)
    return [Part(name, size * config.generate.num_workers) for name, size in sizes.items()]


def _sum_of(sizes: dict[str, int], word: str) -> int:
    return sum(size for name, size in sizes.items() if word in name)
