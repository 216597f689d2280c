"""Shared-memory segments of a run: where they lie, how they are made and owned. No torch, so that a supervisor can clean up.

A learner that is killed cannot unlink its segment. The next learner of the run does, and so does whoever ends the run for good:
`remove_leftover_segments(run_folder)`. Names begin with a hash of the run folder's path; where another run goes by the same path
(a container that shares this memory and not the files), or a learner has not ended yet, its owner holds a lock on the segment,
and that and what lies beside it are left alone.

Invariants: a segment is locked before it has its name, no name is made twice, and whoever unlinks a segment of others holds
its lock meanwhile. The lock's descriptor is nobody else's: not the mapping's, and not a forked child's, which may live longer
than the owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import secrets
from pathlib import Path

from asyncrl.errors import BroadcastError

SHARED_FOLDER = Path("/dev/shm")  # noqa: S108 - POSIX shared memory, not a temporary file
_LOCKS: dict[Path, int] = {}
"""Segments that this process made, with the descriptor of each one's lock: a lock does not tell its own from another's."""


def segment_path(run_folder: Path, name: str) -> Path:
    """Return the path of a segment: in this machine's shared memory, named as no segment of another run is."""
    folder = SHARED_FOLDER if SHARED_FOLDER.is_dir() else run_folder.resolve() / "weights"
    return folder / f"asyncrl-{path_hash(run_folder)}-{name}"


def path_hash(run_folder: Path) -> str:
    """Return 16 digits that tell run folders apart."""
    return hashlib.blake2b(bytes(run_folder.resolve()), digest_size=8).hexdigest()


def remove_leftover_segments(run_folder: Path) -> list[Path]:
    """Unlink what dead learners of this run left behind, and what this process made itself; return the paths.

    Files of another user stay: anybody may make some in shared memory, under any name, and nobody else may remove them.
    """
    ours = segment_path(run_folder, "")
    files = sorted(ours.parent.glob(f"{ours.name}*"))
    in_use = {path for path in files if "." not in path.name and not _remove_unless_anothers(path)}
    removed = []
    for path in files:
        if path.with_name(path.name.partition(".")[0]) not in in_use:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                removed.append(path)
    return removed


def make_segment(run_folder: Path, num_bytes: int) -> tuple[Path, mmap.mmap]:
    """Create, reserve and map a file nobody else can open; it is this process's until `disown` or its end.

    A process that is killed before the file has its name leaves an empty `.asyncrl-...` file there, which no start removes.

    Raises:
        BroadcastError: There is no room for it.
    """
    path = segment_path(run_folder, secrets.token_hex(4))
    unnamed = path.with_name(f".{path.name}")
    handle = create_private(unnamed)
    try:
        # Not by `lockf`, whose lock is gone once the process closes any handle of the file.
        _LOCKS[path] = lock = os.open(unnamed, os.O_RDWR)
        with contextlib.suppress(OSError):  # Some network file systems have no locks: there nobody is spared.
            fcntl.flock(lock, fcntl.LOCK_EX)
        unnamed.rename(path)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, num_bytes)
        else:
            os.ftruncate(handle, num_bytes)
        return path, mmap.mmap(handle, num_bytes)
    except OSError as error:
        for made in (unnamed, path):
            made.unlink(missing_ok=True)
        disown(path)
        room = f"no room for {num_bytes >> 20} MiB of shared memory in {path.parent} ({error.strerror})"
        instead = "enlarge it (docker run --shm-size) or set broadcast.medium.kind to files"
        raise BroadcastError(f"{room}; {instead}") from error
    finally:
        os.close(handle)


def create_private(path: Path) -> int:
    """Create a file that only this user may open, and return a descriptor.

    Raises:
        BroadcastError: It cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError as error:
        raise BroadcastError(f"cannot make {path} ({error.strerror}); set broadcast.medium.kind to files, or zeromq") from error


def disown(segment: Path) -> None:
    """Let go of the lock of a segment that this process made; safe to repeat."""
    if segment in _LOCKS:
        os.close(_LOCKS.pop(segment))


def _remove_unless_anothers(segment: Path) -> bool:
    """Unlink a segment; return False where another process, alive, owns it, or another user."""
    if segment in _LOCKS:
        segment.unlink(missing_ok=True)
        return True
    try:
        file = segment.open("r+b")
    except FileNotFoundError:
        return True
    except OSError:  # another user's, who may also have made a folder or a pipe of that name
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:
            pass  # a file system without locks
        try:
            segment.unlink(missing_ok=True)
        except PermissionError:
            return False
    return True


def _forget_what_the_parent_owns() -> None:
    """Close a forked child's duplicates, which would hold the locks beyond the parent's end; the parent keeps its own."""
    while _LOCKS:
        os.close(_LOCKS.popitem()[1])


os.register_at_fork(after_in_child=_forget_what_the_parent_owns)
