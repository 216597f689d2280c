"""Shared-memory segments of a run: their location, how they are made, and who owns them. No torch: a supervisor can clean up.

Each segment, with the files beside it, has its own folder, which is locked as long as the learner runs (folders.py). A killed
learner cannot remove the folder. The next learner of the run removes it, or the process that ends the run:
`remove_leftover_segments(run_folder)`. The folder's name begins with a hash of the run folder's path. A folder whose learner
still runs stays, even if it belongs to another run with the same path (in a container that shares this memory but not the files).

Invariant: a forked child does not keep the lock, because it may run longer than the owner.
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
"""The folder of each segment that this process made, by the segment's path: locks do not show which process holds them."""


def folders_of_run(run_folder: Path) -> Path:
    """Return the prefix of the paths of a run's folders: in this machine's shared memory, with a name unique to the run."""
    parent = SHARED_FOLDER if SHARED_FOLDER.is_dir() else run_folder.resolve() / "weights"
    return parent / f"asyncrl-{path_hash(run_folder)}-"


def path_hash(run_folder: Path) -> str:
    """Return 16 hex digits that identify the run folder."""
    return hashlib.blake2b(bytes(run_folder.resolve()), digest_size=8).hexdigest()


def remove_leftover_segments(run_folder: Path) -> list[Path]:
    """Remove the folders of dead learners of this run and those that this process made; return the removed folders.

    Folders of other users stay: any user may create some in shared memory, under any name, and only that user may remove them.
    """
    ours = folders_of_run(run_folder)
    folders = sorted(ours.parent.glob(f"{ours.name}*"))
    for segment in [segment for segment in _OWNED if segment.parent in folders]:
        remove_segment(segment)
    sweep(ours.name, ours.parent)
    return [folder for folder in folders if not folder.exists()]


def make_segment(run_folder: Path, num_bytes: int) -> tuple[Path, mmap.mmap]:
    """Remove leftovers, then create, reserve and map a file that other users cannot open; it exists until `remove_segment`.

    Raises:
        BroadcastError: The folder cannot be made, or there is not enough shared memory.
    """
    remove_leftover_segments(run_folder)
    ours = folders_of_run(run_folder)
    try:
        ours.parent.mkdir(parents=True, exist_ok=True)
        folder = OwnedFolder(ours.name, ours.parent)
    except OSError as error:
        raise BroadcastError(f"cannot make {ours}* ({error.strerror}); set broadcast.medium.kind to files or zeromq") from error
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
    """Remove a segment of this process and the files beside it; the memory is freed when the last mapping is gone."""
    if (folder := _OWNED.pop(segment, None)) is not None:
        folder.close()


def _forget_what_the_parent_owns() -> None:
    """Close a forked child's copies of the locks, which would stay locked after the parent ends; the parent keeps its own."""
    while _OWNED:
        with contextlib.suppress(OSError):  # -1 if the file system has no locks
            os.close(_OWNED.popitem()[1]._lock)  # noqa: SLF001 - the parent removes the folder


os.register_at_fork(after_in_child=_forget_what_the_parent_owns)
