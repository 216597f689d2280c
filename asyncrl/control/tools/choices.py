"""A run's config as it is on this machine: what `auto` means, and what follows from it, before anything starts (`--dry-run`).

What `auto` means is chosen once, by whoever starts the run, before its config.toml is written. Every process reads the outcome,
so a resumed run computes as it did, on any machine. Memory figures are first-order sums of what must be resident.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from asyncrl.config.algorithm_table import doubts_about_algorithm
from asyncrl.config.generate import TransformersEngineConfig, gpu_of
from asyncrl.config.load import dump_config
from asyncrl.config.places import with_chosen_medium, with_launch_choices
from asyncrl.config.run import RunConfig
from asyncrl.control.launch.processes import plan_processes
from asyncrl.control.placement import limits, memory
from asyncrl.control.tools.inputs import beside, examine
from asyncrl.errors import ConfigError
from asyncrl.models.memory import BYTES, Part, cache_rows, cache_tokens
from asyncrl.models.number_format import hardware_format

MIB = 1 << 20
KV_CACHE_SHARE = 0.25
"""Of a machine's memory, or the learner's GPU, that the KV caches of all generators take at most where `num_slots` is chosen."""


def with_choices(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return the config with every `auto` replaced by what it means here, and a line for each choice."""
    config, said = with_launch_choices(config)
    config, medium = with_chosen_medium(config)
    said += [medium] if medium else []
    learner, engine = config.learner, config.generate.engine
    if learner.dtype == "auto":
        dtype, why = hardware_format(learner.device)
        said.append(f"learner.dtype auto is {dtype}: {why}")
        learner = replace(learner, dtype=dtype)
    if isinstance(engine, TransformersEngineConfig):
        if engine.dtype == "auto":
            dtype, why = hardware_format(engine.device)
            said.append(f"generate.engine.dtype auto is {dtype}: {why}")
            engine = replace(engine, dtype=dtype)
        if engine.num_slots == "auto":
            num_slots, why = _slots(config, engine)
            said.append(f"generate.engine.num_slots auto is {num_slots}: {why}")
            engine = replace(engine, num_slots=num_slots)
    return replace(config, learner=learner, generate=replace(config.generate, engine=engine)), said


def _slots(config: RunConfig, engine: TransformersEngineConfig) -> tuple[int, str]:
    """Return how many slots a generator gets: a step's samples in one wave, as far as memory holds their KV cache.

    Fewer run a step in several waves, whose ends leave slots empty; more would hold samples of later steps, which only grow old.
    """
    num_workers = max(1, config.generate.num_workers)
    wanted = -(-config.samples_per_step // num_workers)
    why = f"{config.samples_per_step} samples a step over {num_workers} generator{'s' * (num_workers > 1)}"
    try:
        shape = memory.policy_shape(config.model)
    except ConfigError:  # said where the model is opened
        return wanted, why
    row_bytes = shape.cached_values * cache_tokens(engine.max_sequence_tokens) * BYTES[engine.dtype]
    memory_bytes = memory.gpu_memory_bytes(config) if gpu_of(engine.device) is not None else limits.total_memory()
    if not memory_bytes:
        return wanted, why
    most_rows = int(KV_CACHE_SHARE * memory_bytes / num_workers / row_bytes)
    most = max((slots for slots in range(1, wanted + 1) if cache_rows(slots) <= most_rows), default=1)
    if most == wanted:
        return wanted, why
    return most, f"{why}, but the KV cache of more would take over {KV_CACHE_SHARE:.0%} of {memory_bytes / (1 << 30):.0f} GiB"


# -- what follows from it -------------------------------------------------------------------------------------------------


def describe(config: RunConfig) -> tuple[str, list[str]]:
    """Return the resolved TOML and the derived quantities as text, and what a run would fail on."""
    config, said = with_choices(config)
    found = examine(config)
    lines, figures = [dump_config(config), "# derived"], found.figures
    try:
        figures |= derived(config)
    except ConfigError as error:
        found.faults += beside(found.faults, error)
    lines += [f"# {name:34} {value}" for name, value in figures.items()]
    lines += [f"# {choice}" for choice in said]
    lines += [f"# WARNING: {doubt}" for doubt in doubts_about_algorithm(config.algorithm, config.generate.sampling)]
    return "\n".join(lines), found.faults


def derived(config: RunConfig) -> dict[str, str]:
    """Return what follows from a config without `auto`, by name, with the formula where there is one.

    Raises:
        ConfigError: A pretrained model's folder has no readable config.json, or another's no readable weights.
    """
    algorithm, engine, shape = config.algorithm, config.generate.engine, memory.policy_shape(config.model)
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
        lines |= {f"{name} on {where}": _shown(parts, config) for name, parts in memory.learner_parts(config).items()}
    if parts := memory.generator_parts(config):
        lines["memory of each generator"] = _sum(parts)
    if parts := memory.inference_parts(config):
        lines["memory of each inference worker"] = _sum(parts, " + activations")
    counts = Counter(item.kind for item in plan_processes(config))
    workers = {"generators": counts["generator"], "reward workers": counts["reward"], "inference workers": counts["inference"]}
    ranks = f" of {config.learner.ranks} ranks" if config.learner.ranks > 1 else ""
    learner = f"{counts['learner']} learner{ranks}" if counts["learner"] else "learner outside"
    processes = ["1 controller", *(f"{count} {name}" for name, count in workers.items() if count), learner]
    lines["bytes of one weight version"] = f"{memory.version_bytes(config) / MIB:,.1f} MiB"
    if limits.shares_device(config):
        memory.check_shares(config)
        if mps := limits.generator_environment(config):
            percentage = mps[limits.MPS_PERCENTAGE]
            lines["time of each generator"] = f"{percentage} % of the GPU's multiprocessors, where MPS runs"
        else:
            share = config.placement.generation_share
            cores = sorted(limits.own_cores(share, limits.usable_cores(), limits.core_quota()))
            lines["cores of all generators"] = f"{cores}  (floor({share:g} x {limits.num_cores():g}))"
    return {**lines, "processes": ", ".join(processes), "weights travel by": config.broadcast.medium.kind}


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
