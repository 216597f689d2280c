"""Whether a set of phases fits at all, said before anything is started, with the sums.

Pure. Called by control/phase_room.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from asyncrl.errors import ConfigError
from asyncrl.residency.plan import gib, sum_up
from asyncrl.schema.control import Phase

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


def check_phases(phases: Iterable[tuple[Phase, Mapping[str, int]]], budget_bytes: int) -> None:
    """Refuse phases that cannot fit.

    Args:
        phases: Each with what is on the device in it, of all processes, in bytes by name.
        budget_bytes: Of the device. Host memory is in no sum: what finds it full goes to disk.

    Raises:
        ConfigError: Some phase needs more than there is; the message shows each such sum and what to change.
    """
    complaints = [_complaint(phase, sizes, budget_bytes) for phase, sizes in phases if sum(sizes.values()) > budget_bytes]
    if complaints:
        raise ConfigError("\n".join(complaints))


def _complaint(phase: Phase, sizes: Mapping[str, int], budget_bytes: int) -> str:
    largest_first = sorted((name for name in sizes if sizes[name]), key=lambda name: -sizes[name])
    ways = dict.fromkeys(knob for name in largest_first if (knob := _knob(name)))
    return (
        f"placement: phase {phase!r} does not fit the device:\n{sum_up(sizes, 0, budget_bytes)}\n"
        f"  set placement.device_memory_gib to at least {gib(sum(sizes.values()))} if the device has it, or: {'; '.join(ways)}"
    )


def _knob(name: str) -> str:
    return next((knob for word, knob in KNOBS.items() if word in name), "")
