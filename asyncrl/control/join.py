"""Generators that join a live run from outside: which processes a run accepts, and how `asyncrl join` connects.

    asyncrl join RUN                       the run's folder: on its machine, or where the folder is shared
    asyncrl join --address A --keys FILE   anywhere: RUN/endpoint and RUN/keys/client.key, brought over by the user

A joining generator connects like any generator and first gets the run's config and place (JoinTerms). It uses the run's config,
except for its own engine's settings. If a medium or a folder does not reach its machine, it ends at once and says what to change.
The run gives it work like any generator and never restarts it. Its end does not count as a death: the lifecycle does not know it.

Invariants:
- A name has one incarnation at a time; it is free again once its connection has ended.
- At most `most_joined` joined generators are connected at once. The place is taken before the connection is accepted.
- An accepted generator whose link broke is accepted again while it holds its place.
- No key is ever logged or put on a command line. The private folder with keys is removed when the process ends, or, if it was
  killed, when the next one starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import re
import secrets
import signal
import sys
import tomllib
from collections.abc import AsyncIterator, Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from asyncrl.config.broadcast import ZeroMQMedium
from asyncrl.config.load import dump_config, load_config, resolve_config
from asyncrl.config.places import is_every_interface, is_loopback, why_weights_do_not_reach
from asyncrl.config.run import RunConfig, SupervisionConfig, TransportConfig
from asyncrl.control.launch.processes import ProcessSpec, child_environment, read_endpoint
from asyncrl.control.lifecycle.events import ProcessPlan
from asyncrl.control.lifecycle.state import Heartbeats
from asyncrl.errors import ConfigError
from asyncrl.folders import OwnedFolder
from asyncrl.schema.control import Hello, JoinTerms
from asyncrl.transport.protocol import Connection, Lane, new_hello
from asyncrl.transport.security import CLIENT_FILE, KEYS_FOLDER, bring_client_keys
from asyncrl.transport.zmq_client import open_connection

log = logging.getLogger(__name__)

JOINED_PREFIX = "joined-"
"""Prefix of the names of joined generators, and of no other process."""
_JOINED_NAME = re.compile(JOINED_PREFIX + "[A-Za-z0-9-]{1,80}")
WELCOME_S = 30.0
"""How long the run has to answer."""
FLUSH_S = 5.0
"""How long finished samples have to reach the ledger before a joined generator leaves."""
LEAVE_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
OWN_SETTINGS = ("generate.engine.", "generate.model_folder=", "observe.log_level=")
"""What a joining generator may set for itself."""


# -- the run's side ------------------------------------------------------------------------------------------------------


class Membership:
    """The processes that a run accepts: those it starts itself, and joined generators.

    Example:
        >>> membership = Membership([ProcessPlan("generator-0", "generator")], most_joined=1)
        >>> membership.refusal(Hello(1, "generator", "joined-elsewhere-7-0", "a", 7))
        ''
        >>> membership.refusal(Hello(1, "generator", "joined-elsewhere-8-0", "b", 8)).partition(" (")[0]
        'all 1 places for joining generators are taken'
    """

    def __init__(
        self, planned: Iterable[ProcessPlan] = (), most_joined: int = 0, config: SupervisionConfig | None = None
    ) -> None:
        """Start with the planned processes, and no joined generators.

        Args:
            planned: The processes that the run starts itself.
            most_joined: Maximum number of joined generators at once.
            config: Gives the time after which a silent generator counts as lost.
        """
        self.most_joined = most_joined
        self.joined: dict[str, Hello] = {}
        self.num_came = self.num_left = self.num_lost = 0
        self.planned = {item.name: item.kind for item in planned}
        """Kinds of the processes that the run starts itself, by name, including those it is about to start."""
        self.heartbeats = Heartbeats(config or SupervisionConfig())
        """Heartbeats of joined generators only."""

    def refusal(self, hello: Hello, is_own: bool = True) -> str:
        """Return why a peer is refused; if empty, it is accepted, and a joining generator gets its place.

        Args:
            hello: The peer's hello.
            is_own: Whether it has the key of the run's own processes; with the other key it can only join under its own name.
        """
        if self.planned.get(hello.name) == hello.kind:
            return "" if is_own else f"{hello.name!r} is a process of the run, and client.key is for generators that join"
        if hello.kind != "generator" or not _JOINED_NAME.fullmatch(hello.name):
            return f"this run has no {hello.kind} named {hello.name!r}"
        here = self.joined.get(hello.name)
        if here is not None:
            if here.incarnation == hello.incarnation:
                return ""
            return f"another generator named {hello.name!r} has joined; try again"
        if self.most_joined == 0:
            return "this run lets no generator join: set placement.most_joining_generators and resume it"
        if len(self.joined) >= self.most_joined:
            return (
                f"all {self.most_joined} places for joining generators are taken (placement.most_joining_generators); "
                f"one that was killed holds its place for {self.heartbeats.config.heartbeat_timeout_s:g} s"
            )
        self.joined[hello.name] = hello
        self.num_came += 1
        return ""

    def gone(self, name: str, *, said_goodbye: bool) -> None:
        """Free the place of a generator that has left."""
        if self.joined.pop(name, None) is not None:
            self.heartbeats.forget(name)
            self.num_left += said_goodbye
            self.num_lost += not said_goodbye

    def counts(self) -> dict[str, int]:
        """Return how many joined generators are here, may be here, came, left normally and were lost; empty if none may join."""
        if not self.most_joined:
            return {}
        over = {"came": self.num_came, "left": self.num_left, "lost": self.num_lost}
        return {"here": len(self.joined), "most": self.most_joined, **over}


# -- the generator's side ------------------------------------------------------------------------------------------------


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The user's request. It is passed on a command line, so it contains paths but no secrets."""

    run_folder: str = ""
    """The run's folder; empty: `address` and `keys` are used."""
    address: str = ""
    keys: str = ""
    """The run's keys/client.key; empty: the run does not use encryption."""
    overrides: tuple[str, ...] = ()
    """`generate.engine.A=VALUE` or `generate.model_folder=FOLDER`, for this generator alone."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A generator's place in a run."""

    name: str
    connection: Connection
    config: RunConfig
    """The run's, with the generator's own engine settings."""
    run_folder: Path
    """The run's folder if this machine has it, else a private folder with keys and files of media."""
    is_on_same_machine: bool


