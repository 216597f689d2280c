"""Whether every phase of a device fits its budget, checked before anything is started: sums from the config alone.

First-order: weights, state, gradients, activations and logits of a row, KV cache, reference and reward models with a batch of
theirs. What a generator needs for a forward is in no sum. Where generation goes on beside training, gpu_share.py divides the same
sums by shares.
"""

from __future__ import annotations

from asyncrl.config.placement_rules import inference_takes_turns
from asyncrl.config.run import RunConfig
from asyncrl.control.placement.gpu_share import gpu_memory_bytes, most_generators, shares_device
from asyncrl.control.tools.memory import (
    generator_parts,
    inference_parts,
    judging_forward_bytes,
    reference_sizes,
    training_sizes,
)
from asyncrl.residency.plan import GIB, check_phases
from asyncrl.schema.control import Phase

Sizes = dict[str, int]


def check_phase_room(config: RunConfig) -> None:
    """Refuse a device on which some phase has no room: one that phases share, or a learner's own with a budget.

    Without `placement.device_memory_gib` the budget of a shared device is all that the GPU has; on a CPU there is none then, and
    nothing is refused.

    Raises:
        ConfigError: With the sum that is too large, and what makes it smaller.
    """
    placement = config.placement
    budget_bytes = int(placement.device_memory_gib * GIB) or (gpu_memory_bytes(config) if placement.takes_turns else 0)
    if not budget_bytes or shares_device(config):
        return
    trained, reference = _learner(config)
    stays = {"policy": trained["policy"]} if placement.kind == "hybrid" else {}
    sums: list[tuple[Phase, Sizes]] = [("train", trained)]
    if placement.takes_turns:
        sums.insert(0, ("rollout", stays | _generators(config)))
    if reference:
        sums.append(("inference", stays | reference))
    if inference_takes_turns(config):
        sums.append(("inference", stays | _judges(config)))
    check_phases(sums, budget_bytes)


def _learner(config: RunConfig) -> tuple[Sizes, Sizes]:
    """Return what the learner has on the device in `train`, and while it reads a reference; outside code has what it has."""
    return (training_sizes(config), reference_sizes(config)) if config.learner.kind == "builtin" else ({}, {})


def _generators(config: RunConfig) -> Sizes:
    """Return what as many generators as there may be hold; in hybrid their weights are the policy."""
    sizes = {"KV cache" if part.name.startswith("KV") else "engine weights": part.num_bytes for part in generator_parts(config)}
    if config.placement.kind == "hybrid":
        sizes.pop("engine weights", None)
    return {name: size * most_generators(config) for name, size in sizes.items()}


def _judges(config: RunConfig) -> Sizes:
    """Return what all inference workers hold, and what a batch of each takes."""
    named = {part.name if part.name == "reference" else f"reward {part.name}": part.num_bytes for part in inference_parts(config)}
    sizes = named | {"activations of a batch": judging_forward_bytes(config)}
    return {name: size * config.inference.num_workers for name, size in sizes.items()}
