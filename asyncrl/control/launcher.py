"""The launcher contract: how a process of the run comes to be, and how it is ended.

Invariants, for every implementation (tests/unit/control/test_launch_local.py, test_supervisor.py over the fake):
- `start` returns once the process has a pid; it never waits for the process to be useful.
- `wait` returns the exit code once the process, and whatever it started, is gone; any number of callers may wait.
- `terminate` and `kill` act on exactly this process and its descendants, return at once, and are harmless after its end.

Called by control/supervisor.py only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from asyncrl.schema.control import ProcessKind


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Everything a launcher needs to know about one incarnation of a process."""

    name: str
    """Unique within the run and stable over restarts."""
    kind: ProcessKind
    incarnation: int
    """1 at the first start."""
    command: tuple[str, ...]
    log_path: Path
    """Standard output and error are appended here."""
    num_threads: int = 1
    """For OpenMP and MKL; set before the process's Python starts."""
    env: Mapping[str, str] = field(default_factory=dict)
    """On top of the launcher's own environment."""


class ProcessHandle(Protocol):
    """A started process."""

    @property
    def pid(self) -> int:
        """Return its process id (on the machine it runs on)."""
        ...

    async def wait(self) -> int:
        """Return its exit code once it is gone; negative for a signal."""
        ...

    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""
        ...

    def kill(self) -> None:
        """End it and its descendants (SIGKILL)."""
        ...


class Launcher(Protocol):
    """Whoever can start processes."""

    async def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Start one process.

        Raises:
            LaunchError: It could not be started at all (no such program, no memory, no room on any machine).
        """
        ...


def stage_spec(kind: ProcessKind, name: str, run_folder: Path, incarnation: int, num_threads: int = 1) -> ProcessSpec:
    """Return the spec of a stage's process: `python -m asyncrl.pipeline KIND NAME RUN_FOLDER INCARNATION`."""
    command = (sys.executable, "-m", "asyncrl.pipeline", kind, name, str(run_folder), str(incarnation))
    return ProcessSpec(name, kind, incarnation, command, run_folder / "logs" / f"{name}.log", num_threads)
