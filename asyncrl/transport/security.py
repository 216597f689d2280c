"""Which processes may connect to a run over TCP: CURVE keys for its listener, its own processes and joined generators.

    RUN/keys/          0700
      listener.key     0600   the listener's pair
      own.key          0600   the pair by which the run's own processes connect, and the listener's public key
      client.key       0600   the same for joined generators; weights go by it from process to process

The keys are made once per run. A joining machine needs only `client.key`, with which no process can use the name of one of the
run's own. A key file that others can read is refused, as ssh does; the run itself, as it starts, makes its files private again.
Every listening socket of asyncrl authenticates through `zap_reply`, the one handler of ZeroMQ's authentication requests (ZAP),
and accepts exactly the keys given to it.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import zmq
import zmq.utils.z85

from asyncrl.config.run import TransportConfig
from asyncrl.errors import ConfigError
from asyncrl.folders import write_whole

log = logging.getLogger(__name__)

KEYS_FOLDER = "keys"
LISTENER_FILE = "listener.key"
OWN_FILE = "own.key"
CLIENT_FILE = "client.key"
OWN, GUEST = b"own", b"guest"
"""Owner of the key, which ZeroMQ gives the listener with every packet."""

_CLIENT_KEY = "client key: bring RUN/keys/client.key from the run's machine"
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_FRAMES = 7

Z85Key = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}$")]
"""32 bytes in ZeroMQ's text form."""
_Keys = TypeVar("_Keys", "ListenerKeys", "ClientKeys")


class ListenerKeys(msgspec.Struct, frozen=True):
    """What the listener holds."""

    public: Z85Key
    secret: Z85Key
    own_public: Z85Key
    client_public: Z85Key
    """The two keys that are accepted."""


class ClientKeys(msgspec.Struct, frozen=True):
    """What a connecting process holds."""

    public: Z85Key
    secret: Z85Key
    listener_public: Z85Key
    """The public key of the only trusted listener."""


def make_keys(run_folder: Path) -> ListenerKeys:
    """Return the run's listener keys; make the key files if there are none (a resumed run keeps its keys).

    Raises:
        ConfigError: One of the files is damaged, or is another user's and others can read it. Also the client files are checked
            here, because a connecting process could not report the fault.
    """
    folder = run_folder / KEYS_FOLDER
    if not (folder / OWN_FILE).exists() or not (folder / LISTENER_FILE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        listener_public, listener_secret = _new_pair()
        own, client = _new_pair(), _new_pair()
        _write_private(folder / OWN_FILE, ClientKeys(*own, listener_public))
        _write_private(folder / CLIENT_FILE, ClientKeys(*client, listener_public))
        _write_private(folder / LISTENER_FILE, ListenerKeys(listener_public, listener_secret, own[0], client[0]))
    for path in folder.glob("*.key"):
        if (found := path.stat()).st_mode & 0o077 and found.st_uid == os.geteuid():
            log.warning("key file %s had mode %o, others could read it; it has 600 now", path, stat.S_IMODE(found.st_mode))
            path.chmod(0o600)
    remedy = "remove RUN/keys, and the run makes new ones"
    keys = _read_keys(folder / LISTENER_FILE, ListenerKeys, f"listener key: {remedy}")
    for file in (OWN_FILE, CLIENT_FILE):
        _read_keys(folder / file, ClientKeys, f"{file.removesuffix('.key')} key: {remedy}")
    return keys


def is_encrypted(config: TransportConfig, address: str) -> bool:
    """Return whether the channel at this address speaks CURVE."""
    return config.encryption == "curve" and not address.startswith("ipc://")


def load_connecting_keys(run_folder: Path) -> ClientKeys:
    """Return the keys with which a process connects: the run's own pair if the folder is the run's, else the guests' pair.

    Raises:
        ConfigError: As in `load_client_keys`.
    """
    own = run_folder / KEYS_FOLDER / OWN_FILE
    return _read_keys(own, ClientKeys, "key of this run") if own.exists() else load_client_keys(run_folder)


def load_client_keys(run_folder: Path) -> ClientKeys:
    """Return the pair for joined generators, which is also used to send weights.

    Raises:
        ConfigError: There are no keys, they are damaged, or they are open to others.
    """
    return _read_keys(run_folder / KEYS_FOLDER / CLIENT_FILE, ClientKeys, _CLIENT_KEY)


def bring_client_keys(file: Path, folder: Path) -> None:
    """Copy a `client.key` from the run's machine into `folder`, where `load_client_keys` finds it.

    Raises:
        ConfigError: There is no such file, others can read it, or it is no client key.
    """
    keys = _read_keys(file, ClientKeys, _CLIENT_KEY)
    (folder / KEYS_FOLDER).mkdir(mode=0o700)
    _write_private(folder / KEYS_FOLDER / CLIENT_FILE, keys)


def secure_server(socket: zmq.SyncSocket, keys: ListenerKeys | ClientKeys) -> None:
    """Make a listening socket accept CURVE only; call it before the socket binds, with `open_zap_socket` open."""
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    socket.zap_domain = b"asyncrl"


def secure_client(socket: zmq.SyncSocket, keys: ClientKeys, server_public: str) -> None:
    """Make a socket speak CURVE only, to this one server; call before it connects."""
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    socket.curve_serverkey = server_public.encode()


def open_zap_socket(context: zmq.SyncContext) -> zmq.SyncSocket:
    """Return the socket on which libzmq sends this context's authentication requests; answer them with `zap_reply`.

    It must be open before the first peer's handshake. Once it is closed, no peer is accepted any more.
    """
    socket = context.socket(zmq.REP)
    socket.linger = 0
    socket.bind(_ZAP_ADDRESS)
    return socket


def zap_reply(request: Sequence[bytes], allowed: Mapping[str, bytes]) -> list[bytes]:
    """Return the answer to one authentication request: 200 for an allowed key, 400 for any other (ZeroMQ RFC 27).

    Args:
        request: The frames of the request.
        allowed: Public keys as Z85 text, with their owners; every packet of a peer then carries its owner (`User-Id`).
    """
    keys = {zmq.utils.z85.decode(key): whose for key, whose in allowed.items()}
    is_known = len(request) == _ZAP_FRAMES and request[5] == b"CURVE" and request[6] in keys
    status, text = (b"200", b"OK") if is_known else (b"400", b"not a key of this run")
    return [b"1.0", request[1] if len(request) > 1 else b"", status, text, keys[request[6]] if is_known else b"", b""]


def _new_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _write_private(path: Path, keys: ListenerKeys | ClientKeys) -> None:
    write_whole(path, msgspec.json.encode(keys), private=True, onto_disk=False)


def _read_keys(path: Path, kind: type[_Keys], what: str) -> _Keys:
    """Return the keys in a file that only its owner can read."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the run's key file {path}: {error.strerror}; it is made when the run starts") from error
    if mode & 0o077:
        raise ConfigError(f"key file {path} has mode {mode:o}, others can read it; make new keys or chmod 600 it")
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no {what}") from error
