"""RUN/pids.jsonl: which process of the run has which pid; the only thing processes are ever killed by.

One line a start, one line an end; whoever reads it adds them up. So a start costs the same however many processes there are.
Invariant: what is there is true: a line is appended at once and whole, and one that a crash cut short is not read. A controller
begins the file anew. Read by tests and by whoever must end what a dead controller left.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec
import psutil

from asyncrl.folders import write_whole
from asyncrl.schema.control import ProcessKind

PIDS_FILE = "pids.jsonl"
END_BY_ITSELF_S = 5.0
"""For a process to see that its controller is gone."""


class PidRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One process."""

    name: str
    kind: ProcessKind
    pid: int
    incarnation: int
    started_s: float
    ended_s: float | None = None
    """None while it lives."""


class PidTable(msgspec.Struct, frozen=True):
    """All live processes of a run."""

    controller: int
    processes: dict[str, PidRecord] = {}


def end_left(run_folder: Path) -> None:
    """End what a dead controller left. A process that is stopped (SIGSTOP) or hangs does not see that its parent is gone."""
    left = []
    with contextlib.suppress(OSError, KeyError, msgspec.DecodeError):
        for record in read_pids(run_folder).processes.values():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(record.pid)
                if {record.name, str(run_folder.resolve())} <= set(process.cmdline()):  # and no other program by now
                    left.append(process)
    for process in psutil.wait_procs(left, timeout=END_BY_ITSELF_S)[1]:
        with contextlib.suppress(psutil.Error):
            process.kill()


def begin_pids(run_folder: Path, now: float) -> None:
    """Begin the file anew with this process, the controller."""
    first = msgspec.json.encode(PidRecord("controller", "controller", os.getpid(), 0, now)) + b"\n"
    write_whole(run_folder / PIDS_FILE, first, onto_disk=False)


def note_pid(run_folder: Path, record: PidRecord) -> None:
    """Append a process that started, or ended."""
    with (run_folder / PIDS_FILE).open("ab") as file:
        file.write(msgspec.json.encode(record) + b"\n")


def read_pids(run_folder: Path) -> PidTable:
    """Return the table of a run.

    Raises:
        FileNotFoundError: The run has never started a process.
    """
    records: dict[str, PidRecord] = {}
    *lines, _cut_short = (run_folder / PIDS_FILE).read_bytes().split(b"\n")
    for line in lines:
        record = msgspec.json.decode(line, type=PidRecord)
        if record.ended_s is None:
            records[record.name] = record
        else:
            records.pop(record.name, None)
    return PidTable(controller=records.pop("controller").pid, processes=records)
