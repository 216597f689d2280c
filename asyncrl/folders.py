"""Temporary folders that end with their process; locks of folders; files that are written completely or not at all.

A temporary folder is removed by the process that made it, or, if that was killed, when the next such process starts. It is locked
until then. The lock ends with the process, however it ends, so it distinguishes a folder in use from a leftover. On a file system
without locks, leftovers stay.

Invariant: a folder whose owner is alive is removed by no other process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


class OwnedFolder:
    """A folder that only this user can enter, as long as this process lives and nobody closes it.

    Example:
        >>> with OwnedFolder("asyncrl-example-") as folder:
        ...     _ = (folder.path / "key").write_text("secret")
        >>> folder.path.exists()
        False
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        """Make the folder, after removing leftovers of other processes.

        Args:
            prefix: Start of its name; no other kind of folder in `parent` may start like this.
            parent: The folder to make it in; by default that of temporary files.

        Raises:
            OSError: The folder cannot be made.
        """
        parent = parent or Path(tempfile.gettempdir())
        sweep(prefix, parent)
        self._lock = -1
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            try:
                lock = lock_folder(self.path)
            except (BlockingIOError, FileNotFoundError):
                continue  # another process's sweep came between
            except OSError:
                break  # a file system without locks
            if self.path.exists():
                self._lock = lock
                break
            os.close(lock)

    def close(self) -> None:
        """Remove the folder with its contents. Safe to repeat."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> OwnedFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def sweep(prefix: str, parent: Path) -> None:
    """Remove folders in `parent` whose names begin with `prefix` and whose owners are gone."""
    for path in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # in use, another user's, or gone in this moment
            lock = lock_folder(path)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def lock_folder(path: Path) -> int:
    """Return a handle that holds a folder's lock until it is closed.

    Raises:
        BlockingIOError: Another process holds it.
        OSError: It is no folder, or its file system has no locks.
    """
    return _lock(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def is_locked(path: Path) -> bool:
    """Return whether a process holds a file's lock (with NFS, on any machine); False if there is no file, or no locks."""
    try:
        os.close(_lock(path, os.O_RDWR))
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def _lock(path: Path, flags: int) -> int:
    handle = os.open(path, flags)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


@contextmanager
def replacing(path: Path, *, private: bool = False, onto_disk: bool = False) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` at the end of the context; after an error `path` is unchanged.

    Args:
        path: The file to write; it may exist.
        private: No other user can read it, at any moment.
        onto_disk: Wait for the disk, so that the file is complete also after a power cut.
    """
    aside = path.with_name(f"{path.name}.partial")
    try:
        aside.unlink(missing_ok=True)  # it would keep its mode
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o666), "wb") as file:
            yield file
            if onto_disk:
                file.flush()
                os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: str | bytes, *, private: bool = False, onto_disk: bool = True) -> None:
    """Write a file completely or not at all; see `replacing`."""
    with replacing(path, private=private, onto_disk=onto_disk) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
