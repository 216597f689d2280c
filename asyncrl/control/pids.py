"""RUN/pids.json: which process of the run has which pid right now; the only thing processes are ever killed by.

Invariant: the file is always whole (written aside, then renamed). Written by control/supervisor.py at every start and exit, read
by tests, by `asyncrl status`, and by whoever must end what a dead controller left.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from asyncrl.schema.control import ProcessKind

PIDS_FILE = "pids.json"


class PidRecord(msgspec.Struct, frozen=True):
    """One live process."""

    name: str
    kind: ProcessKind
    pid: int
    incarnation: int
    started_s: float


class PidTable(msgspec.Struct, frozen=True):
    """All live processes of a run."""

    controller: int
    processes: dict[str, PidRecord] = {}


def write_pids(path: Path, table: PidTable) -> None:
    """Replace the file at once."""
    aside = path.with_suffix(".tmp")
    aside.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=2))
    os.replace(aside, path)


def read_pids(run_folder: Path) -> PidTable:
    """Return the table of a run.

    Raises:
        FileNotFoundError: The run has never started a process.
    """
    return msgspec.json.decode((run_folder / PIDS_FILE).read_bytes(), type=PidTable)
