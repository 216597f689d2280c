"""`asyncrl serve`, the daemon from start to end, and `asyncrl view`, the daemon's pages for existing run folders.

Invariants: one daemon per folder (a lock that the kernel frees). It listens on loopback unless TLS files or a proxy are given. It
reports READY to systemd once every earlier run has been found again, and feeds the watchdog from the event loop. SIGTERM ends it
and leaves its runs alive, or with `--drain` drains them first, as in a container. `view` owns no run: it reads the files of runs,
serves on loopback, and accepts no orders; its records are in a temporary folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import logging
import os
import resource
import secrets
import signal
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from aiohttp import web

from asyncrl.client import has_done
from asyncrl.clock import SystemClock
from asyncrl.config.load import read_toml
from asyncrl.control.launch.processes import is_live
from asyncrl.errors import ConfigError, LaunchError
from asyncrl.folders import write_whole
from asyncrl.observe.steps import EVENTS_FILE, STEPS_FILE, NewLines, RunEvent, StepReport, accuracies, newest_row, read_evals
from asyncrl.schema.status import RunStatus
from asyncrl.serve.keeper import Keeper
from asyncrl.serve.machine import Machine, machine
from asyncrl.serve.records import LOCK_FILE, SESSION_KEY_FILE, TOKEN_FILE, Guard, Outcome, Records, RunRecord, new_token
from asyncrl.serve.routes import Service

log = logging.getLogger(__name__)

URL_FILE = "server.url"
VIEW_LOOK_S = 1.0
"""Time between two reads of live runs by `asyncrl view`."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The daemon's options."""

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


async def serve(options: ServeOptions) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: The options contradict each other.
        LaunchError: Another daemon has the folder, or the port is taken.
    """
    context, clock = _check(options), SystemClock()
    with own_records(options.folder) as records, contextlib.ExitStack() as undo:
        if not any(token.role == "admin" for token in records.tokens.values()):
            write_whole(options.folder / TOKEN_FILE, new_token(records, "admin", "admin", clock) + "\n", private=True)
        if not (key := options.folder / SESSION_KEY_FILE).exists():  # it outlives the daemon, and so do the cookies it signs
            write_whole(key, secrets.token_hex(32), private=True)
        keeper = Keeper(records, machine(), clock)
        host = f"[{options.host}]" if ":" in options.host else options.host
        names = {"localhost", "127.0.0.1", "[::1]", host, *options.allow_hosts}
        service = Service(records, keeper, Guard(records, names, clock, key.read_bytes()), clock, options.code_roots)
        service.show_samples, service.behind_proxy = options.show_samples, options.behind_proxy
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each reader of a stream has a descriptor, and each run some
        undo.callback((options.folder / URL_FILE).unlink, missing_ok=True)
        async with _answering(service, options.host, options.port, context) as (port, ending):
            url = f"{'https' if context else 'http'}://{host}:{port}"
            write_whole(options.folder / URL_FILE, url, onto_disk=False)  # whoever waits for it reads all of it
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


async def view_runs(folders: Sequence[Path], port: int, say: Callable[[str], None]) -> None:
    """Serve the pages of runs until SIGTERM or SIGINT; `say` gets the address, with a token after `#`, which is never logged.

    Raises:
        ConfigError: Two folders have the same name.
        LaunchError: The port is taken.
    """
    names = [folder.resolve().name for folder in folders]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"run folders must have different names; these are given twice: {', '.join(sorted(twice))}")
    clock = SystemClock()
    with tempfile.TemporaryDirectory() as aside, contextlib.closing(Records(Path(aside))) as records:
        records.elsewhere = {name: folder.resolve() for name, folder in zip(names, folders, strict=True)}
        keeper = Keeper(records, Machine(), clock)
        viewed = [Viewed(keeper, name, number) for number, name in enumerate(names)]
        for one in viewed:
            one.look()
        service = Service(records, keeper, Guard(records, {"127.0.0.1"}, clock), clock, read_only=True)
        async with _answering(service, "127.0.0.1", port) as (taken, ending):
            say(f"http://127.0.0.1:{taken}/#token={new_token(records, 'you', 'operator', clock)}")
            while not ending.is_set():
                for one in viewed:
                    await asyncio.to_thread(one.look_again)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ending.wait(), VIEW_LOOK_S)
            service.draining = True


class Viewed:
    """A viewed run: its events are read as they come, and only the newest of its steps."""

    def __init__(self, keeper: Keeper, name: str, number: int) -> None:
        self.name = name
        self._keeper, self._number, self._folder = keeper, number, keeper.records.run_folder(name)
        self._events = NewLines(self._folder / EVENTS_FILE)
        self._first: RunEvent | None = None
        self._newest: RunEvent | None = None
        self._phase: RunEvent | None = None
        """The newest event of a phase."""

    def look_again(self) -> None:
        """Read the state of a run that was live at the last look, or is now."""
        if self._keeper.records.runs[self.name].state == "live" or is_live(self._folder):
            self.look()

    def look(self) -> None:
        """Read the run's state from its files."""
        folder, live = self._folder, is_live(self._folder)  # asked first: what was written before the end is still read
        for line in self._events.read():
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):  # torn, or of another version
                self._newest = msgspec.json.decode(line, type=RunEvent)
                self._first = self._first or self._newest
                self._phase = self._newest if self._newest.kind == "phase" else self._phase
        step, phase = newest_row(folder / STEPS_FILE, StepReport), self._phase
        accuracy_before, accuracy_after = accuracies(read_evals(folder))
        num_steps, version = read_toml(folder / "config.toml").get("num_steps", 0), step.version if step else -1
        failed, reason = phase is not None and phase.subject == "failed", phase.text if phase else ""
        done = version >= num_steps and has_done(folder, num_steps, reason)
        outcome: Outcome = "" if live else "failed" if failed else "done" if done else "stopped"
        self._keeper.records.runs[self.name] = RunRecord(
            id=self.name, number=self._number, state="live" if live else "ended", outcome=outcome,
            reason=reason, version=version, num_steps=num_steps,
            started_s=self._first.time_s if self._first else 0.0,
            ended_s=self._newest.time_s if self._newest and not live else 0.0,
            accuracy_before=accuracy_before, accuracy_after=accuracy_after,
        )  # fmt: skip
        self._keeper.statuses.pop(self.name, None)
        if live:
            self._keeper.statuses[self.name] = RunStatus(
                name=self.name, run_folder=str(folder), phase=phase.subject if phase else "starting", version=version,
                num_steps=num_steps,
            )  # fmt: skip


