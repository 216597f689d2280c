"""A run's config as it is on this machine: what `auto` means, and what follows from it, before anything starts (`--dry-run`).

What `auto` means is chosen once, by whoever starts the run, before its config.toml is written. Every process reads the outcome,
so a resumed run computes as it did, on any machine. Memory figures are first-order sums of what must be resident.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from asyncrl.config.algorithm_table import doubts_about_algorithm
from asyncrl.config.generate import TransformersEngineConfig, gpu_of
from asyncrl.config.load import dump_config
from asyncrl.config.places import doubts_about_medium, with_chosen_medium, with_launch_choices
from asyncrl.config.run import RunConfig
from asyncrl.control.launch.processes import plan_processes
from asyncrl.control.placement import gpu_share
from asyncrl.control.placement.limits import core_quota, num_cores, total_memory, usable_cores
from asyncrl.control.tools.inputs import beside, examine
from asyncrl.control.tools.memory import generator_parts, inference_parts, learner_parts, policy_shape, version_bytes
from asyncrl.errors import ConfigError
from asyncrl.models.memory import BYTES, Part
from asyncrl.models.number_format import hardware_format

Struct = TypeVar("Struct", bound=msgspec.Struct)

MIB = 1 << 20
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
    memory_bytes = gpu_share.gpu_memory_bytes(config) if gpu_of(engine.device) is not None else total_memory()
    most = max(1, int(KV_CACHE_SHARE * memory_bytes / num_workers / slot_bytes)) if memory_bytes else wanted
    if most >= wanted:
        return wanted, why
    return most, f"{why}, but the KV cache of more would take over {KV_CACHE_SHARE:.0%} of {memory_bytes / (1 << 30):.0f} GiB"


def _changed(struct: Struct, field: str, **changes: object) -> Struct:
    return replace(struct, **{field: replace(getattr(struct, field), **changes)})


# -- what follows from it -------------------------------------------------------------------------------------------------


def describe(config: RunConfig) -> tuple[str, list[str]]:
    """Return the resolved TOML and the derived quantities as text, and what a run would fail on.

    Raises:
        ConfigError: The task's own code ended the process that builds it.
    """
    config, said = with_choices(config)
    found = examine(config)
    lines, figures = [dump_config(config), "# derived"], found.figures
    try:
        figures |= derived(config)
    except ConfigError as error:
        found.faults += beside(found.faults, error)
    lines += [f"# {name:34} {value}" for name, value in figures.items()]
    lines += [f"# {choice}" for choice in said]
    lines += [f"# WARNING: {doubt}" for doubt in (*doubts_about_medium(config), *doubts_about_algorithm(config.algorithm))]
    return "\n".join(lines), found.faults


def derived(config: RunConfig) -> dict[str, str]:
    """Return what follows from the config, by name, with the formula where there is one.

    Raises:
        ConfigError: A pretrained model's folder has no readable config.json, or another's no readable weights.
    """
    config, _ = with_choices(config)
    algorithm, engine, shape = config.algorithm, config.generate.engine, policy_shape(config.model)
    adapters = shape.adapter_parameters(config.learner.lora)
    lines = {
        "groups per step": f"{algorithm.groups_per_step}",
        "samples per step": f"{config.samples_per_step}  ({algorithm.groups_per_step} groups x {algorithm.members_per_group})",
        "most groups issued and not trained": (
            f"{config.most_groups_ahead}  ((max_staleness {config.buffer.max_staleness} + 1) x {algorithm.groups_per_step})"
        ),
        "most samples in flight": f"{config.most_samples_in_flight}",
        "slots over all generators": f"{config.generate.num_workers * engine.slots}",
        "samples the whole run trains": f"{config.samples_per_step * config.num_steps}",
        "most tokens of one sample": f"{engine.max_sequence_tokens}",
        "parameters": f"{shape.parameters:,}" + (f"  (trained: {adapters:,} of the adapters)" if adapters else ""),
    }
    if config.learner.kind == "builtin":
        where = "the learner" if config.learner.ranks == 1 else "each learner rank"
        lines |= {f"{name} on {where}": _shown(parts, config) for name, parts in learner_parts(config).items()}
    if parts := generator_parts(config):
        lines["memory of each generator"] = _sum(parts)
    if parts := inference_parts(config):
        lines["memory of each inference worker"] = _sum(parts, " + activations")
    counts = Counter(item.kind for item in plan_processes(config))
    workers = {"generators": counts["generator"], "reward workers": counts["reward"], "inference workers": counts["inference"]}
    ranks = f" of {config.learner.ranks} ranks" if config.learner.ranks > 1 else ""
    learner = f"{counts['learner']} learner{ranks}" if counts["learner"] else "learner outside"
    processes = ["1 controller", *(f"{count} {name}" for name, count in workers.items() if count), learner]
    return {
        **lines,
        "bytes of one weight version": f"{version_bytes(config) / MIB:,.1f} MiB",
        **_shares(config),
        "processes": ", ".join(processes),
        "weights travel by": config.broadcast.medium.kind,
    }


def _shares(config: RunConfig) -> dict[str, str]:
    """Return what generation beside training is held to; refuses what a run would refuse."""
    if not gpu_share.shares_device(config):
        return {}
    gpu_share.check_shares(config, usable_cores(), gpu_share.gpu_memory_bytes(config))
    environment = gpu_share.generator_environment(config)
    if environment:
        return {
            "time of each generator": f"{environment[gpu_share.MPS_PERCENTAGE]} % of the GPU's multiprocessors, where MPS runs"
        }
    cores = sorted(gpu_share.own_cores(config.placement.generation_share, usable_cores(), core_quota()))
    return {"cores of all generators": f"{cores}  (floor({config.placement.generation_share:g} x {num_cores():g}))"}


def _shown(parts: Sequence[Part], config: RunConfig) -> str:
    """Return one rank's share of a model, by where it lies."""
    names = {"device": " + activations", "host": " in host memory", "pageable": " in pageable memory"}
    places = [
        _sum(there, text, config.learner.ranks)
        for place, text in names.items()
        if (there := [part for part in parts if part.place == place])
    ]
    return "; ".join(places)


def _sum(parts: Sequence[Part], extra: str = "", ranks: int = 1) -> str:
    """Return how much parts come to, and their names."""
    total = sum(part.num_bytes for part in parts) / ranks
    return f"{total / MIB:,.1f} MiB{extra}  ({', '.join(part.name for part in parts)})"
