"""Temporary folders that go with the process that made them; locks of folders; files that are written whole.

A temporary folder is removed by the process that made it, or, where that was killed, when the next one starts. It is locked until
then. The lock goes with the process, however it ends, and so tells a folder in use from one that was left. Where a file system
has no locks, what was left stays.

Invariant: a folder whose owner lives is removed by nobody else.
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
        """Make it, after removing what others left.

        Args:
            prefix: Its name begins so, and nothing else's in `parent` does.
            parent: Where; by default where temporary files go.

        Raises:
            OSError: It cannot be made.
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
        """Remove it with all that is in it. Safe to repeat."""
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
    """Return whether a process, over NFS on any machine, holds a file's lock; not where there is no file, or are no locks."""
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
    """Open a file that takes the place of `path` at the end of the context; after an error `path` is as it was.

    Args:
        path: Of a file, or of nothing yet.
        private: Nobody else can read it, at any moment.
        onto_disk: Wait for the disk, so that it is whole after a power cut, too.
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
    """Write a file whole or not at all; see `replacing`."""
    with replacing(path, private=private, onto_disk=onto_disk) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
