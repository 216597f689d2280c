"""How a generator joins a live run that did not start it: its name, the door it takes, and what must hold where it is.

    asyncrl join RUN                       the run's folder: on its machine, or where the folder is shared
    asyncrl join --address A --keys FILE   anywhere: RUN/endpoint and RUN/keys/client.key, brought over by the user

A guest connects like any generator and is told first what the run is (JoinTerms). It takes the run's config, but for its own
engine's settings. What does not reach its machine (a medium, a folder) it refuses at once, with what to change.

Invariants: no key is ever logged or put on a command line; the private folder is gone when the guest is, or, where it was killed,
when the next one comes.
Called by pipeline.py, in the guest's own process; the run's side of it is control/roster.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
import re
import signal
import socket
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from asyncrl.config.broadcast import ZeroMQMedium
from asyncrl.config.generate import FakeEngineConfig, ReplayEngineConfig, VLLMServerEngineConfig
from asyncrl.config.joining_rules import why_weights_do_not_reach
from asyncrl.config.load import load_config
from asyncrl.config.run import RunConfig
from asyncrl.config.stages import TransportConfig
from asyncrl.control.roster import GUEST_PREFIX
from asyncrl.errors import ConfigError
from asyncrl.folders import OwnedFolder
from asyncrl.schema.control import JoinTerms
from asyncrl.transport.channel import Connection, Lane
from asyncrl.transport.link import LinkLimits
from asyncrl.transport.open import new_hello, open_connection
from asyncrl.transport.security import CLIENT_FILE, KEYS_FOLDER, bring_client_keys

log = logging.getLogger(__name__)

WELCOME_S = 30.0
"""For the run to answer."""
AS_THE_RUN_HAS_IT = LinkLimits(window=1 << 31, max_message_bytes=1 << 40, are_listeners=True)
"""A guest is told the run's config only once it is connected."""
FLUSH_S = 5.0
"""For finished samples to reach the ledger before a guest leaves."""
LEAVE_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LISTENS_ANYWHERE = frozenset({"127.0.0.1", "localhost", "0.0.0.0", "*", "[::1]", "[::]"})  # noqa: S104 - compared with
"""Hosts in a relay's address that are right on every machine."""
OWN_SETTINGS = ("generate.engine.", "generate.model_folder=", "observe.log_level=")
"""What a guest may set for itself."""


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for; travels on a command line, so it holds paths and no secrets."""

    run_folder: str = ""
    """Of the run; empty: `address` and `keys` say where it is."""
    address: str = ""
    keys: str = ""
    """File: the run's keys/client.key."""
    overrides: tuple[str, ...] = ()
    """`generate.engine.A=VALUE` or `generate.model_folder=FOLDER`, for this generator alone."""


@dataclass(frozen=True, slots=True)
class Visit:
    """A guest that is in."""

    name: str
    connection: Connection
    config: RunConfig
    """The run's, with the guest's own engine settings."""
    run_folder: Path
    """The run's where this machine has it, else the guest's private one: keys, and what media need."""
    is_on_same_machine: bool


