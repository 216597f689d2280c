"""Cores and memory that this process may use: the machine's, or what a control group (a container, a unit of systemd) leaves.

Reads control groups of version 2; elsewhere the machine's own numbers are returned.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

CONTROL_GROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> frozenset[int]:
    """Return the cores that this process may run on."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def core_quota() -> float:
    """Return how many cores' time this process's control groups may take; infinite without a limit."""
    quotas = [float("inf")]
    for folder in _control_groups():
        quota, period = [*_read(folder / "cpu.max"), "max", "0"][:2]
        if quota.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas)


def num_cores() -> float:
    """Return how many cores' time this process may take."""
    return min(float(len(usable_cores())), core_quota())


def memory_limit() -> int | None:
    """Return the bytes that this process's control groups may hold; None: no limit."""
    return min((limit for limit, _ in _memory_limits()), default=None)


def total_memory() -> int:
    """Return the bytes of memory that there are for this process and those beside it."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _memory_limits())])


def available_memory() -> int:
    """Return the bytes that can still be given. Cached files count as free, as they give way."""
    return min([int(psutil.virtual_memory().available), *(limit - used for limit, used in _memory_limits())])


def _memory_limits() -> list[tuple[int, int]]:
    """Return limit and use, in bytes, of each group of this process that has a limit."""
    found = []
    for folder in _control_groups():
        limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
        if limit and used and limit[0].isdigit():
            words = _read(folder / "memory.stat")
            cached = int(dict(zip(words[::2], words[1::2], strict=False)).get("inactive_file", 0))
            found.append((int(limit[0]), max(int(used[0]) - cached, 0)))
    return found


def _control_groups() -> list[Path]:
    """Return the folders of this process's group and those above it; within a container that is often the root alone."""
    path = next((line[3:] for line in _read(Path("/proc/self/cgroup"), lines=True) if line.startswith("0::/")), "/")
    own = CONTROL_GROUPS / path.lstrip("/")
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(CONTROL_GROUPS)]


def _read(path: Path, *, lines: bool = False) -> list[str]:
    """Return a file's words (or lines); none where it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.splitlines() if lines else text.split()
