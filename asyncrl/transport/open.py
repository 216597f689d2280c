"""The front door of the transport: a listener or a connection as the config says. Called by pipeline.py, client.py and tests."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path

from asyncrl.config.stages import TransportConfig
from asyncrl.errors import TransportError
from asyncrl.folders import OwnedFolder
from asyncrl.schema.control import PROTOCOL, Hello, ProcessKind
from asyncrl.transport.channel import Connection, Listener
from asyncrl.transport.connector import ZmqConnector
from asyncrl.transport.link import LinkLimits
from asyncrl.transport.listener import ZmqListener
from asyncrl.transport.security import load_client_keys, make_keys

MAX_IPC_PATH_BYTES = 100
"""A Unix socket's path ends at 107 bytes on Linux and 103 elsewhere."""


def new_hello(kind: ProcessKind, name: str) -> Hello:
    """Return how this start of this process introduces itself; make it once per process."""
    return Hello(PROTOCOL, kind, name, uuid.uuid4().hex, os.getpid())


async def open_listener(
    config: TransportConfig,
    run_folder: Path,
    hello: Hello | None = None,
    judge: Callable[[Hello], str] = lambda _hello: "",
    limits: LinkLimits | None = None,
) -> Listener:
    """Listen for the processes of a run; makes the run's keys where the config wants CURVE and there are none.

    Args:
        config: Kind, host, encryption, window, message size.
        run_folder: Where `keys/` lies.
        hello: Who listens; `controller` by default.
        judge: Why a peer may not come in, in words it is told; empty lets it in.
        limits: Overrides the config's sizes and the default times (tests).

    Returns:
        A listener; hand its `address` to those who connect. The socket of `ipc` lies in a private temporary folder.

    Raises:
        TransportError: The address cannot be bound.
        ConfigError: The key files are unusable.
    """
    keys = make_keys(run_folder) if config.encryption == "curve" else None
    folder = _make_ipc_folder() if config.kind == "ipc" else None
    address = f"ipc://{folder.path}/c" if folder else f"tcp://{config.host}:*"
    hello = hello or new_hello("controller", "controller")
    try:
        return ZmqListener(address, hello, limits or _limits_of(config), keys, judge, folder)
    except BaseException:
        if folder:
            folder.close()
        raise


async def open_connection(
    address: str,
    hello: Hello,
    config: TransportConfig,
    run_folder: Path,
    timeout_s: float = 30.0,
    limits: LinkLimits | None = None,
) -> Connection:
    """Connect to a run's listener.

    Args:
        address: `Listener.address`.
        hello: Who connects (see `new_hello`); its name is unique within the run.
        config: The run's own.
        run_folder: Where `keys/client.key` lies.
        timeout_s: How long to wait for the listener's welcome.
        limits: Overrides the config's sizes and the default times (guests, tests).

    Raises:
        TransportError: Nobody answered, or the listener refused us; the message says why.
        ConfigError: The key file is unusable.
    """
    keys = load_client_keys(run_folder) if config.encryption == "curve" else None
    return await ZmqConnector(address, hello, limits or _limits_of(config), keys).connect(timeout_s)


def _limits_of(config: TransportConfig) -> LinkLimits:
    return LinkLimits(window=config.window, max_message_bytes=config.max_message_bytes)


def _make_ipc_folder() -> OwnedFolder:
    """Return a new folder that only this user can enter, with a path short enough for a Unix socket."""
    for parent in (None, Path("/tmp")):  # noqa: S108 - made private; only where TMPDIR is too long a path
        folder = OwnedFolder("asyncrl-ipc-", parent)
        if len(os.fsencode(folder.path / "c")) <= MAX_IPC_PATH_BYTES:
            return folder
        folder.close()
    raise TransportError(
        f"no temporary folder with a path of at most {MAX_IPC_PATH_BYTES} bytes; set TMPDIR, or transport.kind = 'tcp'"
    )
