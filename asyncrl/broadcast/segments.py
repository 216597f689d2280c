"""Where shared-memory segments of a run lie and how they are named; needs no torch, so that a supervisor can clean up.

A learner that is killed cannot unlink its segment. The next learner of the run does, and so does whoever ends the run for good:
`remove_leftover_segments(run_folder)`. Names begin with a hash of the run folder's path; where another run goes by the same path
(a container that shares this memory and not the files), or a learner has not ended yet, its owner holds a lock on the segment,
and that and what lies beside it are left alone.

Called by shared_memory.py and the supervisor.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from pathlib import Path

SHARED_FOLDER = Path("/dev/shm")  # noqa: S108 - POSIX shared memory, not a temporary file
_MINE: set[Path] = set()
"""Segments that this process made: a lock does not tell its own from another's."""


def segment_folder(run_folder: Path) -> Path:
    """Return where this machine keeps shared memory."""
    return SHARED_FOLDER if SHARED_FOLDER.is_dir() else run_folder.resolve() / "weights"


def segment_prefix(run_folder: Path) -> str:
    """Return what the names of all segments of this run, and of no other, begin with."""
    return f"asyncrl-{path_hash(run_folder)}-"


def path_hash(run_folder: Path) -> str:
    """Return 16 digits that tell run folders apart."""
    return hashlib.blake2b(bytes(run_folder.resolve()), digest_size=8).hexdigest()


def remove_leftover_segments(run_folder: Path) -> list[Path]:
    """Unlink what dead learners of this run left behind, and what this process made itself; return the paths."""
    files = sorted(segment_folder(run_folder).glob(f"{segment_prefix(run_folder)}*"))
    in_use = {path for path in files if "." not in path.name and _is_anothers(path)}
    leftovers = [path for path in files if path.with_name(path.name.partition(".")[0]) not in in_use]
    for path in leftovers:
        path.unlink(missing_ok=True)
    return leftovers


def own(handle: int, segment: Path) -> None:
    """Say that the segment is in use for as long as this process lives and has this handle, or a mapping made with it."""
    _MINE.add(segment)
    with contextlib.suppress(OSError):  # Some network file systems have no locks: there nobody is spared.
        # Not `lockf`, whose lock is gone once the process closes any handle of the file. It waits, at most for another
        # process that looks whether somebody owns it.
        fcntl.flock(handle, fcntl.LOCK_EX)


def _is_anothers(segment: Path) -> bool:
    """Return whether another process, alive, owns it."""
    if segment in _MINE:
        return False
    try:
        handle = os.open(segment, os.O_RDWR)
    except FileNotFoundError:
        return False
    except PermissionError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False
