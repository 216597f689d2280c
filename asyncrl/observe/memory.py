"""What lay on a shared device when: one line for each switch of a process to a phase, in `RUN/memory/NAME.jsonl`.

Every process that moves components writes its own file (residency/manager.py, or whoever moves an engine): moves happen within a
phase too, and only the process itself knows when. Read by experiments/memory_timeline.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from asyncrl.observe.steps import JsonLines, read_lines
from asyncrl.schema.control import ComponentMove

MEMORY_FOLDER = "memory"


class MemoryLine(msgspec.Struct, frozen=True):
    """One switch."""

    process: str
    phase: str
    """That begins with it."""
    number: int
    """Of the controller's switch; -1: the process's own, within a phase."""
    started_s: float
    """Clock seconds."""
    finished_s: float
    moves: tuple[ComponentMove, ...] = ()
    """In order, one after the other."""
    resident: dict[str, int] = {}
    """Component to bytes on the device, after the moves."""
    peak_bytes: int = 0
    """Most that was on the device since the line before."""
    ended_phase: str = ""
    """The phase that the peak is of."""


def open_memory(run_folder: Path, process: str) -> JsonLines[MemoryLine]:
    """Open a process's file for appending."""
    folder = run_folder / MEMORY_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return JsonLines(folder / f"{process}.jsonl")


def read_memory(run_folder: Path) -> list[MemoryLine]:
    """Return the lines of all processes, by time."""
    lines = [line for path in (run_folder / MEMORY_FOLDER).glob("*.jsonl") for line in read_lines(path, MemoryLine)]
    return sorted(lines, key=lambda line: line.finished_s)
