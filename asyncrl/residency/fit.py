"""Whether a set of phases fits at all, said before anything is started, with the sums.

Pure. Called by the controller's start and by learner/residents.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncrl.errors import ConfigError
from asyncrl.residency.plan import Budget, Part, PhaseNeeds, gib, sum_up

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
    "working memory": "smaller packing.tokens_per_row, or learner.gradient_checkpointing = true",
}
"""What makes a component smaller, by a word of its name; the first that fits is said."""


def check_phases(parts: Iterable[Part], phases: Sequence[PhaseNeeds], budget: Budget) -> None:
    """Refuse phases that cannot fit.

    Args:
        parts: Everything on the shared device, of all processes.
        phases: Every phase of the run.
        budget: Of the device, and of host memory.

    Raises:
        ConfigError: Some phase needs more than there is, on the device, or in host memory for what may be nowhere else; the
            message shows each such sum and what to change.
    """
    known = {part.name: part for part in parts}
    complaints = [said for needs in phases for said in (_device(known, needs, budget), _host(known, needs, budget)) if said]
    if complaints:
        raise ConfigError("\n".join(complaints))


def _device(known: dict[str, Part], needs: PhaseNeeds, budget: Budget) -> str:
    """Return what is wrong with a phase on the device; empty where nothing is."""
    sizes = {name: known[name].num_bytes for name in needs.now if name in known}
    total, limit = sum(sizes.values()) + needs.working_bytes, budget.device_bytes
    if limit is None or total <= limit:
        return ""
    largest = sorted([*sizes.items(), ("working memory", needs.working_bytes)], key=lambda item: -item[1])
    ways = [_knob(name) for name, num_bytes in largest if num_bytes and _knob(name)]
    return (
        f"placement: phase {needs.phase!r} does not fit the device:\n{sum_up(sizes, needs.working_bytes, limit)}\n"
        f"  set placement.device_memory_gib to at least {gib(total)} if the device has it, or: {'; '.join(dict.fromkeys(ways))}"
    )


def _host(known: dict[str, Part], needs: PhaseNeeds, budget: Budget) -> str:
    """Return what is wrong with a phase in host memory: parts that may be off the device only there."""
    limit = budget.host_bytes
    bound = {
        part.name: part.num_bytes
        for part in known.values()
        if needs.gives_back and part.name not in needs.now and not part.places & {"disk", "absent"}
    }
    if limit is None or sum(bound.values()) <= limit:
        return ""
    return (
        f"placement: what phase {needs.phase!r} sends to host memory does not fit there:\n{sum_up(bound, 0, limit)}\n"
        '  set placement.host_memory_gib higher, or placement.offload_to = "disk" for what may go there'
    )


def _knob(name: str) -> str:
    return next((knob for word, knob in KNOBS.items() if word in name), "")
