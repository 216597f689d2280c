"""Where shared-memory segments of a run lie and how they are named; needs no torch, so that a supervisor can clean up.

A learner that is killed cannot unlink its segment. The next learner of the run does, and so does whoever ends the run for good:
`remove_leftover_segments(run_folder)`. Names begin with a hash of the run folder, so no other run is touched.

Called by shared_memory.py and the supervisor.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

SHARED_FOLDER = Path("/dev/shm")  # noqa: S108 - POSIX shared memory, not a temporary file


def segment_folder(run_folder: Path) -> Path:
    """Return where this machine keeps shared memory."""
    return SHARED_FOLDER if SHARED_FOLDER.is_dir() else run_folder.resolve() / "weights"


def segment_prefix(run_folder: Path) -> str:
    """Return what the names of all segments of this run, and of no other, begin with."""
    return f"asyncrl-{hashlib.blake2b(bytes(run_folder.resolve()), digest_size=8).hexdigest()}-"


def remove_leftover_segments(run_folder: Path) -> list[Path]:
    """Unlink what killed learners of this run left behind; return the paths."""
    leftovers = sorted(segment_folder(run_folder).glob(f"{segment_prefix(run_folder)}*"))
    for path in leftovers:
        path.unlink(missing_ok=True)
    note_path(run_folder).unlink(missing_ok=True)
    return leftovers


def note_path(run_folder: Path) -> Path:
    """Return the file that says which segment the run uses; its folder exists."""
    folder = run_folder / "weights"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "shared_memory.json"
