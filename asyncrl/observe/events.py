"""What happened to a run, one line each, in events.jsonl: phases, deaths, checkpoints, evaluations.

Numbered from 1 without a gap, over resumes too, so that a reader goes on behind the last one it has seen. Readable while it is
written, after a `kill -9`, and from a copy of the folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from asyncrl.observe.steps import JsonLines, read_lines

EVENTS_FILE = "events.jsonl"
EventKind = Literal["phase", "death", "checkpoint", "evaluation", "joined", "left", "set_aside", "alarm"]


class RunEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened."""

    seq: int
    time_s: float
    kind: EventKind
    subject: str = ""
    """The phase, the process, the folder of the checkpoint."""
    text: str = ""
    """Why, in words."""
    version: int = -1
    """Newest policy version then."""


class EventsFile:
    """Appends to events.jsonl."""

    def __init__(self, run_folder: Path) -> None:
        """Go on where the file ends."""
        path = run_folder / EVENTS_FILE
        self._seq = max((event.seq for event in read_lines(path, RunEvent)), default=0)
        self._lines: JsonLines[RunEvent] = JsonLines(path)

    def write(self, now: float, kind: EventKind, subject: str, text: str, version: int) -> None:
        """Append one event."""
        self._seq += 1
        self._lines.write(RunEvent(seq=self._seq, time_s=now, kind=kind, subject=subject, text=text, version=version))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_events(run_folder: Path, after: int = 0) -> Iterator[RunEvent]:
    """Yield the events of a run behind number `after`."""
    return (event for event in read_lines(run_folder / EVENTS_FILE, RunEvent) if event.seq > after)
