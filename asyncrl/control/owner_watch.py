"""How a controller learns that its run shall end: whoever started it holds its standard input open, and may send SIGTERM.

Called by pipeline.py and by other hosts of a controller (bench/controller_host.py).
"""

from __future__ import annotations

import asyncio
import signal
import sys

from asyncrl.control.parent_watch import watch_parent


async def watch_owner(*, dies_with_it: bool = False) -> asyncio.Event:
    """Return what is set once whoever started this controller is gone (standard input ends) or asks it to end (SIGTERM).

    Args:
        dies_with_it: End at once where standard input ends: an actor's child, whose owner will start another controller.
    """
    owner_gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, owner_gone.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    if dies_with_it:
        watch_parent()
    else:
        await loop.connect_read_pipe(lambda: _EndOfInput(owner_gone), sys.stdin)
    return owner_gone


class _EndOfInput(asyncio.Protocol):
    """Sets an event when standard input ends."""

    def __init__(self, ended: asyncio.Event) -> None:
        self._ended = ended

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._ended.set()
