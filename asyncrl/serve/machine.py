"""What this machine has, and what a run takes of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

from asyncrl.config.generate import gpu_of
from asyncrl.config.places import places_of
from asyncrl.config.run import RunConfig
from asyncrl.control.launch.processes import num_threads, plan_processes
from asyncrl.control.placement.gpu_share import usable_cores
from asyncrl.control.tools.memory import generator_parts, inference_parts, learner_parts
from asyncrl.models.memory import Part
from asyncrl.models.number_format import ask_driver
from asyncrl.serve.queue import Machine
from asyncrl.serve.records import Demand

LEAST_FREE_BYTES = 256 << 20
"""A disk with less room than this takes no new run."""
IMPORTED_BYTES = 300 << 20
"""Of a process that has imported torch and transformers."""


def machine() -> Machine:
    """Return what this machine has."""
    return Machine(tuple(ask_driver("uuid").split()), len(usable_cores()), psutil.virtual_memory().total)


def disk_fault(folder: Path) -> str:
    """Return what is wrong with the disk of a folder; empty: nothing."""
    free_bytes = shutil.disk_usage(folder).free
    return f"the disk of {folder} has {free_bytes >> 20} MiB free: make room" if free_bytes < LEAST_FREE_BYTES else ""


def demand_of(config: RunConfig, there: Machine) -> Demand:
    """Return what a run takes: every GPU that one of its processes names, a core for each of its threads, host memory.

    More threads than the machine has cores count as all of its cores.

    Raises:
        ConfigError: A model's folder cannot be read.
    """
    planned, gpus = plan_processes(config), set(places_of(config).engine_gpus)
    if config.learner.kind == "builtin" and (first := gpu_of(config.learner.device)) is not None:
        gpus |= set(range(first, first + config.learner.ranks))
    if config.needs_inference and (one := gpu_of(config.inference.device)) is not None:
        gpus.add(one)
    threads = sum(num_threads(config, item.kind) * (config.learner.ranks if item.kind == "learner" else 1)
                  for item in planned if item.kind != "reward")  # fmt: skip
    held: list[Part] = []
    if gpu_of(config.learner.device) is None and config.learner.kind == "builtin":
        held += [part for parts in learner_parts(config).values() for part in parts]
    if not places_of(config).engine_gpus:
        held += generator_parts(config) * config.generate.num_workers
    if gpu_of(config.inference.device) is None and config.needs_inference:
        held += inference_parts(config) * config.inference.num_workers
    held_bytes = IMPORTED_BYTES * len(planned) + sum(part.num_bytes for part in held)
    return Demand(max(gpus) + 1 if gpus else 0, min(max(threads, 1), there.cores), held_bytes)
