"""What this machine has, what a run needs, and which queued runs may start now.

The decision is pure: a run gets all that it needs or nothing, by priority, then in order of submission. No run is started before
an earlier one: while the first run of the queue does not fit, the others wait, however small they are.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from asyncrl.config.generate import gpu_of
from asyncrl.config.places import places_of
from asyncrl.config.run import RunConfig
from asyncrl.control.launch.processes import num_threads, plan_processes
from asyncrl.control.placement.limits import num_cores, total_memory
from asyncrl.control.placement.memory import generator_parts, inference_parts, learner_parts
from asyncrl.models.memory import Part
from asyncrl.models.number_format import ask_driver, hardware_format
from asyncrl.serve.records import Demand, RunRecord

IMPORTED_BYTES = 300 << 20
"""Memory of a process that has imported torch and transformers."""


class Machine(msgspec.Struct, frozen=True):
    """The machine's resources."""

    gpus: tuple[str, ...] = ()
    """By UUID."""
    cores: int = 1
    memory_bytes: int = 0
    is_asked_again: bool = False
    """Whether nvidia-smi is there and gave no answer: it may give one later."""


def machine() -> Machine:
    """Return what this machine has; of its GPUs, those that CUDA_VISIBLE_DEVICES names, if it is set, in its order."""
    rows = [line.split(", ") for line in ask_driver("uuid,index").splitlines()]
    gpus = [row[0] for row in rows]
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        named = [name.strip() or "none" for name in visible.split(",")]
        known = {name: next((row[0] for row in rows if name == row[-1] or row[0].startswith(name)), "") for name in named}
        known |= {name: name for name in named if name.startswith("MIG-")}
        gpus = list(itertools.takewhile(bool, known.values()))  # CUDA stops at the first that it does not know, too
    is_asked_again = not rows and shutil.which("nvidia-smi") is not None
    return Machine(tuple(dict.fromkeys(gpus)), max(1, int(num_cores())), total_memory(), is_asked_again)


def demand_of(config: RunConfig, there: Machine) -> Demand:
    """Return what a run needs: every GPU that one of its processes names, a core for each of its threads, host memory.

    With elastic scaling, the maximum number of generators is counted. More threads than the machine has cores count as all
    cores.

    Raises:
        ConfigError: A model's folder cannot be read.
    """
    if (elastic := config.launch.elastic) is not None:
        config = replace(config, generate=replace(config.generate, num_workers=elastic.max_generators))
    if config.learner.dtype == "auto":
        config = replace(config, learner=replace(config.learner, dtype=hardware_format(config.learner.device)[0]))
    planned = plan_processes(config)
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
    return Demand(num_gpus(config), min(max(threads, 1), there.cores), held_bytes)


def num_gpus(config: RunConfig) -> int:
    """Return how many GPUs a run needs: up to the highest number that one of its processes names."""
    gpus = set(places_of(config).engine_gpus)
    if config.learner.kind == "builtin" and (first := gpu_of(config.learner.device)) is not None:
        gpus |= set(range(first, first + config.learner.ranks))
    if config.needs_inference and (one := gpu_of(config.inference.device)) is not None:
        gpus.add(one)
    return max(gpus) + 1 if gpus else 0


def in_order(runs: Iterable[RunRecord]) -> list[RunRecord]:
    """Return the queued runs in the order in which they start."""
    return sorted((run for run in runs if run.state == "queued"), key=lambda run: (-run.priority, run.number))


def admit(machine: Machine, runs: Iterable[RunRecord]) -> dict[str, tuple[str, ...]]:
    """Return the runs that start now, in order, and the GPUs that each gets.

    Args:
        machine: All resources.
        runs: All runs; starting and live ones hold the resources they got.
    """
    runs = list(runs)
    gpus, cores, memory_bytes = _free(machine, runs)
    granted = dict[str, tuple[str, ...]]()
    for run in in_order(runs):
        if run.demand.gpus > len(gpus) or min(run.demand.cores, machine.cores) > cores or run.demand.memory_bytes > memory_bytes:
            break
        granted[run.id] = tuple(gpus[: run.demand.gpus])
        gpus, cores, memory_bytes = gpus[run.demand.gpus :], cores - run.demand.cores, memory_bytes - run.demand.memory_bytes
    return granted


def waits(machine: Machine, runs: Iterable[RunRecord]) -> list[str]:
    """Return what each queued run waits for, in the order in which they start."""
    runs = list(runs)
    gpus, cores, memory_bytes = _free(machine, runs)
    told = []
    for place, run in enumerate(in_order(runs)):
        sums = (
            ("GPUs", run.demand.gpus, len(gpus)), ("cores", min(run.demand.cores, machine.cores), cores),
            ("GiB", run.demand.memory_bytes / (1 << 30), memory_bytes / (1 << 30)),
        )  # fmt: skip
        short = ", ".join(f"{asked:.3g} {what} ({max(free, 0):.3g} free)" for what, asked, free in sums if asked > free)
        told.append(f"{place} before it" if place else short or "its start")
    return told


def _free(machine: Machine, runs: Sequence[RunRecord]) -> tuple[list[str], int, int]:
    """Return GPUs, cores and bytes that no run holds; negative if runs hold more, as after a move from a larger machine."""
    busy = [run for run in runs if run.state in {"starting", "live"}]
    held = {gpu for run in busy for gpu in run.gpus}
    cores = machine.cores - sum(run.demand.cores for run in busy)
    memory_bytes = machine.memory_bytes - sum(run.demand.memory_bytes for run in busy)
    return [gpu for gpu in machine.gpus if gpu not in held], cores, memory_bytes


def misfits(machine: Machine, demand: Demand) -> list[str]:
    """Return which needs of a run this machine can never meet."""
    faults = []
    if demand.gpus > len(machine.gpus):
        faults.append(f"the run takes {demand.gpus} GPUs and this machine has {len(machine.gpus)}")
    if demand.memory_bytes > machine.memory_bytes:
        gib = 1 << 30
        faults.append(
            f"the run's processes hold {demand.memory_bytes / gib:.1f} GiB and this machine has {machine.memory_bytes / gib:.1f}"
        )
    return faults