def exec_join(run_folder: str, address: str, keys: str, overrides: tuple[str, ...]) -> NoReturn:
    """Replace this process by one that joins a run, with the environment of the run's own generators; see JoinRequest.

    Raises:
        ConfigError: A generator may not set these fields, or keys are given without an address.
    """
    for override in overrides:
        if not override.startswith(OWN_SETTINGS):
            raise ConfigError(
                f"--set {override}: a generator that joins takes the run's config, and may set only generate.engine.*, "
                "generate.model_folder and observe.log_level for itself"
            )
    if keys and not address:
        raise ConfigError("--keys is for --address; a run folder contains its keys")
    request = JoinRequest(run_folder=run_folder, address=address, keys=keys, overrides=overrides)
    command = (sys.executable, "-P", "-m", "asyncrl.pipeline", "join", msgspec.json.encode(request).decode())
    spec = ProcessSpec("join", "generator", 1, command, Path())
    sys.stdout.flush()
    os.execve(sys.executable, command, child_environment(os.environ, spec))  # noqa: S606 - this program itself


@contextlib.asynccontextmanager
async def joined(request: JoinRequest, pid: int, endpoint_file: str) -> AsyncIterator[Joined]:
    """Join a run, and stay connected while the context is open.

    Args:
        request: The run, and this generator's settings.
        pid: Pid of this process.
        endpoint_file: Name of the file in a run folder that holds the run's address.

    Raises:
        ConfigError: There is no such run, its weights cannot reach this machine, or it accepts no connection from here.
        TransportError: The run did not answer, or refused this generator; the message says why.
    """
    host = platform.node()
    with OwnedFolder("asyncrl-join-") as owned:
        address, folder = _find_run(request, owned.path, endpoint_file)
        transport = load_config(folder / "config.toml").transport if request.run_folder else TransportConfig()
        encryption = "curve" if (folder / KEYS_FOLDER / CLIENT_FILE).exists() else "plain"
        transport = replace(transport, encryption=encryption)
        readable = re.sub(r"[^A-Za-z0-9]+", "-", host.partition(".")[0]).strip("-")[:32] or "unnamed"
        # Unique over machines, containers of one host name too. The last number chooses a server (rollout.with_own_server).
        name = f"{JOINED_PREFIX}{readable}-{pid}-{secrets.token_hex(2)}-0"
        connection = await open_connection(address, new_hello("generator", name), transport, folder, WELCOME_S)
        try:
            async with asyncio.timeout(WELCOME_S):
                delivery = await connection.receive(Lane.CONTROL)
            delivery.ack()
            terms = delivery.message
            assert isinstance(terms, JoinTerms), f"the run's first message was {type(terms).__name__}"
            is_here = terms.machine == host
            config = own_config(terms, request.overrides, is_here=is_here)
            if not request.run_folder and is_here and (Path(terms.run_folder) / "config.toml").exists():
                folder = Path(terms.run_folder)
            if not is_here:
                if why := why_weights_do_not_reach(config, shares_folder=folder != owned.path):
                    raise ConfigError(f"the run is on {terms.machine}, this is {host}: {why}")
                if isinstance(medium := config.broadcast.medium, ZeroMQMedium):  # relay_bind is the run's machine's
                    config = replace(config, broadcast=replace(config.broadcast, medium=replace(medium, fanout=0)))
            yield Joined(name, connection, config, folder, is_here)
        finally:
            try:
                await connection.flush(FLUSH_S)
            finally:
                await connection.close()


