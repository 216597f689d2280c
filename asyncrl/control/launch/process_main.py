"""How a process of a run starts, logs and ends, and how a controller knows its owner.

A stage's process watches its standard input, which its parent holds open. The kernel closes that pipe however the parent ends, so
end of file means that the process is not needed any more.

An attached run ends with the process that started it: the kernel closes that process's end of the controller's standard input. A
detached run has no such process. Its owners are all processes connected to its socket RUN/owner.sock (mode 0600): `asyncrl
attach`, `asyncrl serve`, a program. `owner.absent` says what happens once there was no owner for `owner.grace_s`.

A process logs one line per event, on standard error, which the launcher appends to RUN/logs/NAME.log. INFO is for life-cycle
events and one line per step; a WARNING names a setting to change; DEBUG is for developers of asyncrl.

Invariants:
- An error that would repeat after a restart, or be hidden by it, is a fatal fault and ends the run: a wrong config, a learner
  error, a replaced model, a missing package or device, damaged weights.
- The owner's socket exists exactly as long as the controller of a detached run.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn

from asyncrl.config.run import OwnerConfig
from asyncrl.errors import MOST_TRACE_CHARS, ConfigError, ConnectionClosed, LearnerError, leaves
from asyncrl.schema.control import Fault
from asyncrl.transport.protocol import Connection, Lane

log = logging.getLogger("asyncrl")

EXIT_OK, EXIT_FAILED, EXIT_WRONG_INPUT, EXIT_FAULT = 0, 1, 2, 3
PARENT_GONE_EXIT_CODE = 113
ORPHAN_S = 1.0
"""Time for a process without its parent to end by itself, and to remove its files, before it is killed."""
PID_FILE = "controller.pid"
"""File in the folder of a detached run."""
FORK_SERVER = "fork-server"
"""Kind of the process that others are forked from (fork_server.py): the run folder, a socket's descriptor, and what to import."""
_FATAL = (ConfigError, ImportError, LearnerError)
_FATAL_NAMES = {"SafetensorError"}
"""Names of fatal error types from libraries that are not imported here: damaged weights."""
_FATAL_WORDS = ("not compiled with CUDA", "No CUDA GPUs", "no NVIDIA driver", "invalid device", "Invalid device", "pip install",
                "File too large", "Read-only file system")  # fmt: skip
"""Parts of messages of fatal errors with a general type: a missing device or package, a disk that cannot be written."""
TELL_S = 2.0
"""How long sending a fault to the controller may take."""
SOCKET_FILE = "owner.sock"
ATTACH_S = 60.0
"""How long the program that starts a run has to attach first; afterwards `owner.grace_s` applies."""
BY_SIGTERM = "the controller was told to end by SIGTERM"
"""Reason of a run's end."""


def set_up_logging(process: str, level: str = "INFO") -> None:
    """Send every log record of asyncrl to standard error.

    Args:
        process: Name shown on each line, `generator-0`.
        level: DEBUG, INFO or WARNING.
    """
    escaped = process.replace("%", "%%")
    line = f"%(asctime)s.%(msecs)03d %(levelname)-7s {escaped} %(name)s | %(message)s"
    logging.basicConfig(level=logging.WARNING, format=line, datefmt="%Y-%m-%d %H:%M:%S", force=True)
    logging.getLogger("asyncrl").setLevel(level)


def watch_parent(on_gone: Callable[[], object] | None = None) -> threading.Thread:
    """Start a daemon thread that ends this process, and its process group if it leads one, at the end of its standard input.

    Args:
        on_gone: Called first, on that thread, to remove what must not stay on the machine (shared memory). Keep it short.

    Returns:
        The thread, already running.
    """

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        try:
            if on_gone is not None:
                on_gone()
        finally:
            if os.getpgid(0) == os.getpid():
                os.killpg(os.getpid(), signal.SIGKILL)
            os._exit(PARENT_GONE_EXIT_CODE)

    thread = threading.Thread(target=watch, name="parent-watch", daemon=True)
    thread.start()
    return thread


def follow_parent() -> None:
    """Start a daemon thread that kills this process, just spawned, once its parent has ended, if the system can tell."""
    if os.getpgid(os.getppid()) != os.getpgid(0):  # it has ended already, and its children have got another parent
        os._exit(PARENT_GONE_EXIT_CODE)
    try:
        parent = os.pidfd_open(os.getppid())  # a handle never refers to another process
    except (AttributeError, OSError):  # not Linux, or a sandbox that has none
        return

    def follow() -> None:
        select.select([parent], [], [])
        time.sleep(ORPHAN_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="parent-watch", daemon=True).start()


def ignore_interrupts() -> None:
    """Ignore Ctrl-C, which a terminal sends to the whole foreground group; the controller handles it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def leave_parent(run_folder: Path) -> None:
    """Continue as a forked child of the system's first process, with its pid in RUN/controller.pid; the original process ends."""
    if child := os.fork():
        (run_folder / PID_FILE).write_text(str(child), encoding="utf-8")
        os._exit(EXIT_OK)


@contextlib.contextmanager
def imports_without_gc() -> Iterator[None]:
    """Import with the garbage collector off, which takes a sixth of the time, and freeze what was imported.

    An import makes a million permanent objects. Later collections skip them and do not block an event loop.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


async def run_to_exit_code(work: Awaitable[object], name: str, connection: Connection) -> int:
    """Await a stage's work and return the exit code; an error is sent to the controller as a Fault."""
    try:
        await work
    except Exception as error:  # the boundary of a process: whatever it was is told, logged, and ends it
        causes = leaves(error)
        if not all(isinstance(cause, ConnectionClosed) for cause in causes):
            log.exception("%s cannot go on", name)
            reason = "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes)[:MOST_TRACE_CHARS]
            comes_again = any(  # a restart would meet the same error
                isinstance(cause, _FATAL)
                or _FATAL_NAMES & {kind.__name__ for kind in type(cause).__mro__}
                or any(words in str(cause) for words in _FATAL_WORDS)
                for cause in causes
            )
            with contextlib.suppress(ConnectionClosed, TimeoutError):
                async with asyncio.timeout(TELL_S):
                    await connection.send(Fault(name, reason, fatal=comes_again), Lane.CONTROL)
                    await connection.flush(TELL_S)
            return EXIT_FAULT
        log.info("the controller is gone")
    return EXIT_OK


def leave(code: int) -> NoReturn:
    """End the process at once: shutting down an interpreter takes 0.7 s with torch, seconds with vLLM, and frees nothing."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# -- who wants a run ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Ownership:
    """What a controller knows about its owner."""

    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the run must end, because it has no owner any more or got SIGTERM."""
    then: Literal["drain", "stop"] = "stop"
    why: str = "the process that started the run is gone"
    nobody: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the run has no owner, so that nobody will ask for its last status."""


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
    """Be an owner of a detached run until the returned writer is closed; None if the run is not detached, or not there."""
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
        owner.then, owner.why = "stop", BY_SIGTERM
        owner.gone.set()
        owner.nobody.set()

    loop.add_signal_handler(signal.SIGTERM, end)
    loop.add_signal_handler(signal.SIGINT, lambda: None)
