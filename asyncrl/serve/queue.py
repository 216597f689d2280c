"""Which queued runs may start now, decided purely: all that a run needs or nothing, by priority, then first come first served.

Nobody overtakes: while the run at the head of the queue does not fit, those behind it wait, however small they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from asyncrl.serve.records import Demand, RunRecord


class Machine(msgspec.Struct, frozen=True):
    """What there is to give."""

    gpus: tuple[str, ...] = ()
    """By UUID."""
    cores: int = 1
    memory_bytes: int = 0


class Granted(msgspec.Struct, frozen=True):
    """What a run is given."""

    run: str
    gpus: tuple[str, ...]


def in_order(runs: Iterable[RunRecord]) -> list[RunRecord]:
    """Return the queued runs in the order in which they start."""
    return sorted((run for run in runs if run.state == "queued"), key=lambda run: (-run.priority, run.number))


def admit(machine: Machine, runs: Iterable[RunRecord]) -> list[Granted]:
    """Return the runs that start now, and the GPUs each is given.

    Args:
        machine: All there is.
        runs: All runs; those that are starting or live hold what they were given.
    """
    runs = list(runs)
    gpus, cores, memory_bytes = _free(machine, runs)
    granted = []
    for run in in_order(runs):
        if run.demand.gpus > len(gpus) or min(run.demand.cores, machine.cores) > cores or run.demand.memory_bytes > memory_bytes:
            break
        granted.append(Granted(run.id, tuple(gpus[: run.demand.gpus])))
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
    """Return GPUs, cores and bytes that no run holds; fewer than none where a larger machine gave them."""
    busy = [run for run in runs if run.state in {"starting", "live"}]
    held = {gpu for run in busy for gpu in run.gpus}
    cores = machine.cores - sum(run.demand.cores for run in busy)
    memory_bytes = machine.memory_bytes - sum(run.demand.memory_bytes for run in busy)
    return [gpu for gpu in machine.gpus if gpu not in held], cores, memory_bytes


def misfits(machine: Machine, demand: Demand) -> list[str]:
    """Return which sums of a run can never be met here."""
    faults = []
    if demand.gpus > len(machine.gpus):
        faults.append(f"the run takes {demand.gpus} GPUs and this machine has {len(machine.gpus)}")
    if demand.memory_bytes > machine.memory_bytes:
        gib = 1 << 30
        faults.append(
            f"the run's processes hold {demand.memory_bytes / gib:.1f} GiB and this machine has {machine.memory_bytes / gib:.1f}"
        )
    return faults