def notify(state: str) -> None:
    """Notify systemd, if it started this process (NOTIFY_SOCKET; sd_notify(3))."""
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
    """Refuse a public address without TLS or a proxy; return the TLS context, if TLS is used."""
    if (options.tls_cert is None) != (options.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key go together")
    try:
        local = options.host == "localhost" or ipaddress.ip_address(options.host).is_loopback
    except ValueError as error:
        raise ConfigError(f"--host takes an IP address of this machine or localhost, got {options.host!r}") from error
    if not local and options.tls_cert is None and not options.behind_proxy:
        raise ConfigError(
            f"--host {options.host} is open to others: give --tls-cert and --tls-key, or --behind-proxy if a proxy does TLS"
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


@contextlib.asynccontextmanager
async def _answering(
    service: Service, host: str, port: int, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[int, asyncio.Event]]:
    """Answer requests inside the context; yield the port, and the event that SIGTERM and SIGINT set.

    Raises:
        LaunchError: The port is taken, or the address is not this machine's.
    """
    ending, loop, runner = asyncio.Event(), asyncio.get_running_loop(), service.runner()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, ssl_context=tls).start()
        except OSError as error:
            raise LaunchError(f"cannot listen on {host}:{port}: {error.strerror}; `--port 0` takes a free one") from error
        yield runner.addresses[0][1], ending
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def own_records(folder: Path) -> Iterator[Records]:
    """Open the records of a folder that no daemon serves.

    Raises:
        LaunchError: A daemon serves it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            url = f" at {(folder / URL_FILE).read_text()}" if (folder / URL_FILE).exists() else ""
            raise LaunchError(f"another daemon serves {folder}{url}; its tokens are made by POST /v1/tokens") from error
        with contextlib.closing(Records(folder)) as records:
            yield records
