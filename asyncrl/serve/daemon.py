"""`asyncrl serve`: the daemon from its first look at the folder to its end.

Invariants: one daemon a folder (a lock that the kernel frees). It listens on loopback unless TLS files or a proxy are named. It
says READY to systemd once every run of before has been found again, and feeds its watchdog from the event loop. SIGTERM ends it
and leaves its runs alive, or drains them first with `--drain`, as in a container.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import logging
import os
import secrets
import signal
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from asyncrl.clock import Clock, SystemClock
from asyncrl.errors import ConfigError, LaunchError
from asyncrl.serve.guard import Guard, new_token
from asyncrl.serve.keeper import Keeper
from asyncrl.serve.machine import machine
from asyncrl.serve.records import Records
from asyncrl.serve.routes import Service

log = logging.getLogger(__name__)

TOKEN_FILE = "admin.token"  # noqa: S105 - its name
SESSION_KEY_FILE = "session.key"
LOCK_FILE = "server.lock"
URL_FILE = "server.url"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How the daemon is asked to be."""

    folder: Path
    host: str = "127.0.0.1"
    port: int = 7717
    tls_cert: Path | None = None
    tls_key: Path | None = None
    behind_proxy: bool = False
    allow_hosts: tuple[str, ...] = ()
    code_roots: tuple[Path, ...] = ()
    drain: bool = False
    show_samples: bool = False


async def serve(options: ServeOptions, clock: Clock | None = None) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: The options do not go together.
        LaunchError: Another daemon has the folder, or the port is taken.
    """
    context, clock = _check(options), clock or SystemClock()
    with own_records(options.folder) as records:
        _first_token(records, options.folder, clock)
        keeper = Keeper(records, machine(), clock)
        names = {"localhost", "127.0.0.1", "[::1]", options.host, *options.allow_hosts}
        service = Service(records, keeper, Guard(records, names, clock, _session_key(options.folder)), clock, options.code_roots)
        service.show_samples = options.show_samples
        ending, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ending.set)
        runner = service.runner()
        await runner.setup()
        try:
            await listen(runner, options.host, options.port, context)
            host = f"[{options.host}]" if ":" in options.host else options.host
            url = f"{'https' if context else 'http'}://{host}:{runner.addresses[0][1]}"
            (options.folder / URL_FILE).write_text(url, encoding="utf-8")
            log.info("serving %s; the admin token is in %s", url, options.folder / TOKEN_FILE)
            async with asyncio.TaskGroup() as group:
                keeping = group.create_task(keeper.run(), name="keeper")
                notifying = group.create_task(_notify(keeper), name="notify")
                await ending.wait()
                service.draining = True
                notify("STOPPING=1")
                if options.drain:
                    log.info("draining the live runs")
                    await keeper.drain_all()
                keeping.cancel()
                notifying.cancel()
        finally:
            await runner.cleanup()
            (options.folder / URL_FILE).unlink(missing_ok=True)


def notify(state: str) -> None:
    """Tell systemd, where it started this process (NOTIFY_SOCKET; sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.setblocking(False)  # a full queue must not hold the loop up
        there.connect("\0" + address[1:] if address.startswith("@") else address)
        there.send(state.encode())


async def _notify(keeper: Keeper) -> None:
    await keeper.settled.wait()
    notify("READY=1")
    watchdog_s = int(os.environ.get("WATCHDOG_USEC") or 0) / 1e6
    while watchdog_s:
        notify("WATCHDOG=1")
        await asyncio.sleep(watchdog_s / 3)


def _check(options: ServeOptions) -> ssl.SSLContext | None:
    """Refuse an open port without TLS or a proxy; return what TLS needs, if it is asked for."""
    if (options.tls_cert is None) != (options.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key go together")
    try:
        local = options.host == "localhost" or ipaddress.ip_address(options.host).is_loopback
    except ValueError as error:
        raise ConfigError(f"--host takes an IP address of this machine or localhost, got {options.host!r}") from error
    if not local and options.tls_cert is None and not options.behind_proxy:
        raise ConfigError(
            f"--host {options.host} is open to others: give --tls-cert and --tls-key, or --behind-proxy where a proxy does TLS"
        )
    for root in options.code_roots:
        if not root.is_dir():
            raise ConfigError(f"--code-root {root} is no folder")
    if options.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(options.tls_cert, options.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--tls-cert {options.tls_cert} and --tls-key {options.tls_key} cannot be used: {error}") from error
    return context


async def listen(runner: web.AppRunner, host: str, port: int, context: ssl.SSLContext | None = None) -> None:
    """Listen.

    Raises:
        LaunchError: The port is taken, or the address is not this machine's.
    """
    try:
        await web.TCPSite(runner, host, port, ssl_context=context).start()
    except OSError as error:
        raise LaunchError(f"cannot listen on {host}:{port}: {error.strerror}; `--port 0` takes a free one") from error


@contextlib.contextmanager
def own_records(folder: Path) -> Iterator[Records]:
    """Open the records of a folder that no daemon serves.

    Raises:
        LaunchError: One does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LaunchError(f"another daemon serves {folder}; its tokens are made by POST /v1/tokens") from error
        with contextlib.closing(Records(folder)) as records:
            yield records


def _first_token(records: Records, folder: Path, clock: Clock) -> None:
    """Make the admin's token where there is none; it lies in the folder, readable by its owner only."""
    if records.tokens:
        return
    _write_secret(folder / TOKEN_FILE, new_token(records, "admin", "admin", clock) + "\n")


def _session_key(folder: Path) -> bytes:
    """Return what signs the page's cookies; it outlives the daemon, and so do they."""
    path = folder / SESSION_KEY_FILE
    if not path.exists():
        _write_secret(path, secrets.token_hex(32))
    return path.read_bytes()


def _write_secret(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
