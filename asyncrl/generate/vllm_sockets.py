"""Where vLLM's processes meet: a folder for the unix sockets of one engine, so that none stays behind in /tmp, as by vLLM's rule.

The folder is locked by the process that opened it, and by nobody else: the lock goes with that process, however it ends, and so
tells a folder in use from one that was left. Three may remove it: its owner (`close`), vLLM's workers, which outlive a killed
owner by a moment (vllm_worker.py), and whoever opens the next one here, where both were killed at once.

Invariant: a folder whose owner lives is removed by nobody else. Called by generate/vllm_engine.py; imports no vllm.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from asyncrl.errors import GenerationError

VARIABLE = "VLLM_RPC_BASE_PATH"
_PREFIX = "asyncrl-vllm-"
_LONGEST_SOCKET_PATH = 107
"""Bytes; the kernel's limit."""
_SOCKET_NAME = 37
"""Bytes: a slash and a UUID."""
_FOLDER_NAME = len(_PREFIX) + 9
"""Bytes: a slash, the prefix, and what tempfile adds."""


class SocketFolder:
    """A folder of our own, as long as this process lives and nobody closes it.

    Example:
        >>> folder = SocketFolder(os.environ)
        >>> folder.close()
        >>> folder.path.exists()
        False
    """

    def __init__(self, present: Mapping[str, str]) -> None:
        """Make it, after removing what others left.

        Args:
            present: This process's environment; where it says where vLLM's sockets go, the folder is there.

        Raises:
            GenerationError: It cannot be made.
        """
        parent = _parent(present)
        sweep(parent)
        try:
            self.path, self._lock = _make(parent)
        except OSError as error:
            raise GenerationError(
                f"there is no place for vLLM's sockets in {parent}: {error}; name a folder in {VARIABLE} or TMPDIR"
            ) from error

    def close(self) -> None:
        """Remove it with all that is in it. Safe to repeat."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path) -> None:
    """Remove folders in `parent` whose owners are gone."""
    for path in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # in use, another user's, or gone in this moment
            lock = _locked(path)
            if os.fstat(lock).st_uid == os.geteuid():
                shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _parent(present: Mapping[str, str]) -> Path:
    """Return where to put folders: where sockets in them are within the kernel's limit."""
    usual = tempfile.gettempdir()  # asked first: Python remembers what it is told, and vLLM's processes are told another
    wanted = present.get(VARIABLE) or usual
    is_short = len(os.fsencode(wanted)) + _FOLDER_NAME + _SOCKET_NAME <= _LONGEST_SOCKET_PATH
    return Path(wanted if is_short else "/tmp")  # noqa: S108 - the folder in it has a name of its own and mode 0700


def _make(parent: Path) -> tuple[Path, int]:
    """Make a folder and lock it; once more where another process's sweep came between."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        with suppress(BlockingIOError, FileNotFoundError):
            lock = _locked(path)
            if path.exists():
                return path, lock
            os.close(lock)


def _locked(path: Path) -> int:
    """Return a handle that holds a folder's lock. Raises OSError where another does, or it is no folder."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle
