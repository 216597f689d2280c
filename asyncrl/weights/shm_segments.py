"""Shared-memory segments of a run: where they lie, how they are made and owned. No torch, so that a supervisor can clean up.

A segment, and what lies beside it, is in a folder of its own, which is locked as long as the learner lives (folders.py). A
learner that is killed cannot remove it. The next learner of the run does, and so does whoever ends the run for good:
`remove_leftover_segments(run_folder)`. The folder's name begins with a hash of the run folder's path. Where another run goes by
the same path (a container that shares this memory and not the files), or a learner has not ended yet, it is left alone.

Invariant: the lock is no forked child's, which may live longer than the owner.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from pathlib import Path

from asyncrl.errors import BroadcastError
from asyncrl.folders import OwnedFolder, sweep

SHARED_FOLDER = Path("/dev/shm")  # noqa: S108 - POSIX shared memory, not a temporary file
_OWNED: dict[Path, OwnedFolder] = {}
"""By its path, of each segment that this process made: a lock does not tell its own from another's."""


def folders_of_run(run_folder: Path) -> Path:
    """Return how the paths of a run's folders begin: in this machine's shared memory, named as those of no other run are."""
    parent = SHARED_FOLDER if SHARED_FOLDER.is_dir() else run_folder.resolve() / "weights"
    return parent / f"asyncrl-{path_hash(run_folder)}-"


def path_hash(run_folder: Path) -> str:
    """Return 16 digits that tell run folders apart."""
    return hashlib.blake2b(bytes(run_folder.resolve()), digest_size=8).hexdigest()


def remove_leftover_segments(run_folder: Path) -> list[Path]:
    """Remove what dead learners of this run left behind, and what this process made itself; return the folders.

    Those of another user stay: anybody may make some in shared memory, under any name, and nobody else may remove them.
    """
    ours = folders_of_run(run_folder)
    folders = sorted(ours.parent.glob(f"{ours.name}*"))
    for segment in [segment for segment in _OWNED if segment.parent in folders]:
        remove_segment(segment)
    sweep(ours.name, ours.parent)
    return [folder for folder in folders if not folder.exists()]


def make_segment(run_folder: Path, num_bytes: int) -> tuple[Path, mmap.mmap]:
    """Remove leftovers, then create, reserve and map a file nobody else can open, until `remove_segment` or this process's end.

    Raises:
        BroadcastError: There is no room for it.
    """
    remove_leftover_segments(run_folder)
    ours = folders_of_run(run_folder)
    try:
        ours.parent.mkdir(parents=True, exist_ok=True)
        folder = OwnedFolder(ours.name, ours.parent)
    except OSError as error:
        raise BroadcastError(f"cannot make {ours}* ({error.strerror}); set broadcast.medium.kind to files, or zeromq") from error
    path = folder.path / "segment"
    _OWNED[path] = folder
    try:
        with path.open("w+b") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            else:
                file.truncate(num_bytes)
            return path, mmap.mmap(file.fileno(), num_bytes)
    except OSError as error:
        remove_segment(path)
        room = f"no room for {num_bytes >> 20} MiB of shared memory in {ours.parent} ({error.strerror})"
        instead = "enlarge it (docker run --shm-size) or set broadcast.medium.kind to files"
        raise BroadcastError(f"{room}; {instead}") from error


def remove_segment(segment: Path) -> None:
    """Remove a segment that this process made, with what lies beside it; memory is freed once the last mapping is gone."""
    if (folder := _OWNED.pop(segment, None)) is not None:
        folder.close()


def _forget_what_the_parent_owns() -> None:
    """Close a forked child's duplicates, which would hold the locks beyond the parent's end; the parent keeps its own."""
    while _OWNED:
        with contextlib.suppress(OSError):  # -1 where the file system has no locks
            os.close(_OWNED.popitem()[1]._lock)  # noqa: SLF001 - to remove the folder is the parent's business


os.register_at_fork(after_in_child=_forget_what_the_parent_owns)
