"""Whether a shared device has room, checked before anything is started, and generation's share of it beside training.

Every phase of a device must fit its budget: sums from the config alone, of weights, state, gradients, activations and logits of a
row, KV cache, reference and reward models with a batch of theirs. What a generator needs for a forward is in no sum.

With `placement.kind = "async_hybrid"` the same sums are divided by shares. What `placement.generation_share` s means for n
generators on one device with a budget of B bytes:

- time, on a CPU: all generators run on the same floor(s x cores) cores, whatever their number and threads; training may use
  every core, and goes first (niceness);
- time, on a GPU: each gets floor(100 s / n) % of the multiprocessors, by MPS; where its daemon does not run, kernels take turns
  and nothing bounds them;
- memory: vLLM's KV cache is s B / n - weights (without a budget it gets s / n of the GPU); the transformers engine's is fixed by
  its slots, and on a GPU torch's allocator is held to s B / n.

Training state with the activations of a row, models of inference workers on the same device, weights and the least KV cache
that works are added up before anything starts, and refused with the sum where they do not fit. Joined generators (join.py) on
the run's own machine keep to the same cores; on machines of their own nothing holds them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from math import ceil, floor, inf

from msgspec.structs import replace

from asyncrl.config.generate import VLLMEngineConfig
from asyncrl.config.places import inference_shares_device, inference_takes_turns, places_of
from asyncrl.config.run import LocalLaunch, RunConfig
from asyncrl.control.placement.limits import core_quota, usable_cores
from asyncrl.control.tools import memory
from asyncrl.errors import ConfigError
from asyncrl.models.memory import BYTES, Part
from asyncrl.models.number_format import ask_driver
from asyncrl.residency.plan import GIB, check_phases
from asyncrl.schema.control import Phase

log = logging.getLogger(__name__)

MPS_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def shares_device(config: RunConfig) -> bool:
    """Return whether generators of this run are bound to a share of the learner's device."""
    return config.placement.kind == "async_hybrid" and isinstance(config.launch, LocalLaunch)


def most_generators(config: RunConfig) -> int:
    """Return how many generators of its own a run has at most."""
    elastic = config.launch.elastic
    return max(elastic.max_generators if elastic is not None else config.generate.num_workers, 1)


def as_joined(config: RunConfig, *, on_same_machine: bool) -> RunConfig:
    """Return the config as a joined generator reads it: on a machine of its own it shares nobody's device."""
    if on_same_machine or not shares_device(config):
        return config
    return replace(config, placement=replace(config.placement, kind="disaggregated"))


# -- time ------------------------------------------------------------------------------------------------------------------


def own_cores(share: float, cores: Collection[int], quota: float = inf) -> frozenset[int]:
    """Return the cores of all generators together: the last floor(share x cores), or of as many as a container's quota gives.

    Raises:
        ConfigError: That is none.
    """
    most = min(len(cores), quota)
    number = floor(share * most + 1e-9)
    if number == 0:
        raise ConfigError(
            f"placement.generation_share {share:g} of {most:g} cores is {share * most:.2f} cores, and generators are "
            f"held to whole ones: set it to at least {1 / most:.2f}" + ("" if most > 1 else ", on a machine of two cores or more")
        )
    return frozenset(sorted(cores)[-number:])


def keep_to_own_cores(config: RunConfig) -> frozenset[int]:
    """Hold this process, a generator, and all it will start to the generators' cores; return them, or nothing where none are set.

    Call it before torch is imported: threads that exist already stay where they are.
    """
    if not shares_device(config) or _on_gpu(config) or not hasattr(os, "sched_setaffinity"):
        return frozenset()
    cores = own_cores(config.placement.generation_share, usable_cores(), core_quota())
    os.sched_setaffinity(0, cores)
    log.info("held to cores %s (placement.generation_share %g)", sorted(cores), config.placement.generation_share)
    return cores


def generator_environment(config: RunConfig) -> dict[str, str]:
    """Return what a generator's process needs in its environment to keep to its share of a GPU's time."""
    if not shares_device(config) or not _on_gpu(config):
        return {}
    return {MPS_PERCENTAGE: str(max(1, floor(100 * config.placement.generation_share / most_generators(config))))}


# -- memory ----------------------------------------------------------------------------------------------------------------


def with_own_memory(config: RunConfig) -> RunConfig:
    """Return the config as a generator beside training reads it: vLLM's memory bounded by the share."""
    engine = config.generate.engine
    if not shares_device(config) or not isinstance(engine, VLLMEngineConfig):
        return config
    share = config.placement.generation_share / most_generators(config)
    budget_bytes = int(config.placement.device_memory_gib * GIB)
    if budget_bytes:
        room_gib = (share * budget_bytes - _weights_bytes(config)) / GIB
        engine = replace(engine, kv_cache_gib=min(engine.kv_cache_gib or room_gib, room_gib))
    elif _on_gpu(config):
        engine = replace(engine, gpu_memory_share=min(engine.gpu_memory_share, share))
    return replace(config, generate=replace(config.generate, engine=engine))


def memory_bounds(config: RunConfig) -> tuple[float, float, int]:
    """Return the shares of the budget that a generator and the learner are held to, and the budget in bytes; 0: the whole GPU."""
    share, budget_bytes = config.placement.generation_share, int(config.placement.device_memory_gib * GIB)
    return (share / most_generators(config), 1 - share, budget_bytes) if shares_device(config) else (1.0, 1.0, 0)


