"""Where vLLM's processes meet: a folder for the unix sockets of one engine, so that none stays behind in /tmp, as by vLLM's rule.

Three may remove it: its owner (`close`), vLLM's workers, which outlive a killed owner by a moment (vllm_worker.py), and whoever
opens the next one here, where no worker did: all were killed at once, or the owner while they started. Such are ended then, since
they would keep the device's memory.

Called by generate/vllm_engine.py; imports no vllm.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from asyncrl import folders
from asyncrl.errors import GenerationError
from asyncrl.folders import OwnedFolder

VARIABLE = "VLLM_RPC_BASE_PATH"
_PREFIX = "asyncrl-vllm-"
_LONGEST_SOCKET_PATH = 107
"""Bytes; the kernel's limit."""
_SOCKET_NAME = 37
"""Bytes: a slash and a UUID."""
_FOLDER_NAME = len(_PREFIX) + 9
"""Bytes: a slash, the prefix, and what tempfile adds."""
_TRACKER = "multiprocessing.resource_tracker"
"""Its process ends with those it works for, and removes the shared memory that they leave."""


def socket_folder(present: Mapping[str, str]) -> OwnedFolder:
    """Make a folder for the sockets of one engine, after removing what others left.

    Args:
        present: This process's environment; where it says where vLLM's sockets go, the folder is there.

    Raises:
        GenerationError: It cannot be made.
    """
    parent = _parent(present)
    try:
        return OwnedFolder(_PREFIX, parent, _end_processes)
    except OSError as error:
        raise GenerationError(
            f"there is no place for vLLM's sockets in {parent}: {error}; name a folder in {VARIABLE} or TMPDIR"
        ) from error


def sweep(parent: Path) -> None:
    """Remove folders in `parent` whose owners are gone, and end what they left running."""
    folders.sweep(_PREFIX, parent, _end_processes)


def _parent(present: Mapping[str, str]) -> Path:
    """Return where to put folders: where sockets in them are within the kernel's limit."""
    usual = tempfile.gettempdir()  # asked first: Python remembers what it is told, and vLLM's processes are told another
    wanted = present.get(VARIABLE) or usual
    is_short = len(os.fsencode(wanted)) + _FOLDER_NAME + _SOCKET_NAME <= _LONGEST_SOCKET_PATH
    return Path(wanted if is_short else "/tmp")  # noqa: S108 - the folder in it has a name of its own and mode 0700


def _end_processes(left: Path) -> None:
    """End the processes of an engine whose owner is gone: they were told its folder."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(VARIABLE) == str(left) and _TRACKER not in " ".join(process.cmdline()):
                process.kill()
