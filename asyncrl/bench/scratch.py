"""Folders of a broadcast benchmark: gone when it ends, at SIGTERM too, and those of one that was killed when the next one starts.

Weights lie in memory (/dev/shm) that nobody gives back by itself; a folder's name says whose it is. Called by broadcast.py and
engine_pause.py.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from asyncrl.broadcast.segments import SHARED_FOLDER, remove_leftover_segments

_PREFIX = "asyncrl-bench-"
_PR_SET_PDEATHSIG = 1


@contextmanager
def scratch_folder(*, in_memory: bool = False) -> Iterator[Path]:
    """Yield a new folder; in memory, where the system has such a place. Segments of runs in it go with it."""
    base = SHARED_FOLDER if in_memory and SHARED_FOLDER.is_dir() else Path(tempfile.gettempdir())
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base))
    try:
        yield folder
    finally:
        _remove(folder)


def remove_leftovers() -> list[Path]:
    """Remove the folders of benchmarks that no longer run; return them."""
    found = [path for base in (SHARED_FOLDER, Path(tempfile.gettempdir())) for path in base.glob(f"{_PREFIX}*-*")]
    leftovers = [path for path in found if path.is_dir() and not psutil.pid_exists(_owner(path))]
    for path in leftovers:
        _remove(path)
    return leftovers


def end_tidily() -> None:
    """Let SIGTERM unwind this process, and ask for one when the parent dies."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _remove(folder: Path) -> None:
    """Remove a folder, and what runs in it, or it as a run, left in shared memory."""
    for run_folder in (folder, *(path for path in folder.iterdir() if path.is_dir())):
        remove_leftover_segments(run_folder)
    shutil.rmtree(folder, ignore_errors=True)


def _owner(folder: Path) -> int:
    """Return the process that made a folder; this one where the name does not say: such is left alone."""
    number = folder.name.removeprefix(_PREFIX).partition("-")[0]
    return int(number) if number.isdecimal() else os.getpid()
