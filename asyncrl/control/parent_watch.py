"""What a child process does so that it never outlives the run: it watches its standard input, which its parent holds open.

The kernel closes that pipe however the parent ends, `kill -9` included; end of file therefore means that nobody needs this
process any more. Called first thing by the entry point of every stage's process (pipeline.py), never by the controller itself.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

PARENT_GONE_EXIT_CODE = 113


def watch_parent(on_gone: Callable[[], object] | None = None, input_fd: int = 0) -> threading.Thread:
    """Start a daemon thread that ends this process, and its process group if it leads one, at the end of `input_fd`.

    Args:
        on_gone: Called first, on that thread; for what must be removed from the machine (shared memory). Keep it short.
        input_fd: File descriptor of the pipe; standard input.

    Returns:
        The thread, already running.
    """
    thread = threading.Thread(target=_watch, args=(on_gone, input_fd), name="parent-watch", daemon=True)
    thread.start()
    return thread


def ignore_interrupts() -> None:
    """Leave Ctrl-C to the controller: a terminal sends it to everyone in the foreground group."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _watch(on_gone: Callable[[], object] | None, input_fd: int) -> None:
    while _read(input_fd):
        pass
    try:
        if on_gone is not None:
            on_gone()
    finally:
        if os.getpgid(0) == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(PARENT_GONE_EXIT_CODE)


def _read(input_fd: int) -> bytes:
    try:
        return os.read(input_fd, 4096)
    except OSError:
        return b""
