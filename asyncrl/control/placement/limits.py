"""Cores and memory that a process may use: of the machine, within its control group, and generation's share beside training.

Reads control groups of version 2 (a container, a unit of systemd); elsewhere the machine's own numbers are returned.

The effect of `placement.generation_share` s (`placement.kind = "async_hybrid"`) on the compute time of n generators on a device:

- on a CPU all generators run on the same floor(s x cores) cores, whatever their number and threads; training may use every core,
  and goes first (niceness);
- on a GPU each gets floor(100 s / n) % of the multiprocessors, by MPS; if the MPS daemon does not run, kernels take turns
  without a limit.

Its meaning for memory is in memory.py. Joined generators (join.py) on the run's own machine use the same cores; on other
machines they have no limit.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from math import floor, inf
from pathlib import Path

import psutil
from msgspec.structs import replace

from asyncrl.config.places import places_of
from asyncrl.config.run import LocalLaunch, RunConfig
from asyncrl.errors import ConfigError

log = logging.getLogger(__name__)

MPS_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
CONTROL_GROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> frozenset[int]:
    """Return the cores that this process may run on."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def core_quota() -> float:
    """Return the CPU quota, in cores, of this process's control groups; infinite without a limit."""
    quotas = [float("inf")]
    for folder in _control_groups():
        quota, period = [*_read(folder / "cpu.max"), "max", "0"][:2]
        if quota.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas)


def num_cores() -> float:
    """Return how many cores this process may use, with its CPU quota."""
    return min(float(len(usable_cores())), core_quota())


def total_memory() -> int:
    """Return the bytes of memory of this process's machine or control group."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _memory_limits())])


def available_memory() -> int:
    """Return the bytes of memory that are still available. Cached files count as free, since the kernel drops them."""
    return min([int(psutil.virtual_memory().available), *(limit - used for limit, used in _memory_limits())])


def _memory_limits() -> list[tuple[int, int]]:
    """Return the limit and the use, in bytes, of each control group of this process that has a limit."""
    found = []
    for folder in _control_groups():
        limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
        if limit and used and limit[0].isdigit():
            words = _read(folder / "memory.stat")
            cached = int(dict(zip(words[::2], words[1::2], strict=False)).get("inactive_file", 0))
            found.append((int(limit[0]), max(int(used[0]) - cached, 0)))
    return found


def _control_groups() -> list[Path]:
    """Return the folders of this process's control group and its parents; in a container often only the root."""
    path = next((word[3:] for word in _read(Path("/proc/self/cgroup")) if word.startswith("0::/")), "/")
    own = CONTROL_GROUPS / path.lstrip("/")
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(CONTROL_GROUPS)]


def _read(path: Path) -> list[str]:
    """Return a file's words; none if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return []


# -- generation's share ------------------------------------------------------------------------------------------------


def shares_device(config: RunConfig) -> bool:
    """Return whether generators of this run are limited to a share of the learner's device."""
    return config.placement.kind == "async_hybrid" and isinstance(config.launch, LocalLaunch)


def most_generators(config: RunConfig) -> int:
    """Return the maximum number of a run's own generators."""
    elastic = config.launch.elastic
    return max(elastic.max_generators if elastic is not None else config.generate.num_workers, 1)


def as_joined(config: RunConfig, *, on_same_machine: bool) -> RunConfig:
    """Return the config for a joined generator: on another machine it does not share a device."""
    if on_same_machine or not shares_device(config):
        return config
    return replace(config, placement=replace(config.placement, kind="disaggregated"))


def own_cores(share: float, cores: Collection[int], quota: float = inf) -> frozenset[int]:
    """Return the cores of all generators together: the last floor(share x n), with n the cores or a container's quota.

    Raises:
        ConfigError: The result is no core.
    """
    most = min(len(cores), quota)
    number = floor(share * most + 1e-9)
    if number == 0:
        raise ConfigError(
            f"placement.generation_share {share:g} of {most:g} cores is {share * most:.2f} cores, but generators "
            f"need whole cores: set it to at least {1 / most:.2f}" + ("" if most > 1 else ", on a machine of two cores or more")
        )
    return frozenset(sorted(cores)[-number:])


def keep_to_own_cores(config: RunConfig) -> None:
    """Restrict this generator process, and all processes it will start, to the generators' cores, if its run limits them.

    Call it before torch is imported: existing threads keep their cores.
    """
    if not shares_device(config) or on_gpu(config) or not hasattr(os, "sched_setaffinity"):
        return
    cores = own_cores(config.placement.generation_share, usable_cores(), core_quota())
    os.sched_setaffinity(0, cores)
    log.info("restricted to cores %s (placement.generation_share %g)", sorted(cores), config.placement.generation_share)


def generator_environment(config: RunConfig) -> dict[str, str]:
    """Return the environment variables that limit a generator's process to its share of a GPU's time."""
    if not shares_device(config) or not on_gpu(config):
        return {}
    return {MPS_PERCENTAGE: str(max(1, floor(100 * config.placement.generation_share / most_generators(config))))}


def on_gpu(config: RunConfig) -> bool:
    """Return whether this run's generators compute on a GPU."""
    places = places_of(config)
    return bool(places.engine_gpus) if config.generate.engine.receives else places.learner_gpu is not None