async def serve_until_told(work: Coroutine[Any, Any, int]) -> int:
    """Run the work until it ends or a signal of LEAVE_ON arrives; return its exit code, or 0 if a signal ended it."""
    loop = asyncio.get_running_loop()
    working = loop.create_task(work, name="joined")
    for number in LEAVE_ON:
        loop.add_signal_handler(number, working.cancel)
    try:
        return await working
    except asyncio.CancelledError:
        log.info("leaving; unfinished groups go back to the run")
        return 0
    finally:  # a second Ctrl-C does not wait for what is still to be delivered
        for number in LEAVE_ON:
            loop.remove_signal_handler(number)


def own_config(terms: JoinTerms, overrides: tuple[str, ...], *, is_here: bool) -> RunConfig:
    """Return the run's config with this generator's own settings; `is_here`: whether the run is on this machine.

    Raises:
        ConfigError: The settings are wrong, or this generator would sample differently from the run.
    """
    run = resolve_config(tomllib.loads(terms.config_toml))
    # What the run has of generators is not this one's to bring: servers for all of them, say.
    alone = replace(run, generate=replace(run.generate, num_workers=1), launch=replace(run.launch, elastic=None))
    own = resolve_config(tomllib.loads(dump_config(alone)), overrides)
    own = replace(own, generate=replace(own.generate, num_workers=run.generate.num_workers), launch=run.launch)
    theirs, ours = run.generate.engine, own.generate.engine
    if type(theirs) is not type(ours) and not (theirs.has_model and ours.has_model):
        raise ConfigError(
            f"the run's engine is {theirs.kind!r}, and one of kind {ours.kind!r} does not "
            "generate what it trains on; leave generate.engine.kind as it is"
        )
    taken = {url for url in theirs.urls if is_here or not is_loopback(url)}  # another machine's loopback is not ours
    if taken & set(ours.urls):
        raise ConfigError(
            f"the servers {', '.join(sorted(taken))} each serve a generator of the run; name another: "
            "--set generate.engine.url=http://host:port"
        )
    return own


def _find_run(request: JoinRequest, private: Path, endpoint_file: str) -> tuple[str, Path]:
    """Return the run's address and the folder with its keys."""
    if request.run_folder:
        folder = Path(request.run_folder).resolve()
        if not (folder / "api.json").exists() or not (folder / endpoint_file).exists():
            raise ConfigError(f"{folder} has no live run (no api.json); start one with `asyncrl run` or `asyncrl resume`")
        address, endpoint = (folder / endpoint_file).read_text(encoding="utf-8").strip(), read_endpoint(folder)
        machine = endpoint.machine if endpoint is not None else ""
        if machine and machine != platform.node() and is_every_interface(urlsplit(address).hostname or ""):
            raise ConfigError(
                f"{address} stands for every address of {machine}, where the run is, and names none that this machine "
                f"reaches: --address tcp://HOST:{urlsplit(address).port}, and --keys {folder / KEYS_FOLDER / CLIENT_FILE}"
            )
    else:
        folder, address = private, request.address
        if request.keys:
            bring_client_keys(Path(request.keys), private)
    parts = urlsplit(address)
    if parts.scheme == "ipc" and not Path(parts.netloc + parts.path).exists():
        raise ConfigError(
            f"the run listens on {address}, which only its own machine reaches: set transport.kind = 'tcp' and transport.host "
            "to an address of that machine, and resume the run"
        )
    port = re.fullmatch(r"tcp://\S+:(\d{1,5})", address)
    if parts.scheme != "ipc" and (port is None or int(port[1]) > 65535):
        raise ConfigError(
            f"an address reads tcp://HOST:PORT, as in the run's file `endpoint`, with a port up to 65535; got {address!r}"
        )
    return address, folder