def check_shares(config: RunConfig, cores: Collection[int], gpu_bytes: int = 0) -> None:
    """Refuse shares that cannot be, with the sum.

    Args:
        config: Of the run.
        cores: Those the run may use.
        gpu_bytes: Of the learner's GPU; 0: nobody knows, and without a budget nothing is added up.

    Raises:
        ConfigError: No whole core, or training and the least that generation needs do not fit beside each other.
    """
    if not shares_device(config):
        return
    if not _on_gpu(config):
        own_cores(config.placement.generation_share, cores, core_quota())
    budget_bytes = int(config.placement.device_memory_gib * GIB) or gpu_bytes
    if not budget_bytes:
        return
    share, number, beside = config.placement.generation_share, most_generators(config), _training_parts(config)
    training, generation = sum(beside.values()), number * sum(part.num_bytes for part in least_parts(config))
    parts = ", ".join(f"{part.name} {_gib(part.num_bytes)}" for part in least_parts(config)) or "no model"
    sums = (
        f"  training state                {_gib(training)} of {_gib((1 - share) * budget_bytes)} "
        f"((1 - {share:g}) x {_gib(budget_bytes)}): {', '.join(f'{name} {_gib(size)}' for name, size in beside.items())}\n"
        f"  generation, at least          {_gib(generation)} of {_gib(share * budget_bytes)} ({share:g} x {_gib(budget_bytes)}): "
        f"{number} x ({parts})"
    )
    if training + generation > budget_bytes:
        raise ConfigError(
            f"placement: training and generation do not fit the device beside each other:\n{sums}\n  set "
            f"placement.device_memory_gib to at least {_gib(training + generation)} if the device has it; fewer "
            "generate.num_workers or slots; learner.optimizer = 'adamw_8bit' or offload_optimizer; or "
            "placement.kind = 'colocated', where they take turns"
        )
    least, most = ceil(100 * generation / budget_bytes) / 100, floor(100 * (1 - training / budget_bytes)) / 100
    if not least <= share <= most:
        asked = f"between {least:.2f} and {most:.2f}" if least <= most else f"near {least:.2f}, and the budget a little larger"
        raise ConfigError(f"placement.generation_share {share:g} does not divide the device's memory:\n{sums}\n  set it {asked}")


def check_phase_room(config: RunConfig) -> None:
    """Refuse a device on which some phase has no room: one that phases share, or a learner's own with a budget.

    Without `placement.device_memory_gib` the budget of a shared device is all that the GPU has; on a CPU there is none then, and
    nothing is refused.

    Raises:
        ConfigError: With the sum that is too large, and what makes it smaller.
    """
    placement, is_builtin = config.placement, config.learner.kind == "builtin"
    budget_bytes = int(placement.device_memory_gib * GIB) or (gpu_memory_bytes(config) if placement.takes_turns else 0)
    if not budget_bytes or shares_device(config):
        return
    trained = memory.training_sizes(config) if is_builtin else {}  # outside code has what it has
    stays = {"policy": trained["policy"]} if placement.kind == "hybrid" else {}
    sums: list[tuple[Phase, dict[str, int]]] = [("train", trained)]
    if placement.takes_turns:  # in hybrid the generators' weights are the policy
        held = {
            "KV cache" if part.name.startswith("KV") else "engine weights": part.num_bytes * most_generators(config)
            for part in memory.generator_parts(config)
            if part.name.startswith("KV") or placement.kind != "hybrid"
        }
        sums.insert(0, ("rollout", stays | held))
    if is_builtin and (reference := memory.reference_sizes(config)):
        sums.append(("inference", stays | reference))
    if inference_takes_turns(config):
        named = {
            part.name if part.name == "reference" else f"reward {part.name}": part.num_bytes
            for part in memory.inference_parts(config)
        }
        judges = named | {"activations of a batch": memory.judging_forward_bytes(config)}
        sums.append(("inference", stays | {name: size * config.inference.num_workers for name, size in judges.items()}))
    check_phases(sums, budget_bytes)


def least_parts(config: RunConfig) -> tuple[Part, ...]:
    """Return what one generator cannot do without: weights, and the KV cache of all its slots, with vLLM of one sample."""
    engine, shape = config.generate.engine, memory.policy_shape(config.model)
    if not isinstance(engine, VLLMEngineConfig):
        return memory.generator_parts(config)
    held = BYTES[config.learner.dtype if engine.dtype == "auto" else engine.dtype]
    one = shape.cached_values * engine.max_sequence_tokens * held
    return Part("weights", _weights_bytes(config)), Part("KV cache of one sample", one)


def gpu_memory_bytes(config: RunConfig) -> int:
    """Return the memory of the learner's GPU as its driver says; 0 where there is none, or nobody says."""
    gpu = places_of(config).learner_gpu
    told = "" if gpu is None else ask_driver("memory.total", gpu)
    return int(told) << 20 if told.isdigit() else 0


def _training_parts(config: RunConfig) -> dict[str, int]:
    """Return what is on the device beside generation: the learner with a row, and inference workers that are there too."""
    if config.learner.kind != "builtin":
        return {}
    sizes, reference = memory.training_sizes(config), memory.reference_sizes(config)
    if not config.placement.device_memory_gib:  # with a budget it comes and goes (learner/train_state.py)
        sizes |= {name: size for name, size in reference.items() if name == "reference"}
    elif sum(reference.values()) > sum(sizes.values()):
        sizes = reference
    if inference_shares_device(config):
        judge = sum(part.num_bytes for part in memory.inference_parts(config)) + memory.judging_forward_bytes(config)
        sizes["inference workers"] = judge * config.inference.num_workers
    return sizes


def _weights_bytes(config: RunConfig) -> int:
    return next((part.num_bytes for part in memory.generator_parts(config) if part.name == "weights"), 0)


def _on_gpu(config: RunConfig) -> bool:
    places = places_of(config)
    return bool(places.engine_gpus) if config.generate.engine.receives else places.learner_gpu is not None


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.3f} GiB"
