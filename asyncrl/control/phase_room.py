"""Whether every phase of a shared device fits its budget, said before anything is started: sums from the config alone.

First-order (control/memory_estimate.py): weights, state, gradients, activations and logits of a row, KV cache, reference and
reward models with a batch of theirs; what a generator needs for a forward is in no sum. The learner looks again at what it
really holds (learner/residents.py). Called by client.py and preview.py.
"""

from __future__ import annotations

from asyncrl.config.placement_rules import judges_take_turns
from asyncrl.config.run import RunConfig
from asyncrl.control.device_share import gpu_memory_bytes
from asyncrl.control.memory_estimate import (
    generator_parts,
    inference_parts,
    judging_forward_bytes,
    learner_parts,
    reference_forward_bytes,
    training_row_parts,
)
from asyncrl.residency.fit import check_phases
from asyncrl.residency.plan import GIB, Budget, Part, PhaseNeeds
from asyncrl.schema.control import Phase

Sizes = dict[str, int]


def check_phase_room(config: RunConfig) -> None:
    """Refuse a shared device on which some phase has no room.

    Without `placement.device_memory_gib` the budget is all that the GPU has; on a CPU there is none then, and nothing is refused.

    Raises:
        ConfigError: With the sum that is too large, and what makes it smaller.
    """
    if not config.placement.takes_turns:
        return
    budget_bytes = int(config.placement.device_memory_gib * GIB) or gpu_memory_bytes(config)
    if not budget_bytes:
        return
    trained, reference = _learner(config)
    stays = {"policy": trained["policy"]} if config.placement.kind == "hybrid" else {}
    sums: list[tuple[Phase, Sizes]] = [("rollout", stays | _generators(config)), ("train", trained)]
    if reference:
        sums.append(("inference", stays | reference))
    if judges_take_turns(config):
        sums.append(("inference", stays | _judges(config)))
    parts = {name: Part(name, size) for _, sizes in sums for name, size in sizes.items()}
    check_phases(parts.values(), [PhaseNeeds(phase, now=tuple(sizes)) for phase, sizes in sums], Budget(budget_bytes))


def _learner(config: RunConfig) -> tuple[Sizes, Sizes]:
    """Return what the learner has on the device in `train`, and while it reads a reference of its own."""
    trained: Sizes = {}
    reference: Sizes = {}
    gradients = 0
    for model, pieces in learner_parts(config).items():
        on_device = {piece.name: piece.num_bytes for piece in pieces if piece.place == "device"}
        weights = _sum_of(on_device, "weights")
        if model == "reference":
            reference = {model: weights, "activations of a forward": reference_forward_bytes(config)} if weights else {}
            continue
        gradients += _sum_of(on_device, "gradients")
        trained |= {model: weights, f"{model} optimizer": _sum_of(on_device, "masters") + _sum_of(on_device, "moments")}
    return {**trained, "gradients": gradients, **training_row_parts(config)}, reference


def _generators(config: RunConfig) -> Sizes:
    """Return what all generators hold; in hybrid their weights are the policy."""
    sizes = {"KV cache" if part.name.startswith("KV") else "engine weights": part.num_bytes for part in generator_parts(config)}
    if config.placement.kind == "hybrid":
        sizes.pop("engine weights", None)
    return {name: size * config.generate.num_workers for name, size in sizes.items()}


def _judges(config: RunConfig) -> Sizes:
    """Return what all inference workers hold, and what a batch of each takes."""
    named = {part.name if part.name == "reference" else f"reward {part.name}": part.num_bytes for part in inference_parts(config)}
    sizes = named | {"activations of a batch": judging_forward_bytes(config)}
    return {name: size * config.inference.num_workers for name, size in sizes.items()}


def _sum_of(sizes: Sizes, word: str) -> int:
    return sum(size for name, size in sizes.items() if word in name)