def guest_name(host: str, pid: int, number: int = 0) -> str:
    """Return the name of a guest, unique over machines: `joined-HOST-PID-N`; N counts generators of one process."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", host.partition(".")[0]).strip("-")[:32] or "unnamed"
    return f"{GUEST_PREFIX}{readable}-{pid}-{number}"


@contextlib.asynccontextmanager
async def visit(request: JoinRequest, pid: int, endpoint_file: str) -> AsyncIterator[Visit]:
    """Go in through the run's door and stay connected while the context is open.

    Args:
        request: Where, and with what.
        pid: Of this process.
        endpoint_file: Name of the file in a run folder that holds its address.

    Raises:
        ConfigError: There is no such run, it cannot reach this machine with its weights, or it lets nobody join here.
        TransportError: Nobody answered, or the run refused us; the message says why.
    """
    host = platform.node()
    check_overrides(request.overrides)
    with OwnedFolder("asyncrl-join-") as owned:
        private = owned.path
        address, folder = _door(request, private, endpoint_file)
        name = guest_name(host, pid)
        encryption = "curve" if (folder / KEYS_FOLDER / CLIENT_FILE).exists() else "plain"
        transport = TransportConfig(encryption=encryption)  # type: ignore[arg-type]  # one of the two it may be
        hello = new_hello("generator", name)
        connection = await open_connection(address, hello, transport, folder, WELCOME_S, AS_THE_RUN_HAS_IT)
        try:
            terms = await _terms(connection)
            config = own_config(terms, request.overrides, private)
            config = config if terms.machine == host else at_own_address(config, address)
            folder = _folder_of(terms, request, folder, host)
            refuse_what_does_not_reach(config, terms, host, shares_folder=folder != private)
            yield Visit(name, connection, config, folder, terms.machine == host)
        finally:
            try:
                await connection.flush(FLUSH_S)
            finally:
                await connection.close()


async def serve_until_told(work: Coroutine[Any, Any, int]) -> int:
    """Do the work until it ends or a signal of LEAVE_ON comes, and return its exit code; 0 where a signal ended it."""
    loop = asyncio.get_running_loop()
    working = loop.create_task(work, name="guest")
    for number in LEAVE_ON:
        loop.add_signal_handler(number, working.cancel)
    try:
        return await working
    except asyncio.CancelledError:
        log.info("leaving; unfinished groups go back to the run")
        return 0
    finally:
        for number in LEAVE_ON:
            loop.remove_signal_handler(number)


def check_overrides(overrides: tuple[str, ...]) -> None:
    """Refuse settings that are the run's.

    Raises:
        ConfigError: Names the first one.
    """
    for override in overrides:
        if not override.startswith(OWN_SETTINGS):
            raise ConfigError(
                f"--set {override}: a generator that joins takes the run's config, and may set only generate.engine.*, "
                "generate.model_folder and observe.log_level for itself"
            )


def own_config(terms: JoinTerms, overrides: tuple[str, ...], folder: Path) -> RunConfig:
    """Return the run's config with the guest's own settings laid over it; `folder` is where its file is put.

    Raises:
        ConfigError: The settings are wrong, or this generator's samples would not be the run's.
    """
    file = folder / "config.toml"
    file.write_text(terms.config_toml, encoding="utf-8")
    run, own = load_config(file), load_config(file, overrides)
    theirs, ours = run.generate.engine, own.generate.engine
    make_believe = (FakeEngineConfig, ReplayEngineConfig)
    if (isinstance(theirs, make_believe) or isinstance(ours, make_believe)) and type(theirs) is not type(ours):
        raise ConfigError(
            f"the run's engine is {theirs.__struct_config__.tag!r}, and one of kind {ours.__struct_config__.tag!r} does not "
            "generate what it trains on; leave generate.engine.kind as it is"
        )
    if (
        isinstance(ours, VLLMServerEngineConfig)
        and isinstance(theirs, VLLMServerEngineConfig)
        and set(ours.urls) & set(theirs.urls)
    ):
        raise ConfigError(
            f"the servers {', '.join(theirs.urls)} each serve a generator of the run; name another: "
            "--set generate.engine.url=http://host:port"
        )
    return own


def at_own_address(config: RunConfig, address: str) -> RunConfig:
    """Return the config with this machine's address where the run's names one of its own: here nobody can listen at that.

    Args:
        config: Of the run.
        address: The run's, by which its machine is reached.
    """
    medium = config.broadcast.medium
    if not isinstance(medium, ZeroMQMedium) or _host(medium.relay_bind) in LISTENS_ANYWHERE or not address.startswith("tcp:"):
        return config
    run = urlsplit(address)
    family, kind, _, _, there = socket.getaddrinfo(run.hostname, run.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as towards:  # of this kind `connect` sends nothing: it only chooses the way
        towards.connect(there)
        here = str(towards.getsockname()[0])
    port = medium.relay_bind.rpartition(":")[2]
    relay_bind = f"tcp://[{here}]:{port}" if family == socket.AF_INET6 else f"tcp://{here}:{port}"
    return replace(config, broadcast=replace(config.broadcast, medium=replace(medium, relay_bind=relay_bind)))


def _host(bind: str) -> str:
    return bind.removeprefix("tcp://").rpartition(":")[0]


def refuse_what_does_not_reach(config: RunConfig, terms: JoinTerms, host: str, *, shares_folder: bool) -> None:
    """Refuse a run whose weights do not come to this machine.

    Raises:
        ConfigError: Names the medium, and what to set in the run's config.
    """
    if terms.machine == host:
        return
    why = why_weights_do_not_reach(config, shares_folder=shares_folder)
    if why:
        raise ConfigError(f"the run is on {terms.machine}, this is {host}: {why}")


def _door(request: JoinRequest, private: Path, endpoint_file: str) -> tuple[str, Path]:
    """Return the run's address and the folder whose keys open it."""
    if not request.run_folder:
        if request.keys:
            bring_client_keys(Path(request.keys), private)
        return _checked(request.address), private
    folder = Path(request.run_folder).resolve()
    if not (folder / "api.json").exists() or not (folder / endpoint_file).exists():
        raise ConfigError(f"{folder} has no live run (no api.json); start one with `asyncrl run` or `asyncrl resume`")
    return _checked((folder / endpoint_file).read_text(encoding="utf-8").strip()), folder


def _checked(address: str) -> str:
    parts = urlsplit(address)
    if parts.scheme == "ipc" and not Path(parts.netloc + parts.path).exists():
        raise ConfigError(
            f"the run listens on {address}, which only its own machine reaches: set transport.kind = 'tcp' and transport.host "
            "to an address of that machine, and resume the run"
        )
    if parts.scheme not in {"ipc", "tcp"} or (parts.scheme == "tcp" and not _port(address)):
        raise ConfigError(f"an address reads tcp://HOST:PORT, as in the run's file `endpoint`; got {address!r}")
    return address


def _port(address: str) -> int | None:
    try:
        return urlsplit(address).port
    except ValueError:
        return None


async def _terms(connection: Connection) -> JoinTerms:
    """Return the first thing a guest is told."""
    async with asyncio.timeout(WELCOME_S):
        delivery = await connection.receive(Lane.CONTROL)
    delivery.ack()
    assert isinstance(delivery.message, JoinTerms), f"the run's first word was {type(delivery.message).__name__}"
    return delivery.message


def _folder_of(terms: JoinTerms, request: JoinRequest, folder: Path, host: str) -> Path:
    """Return the run's folder where this machine has it: the one the user named, or the very one, on the run's own machine."""
    here = Path(terms.run_folder)
    return here if not request.run_folder and terms.machine == host and (here / "config.toml").exists() else folder
