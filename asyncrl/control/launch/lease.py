"""Who owns a run: the process that started it, or, of a detached run, whoever is connected to RUN/owner.sock.

An attached run ends with the process that started it, whose end of the controller's standard input the kernel closes. A detached
one has no such process. Whoever holds a connection to its socket (mode 0600) holds the run: `asyncrl attach`, `asyncrl serve`, a
program. `owner.absent` says what becomes of it once nobody has held it for `owner.grace_s`.

Invariant: the socket's file is there exactly as long as the controller of a detached run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from asyncrl.config.run import OwnerConfig

log = logging.getLogger(__name__)

SOCKET_FILE = "owner.sock"
ATTACH_S = 60.0
"""For whoever starts a run to attach to it first; then `owner.grace_s` counts."""


@dataclass(slots=True)
class Ownership:
    """What a controller knows about its owner."""

    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the run is to end because nobody wants it any more, or SIGTERM says so."""
    then: Literal["drain", "stop"] = "stop"
    """How."""
    why: str = "the process that started the run is gone"
    nobody: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while nobody holds the run: nobody will ask for its last status."""


async def own_by_input() -> Ownership:
    """Return the ownership of a run that ends with standard input."""
    owner = Ownership()

    class EndOfInput(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
            owner.gone.set()
            owner.nobody.set()

    _stop_by_signal(owner)
    await asyncio.get_running_loop().connect_read_pipe(EndOfInput, sys.stdin)
    return owner


@contextlib.asynccontextmanager
async def own_by_lease(run_folder: Path, config: OwnerConfig) -> AsyncIterator[Ownership]:
    """Yield the ownership of a detached run; its socket is open as long as the context."""
    owner, holders, loop = Ownership(), set[object](), asyncio.get_running_loop()
    owner.nobody.set()
    grace: asyncio.TimerHandle | None = None

    def absent() -> None:
        if config.absent == "go_on":
            log.info("nobody is attached to the run; it goes on (owner.absent)")
        else:
            owner.then, owner.why = config.absent, "nobody was attached to the run"
            owner.gone.set()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal grace
        holders.add(writer)
        owner.nobody.clear()
        if grace is not None:
            grace.cancel()
        try:
            with contextlib.suppress(OSError):
                while await reader.read(4096):
                    pass
        finally:
            writer.close()
            holders.discard(writer)
            if not holders:
                owner.nobody.set()
                grace = loop.call_later(config.grace_s, absent)

    socket = run_folder / SOCKET_FILE
    _stop_by_signal(owner)
    socket.unlink(missing_ok=True)
    with _short_path(run_folder) as path:
        before = os.umask(0o177)
        try:
            server = await asyncio.start_unix_server(hold, path)
        finally:
            os.umask(before)
        grace = loop.call_later(max(config.grace_s, ATTACH_S), absent)
        try:
            yield owner
        finally:
            grace.cancel()
            server.close()
            socket.unlink(missing_ok=True)


async def take_lease(run_folder: Path) -> asyncio.StreamWriter | None:
    """Hold a detached run until the writer that is returned is closed; None where the run is not detached, or not there."""
    try:
        with _short_path(run_folder) as path:
            _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return None
    return writer


@contextlib.contextmanager
def _short_path(run_folder: Path) -> Iterator[str]:
    """Yield a path of the socket that is short: a Unix socket's may have about 100 bytes."""
    folder = os.open(run_folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET_FILE}" if Path("/proc/self/fd").is_dir() else str(run_folder / SOCKET_FILE)
    finally:
        os.close(folder)


def _stop_by_signal(owner: Ownership) -> None:
    loop = asyncio.get_running_loop()

    def end() -> None:
        owner.then, owner.why = "stop", "the controller was told to end by SIGTERM"
        owner.gone.set()
        owner.nobody.set()

    loop.add_signal_handler(signal.SIGTERM, end)
    loop.add_signal_handler(signal.SIGINT, lambda: None)
