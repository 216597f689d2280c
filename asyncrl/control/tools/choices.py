"""What `auto` means in a run's config: chosen once, by whoever starts the run, before its config.toml is written.

Every process reads the outcome, so a resumed run computes as it did, on any machine.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec.structs import replace

from asyncrl.config.generate import TransformersEngineConfig, gpu_of
from asyncrl.config.places import with_chosen_medium, with_launch_choices
from asyncrl.config.run import RunConfig
from asyncrl.control.placement.gpu_share import gpu_memory_bytes
from asyncrl.control.placement.limits import total_memory
from asyncrl.control.tools.memory import policy_shape
from asyncrl.errors import ConfigError
from asyncrl.models.memory import BYTES
from asyncrl.models.number_format import hardware_format

Struct = TypeVar("Struct", bound=msgspec.Struct)

KV_CACHE_SHARE = 0.25
"""Of a machine's memory, or the learner's GPU, that the KV caches of all generators take at most where `num_slots` is chosen."""


def with_choices(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return the config with every `auto` replaced by what it means here, and a line for each choice."""
    config, said = with_launch_choices(config)
    config, medium = with_chosen_medium(config)
    learner, engine = config.learner, config.generate.engine
    if medium:
        said.append(medium)
    if learner.dtype == "auto":
        dtype, why = hardware_format(learner.device)
        said.append(f"learner.dtype auto is {dtype}: {why}")
        config = _changed(config, "learner", dtype=dtype)
    if isinstance(engine, TransformersEngineConfig):
        changes: dict[str, object] = {}
        if engine.dtype == "auto":
            changes["dtype"], why = hardware_format(engine.device)
            said.append(f"generate.engine.dtype auto is {changes['dtype']}: {why}")
        chosen = replace(engine, **changes)
        if chosen.num_slots == "auto":
            changes["num_slots"], why = _slots(config, chosen)
            said.append(f"generate.engine.num_slots auto is {changes['num_slots']}: {why}")
        config = replace(config, generate=_changed(config.generate, "engine", **changes))
    return config, said


def _slots(config: RunConfig, engine: TransformersEngineConfig) -> tuple[int, str]:
    """Return how many slots a generator gets: a step's samples in one wave, as far as memory holds their KV cache.

    Fewer run a step in several waves, whose ends leave slots empty; more would hold samples of later steps, which only grow old.
    """
    num_workers = max(1, config.generate.num_workers)
    wanted = -(-config.samples_per_step // num_workers)
    why = f"{config.samples_per_step} samples a step over {num_workers} generator{'s' * (num_workers > 1)}"
    try:
        shape = policy_shape(config.model)
    except ConfigError:  # said where the model is opened
        return wanted, why
    slot_bytes = shape.cached_values * engine.max_sequence_tokens * BYTES[engine.dtype]
    memory_bytes = gpu_memory_bytes(config) if gpu_of(engine.device) is not None else total_memory()
    most = max(1, int(KV_CACHE_SHARE * memory_bytes / num_workers / slot_bytes)) if memory_bytes else wanted
    if most >= wanted:
        return wanted, why
    return most, f"{why}, but the KV cache of more would take over {KV_CACHE_SHARE:.0%} of {memory_bytes / (1 << 30):.0f} GiB"


def _changed(struct: Struct, field: str, **changes: object) -> Struct:
    return replace(struct, **{field: replace(getattr(struct, field), **changes)})
