"""ZeroMQ sockets of the weight media, with the keys of the run: the learner's end answers peers that hold the right key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from asyncrl.errors import BroadcastError
from asyncrl.transport.security import (
    CLIENT_FILE,
    GUEST,
    KEYS_FOLDER,
    ClientKeys,
    load_client_keys,
    open_zap_socket,
    secure_client,
    secure_server,
    zap_reply,
)

WINDOW = 8
SEND_QUEUE = 4 * WINDOW
"""libzmq reports reads only every half queue: a queue of two windows would be full while one window is in flight."""
HEARTBEAT_MS = 2000
FAREWELL_MS = 500


def keys_of_run(run_folder: Path) -> ClientKeys | None:
    """Return the guests' key pair of a run with encrypted channels, None for a run without keys.

    For weights, both ends use this pair and accept no other.
    """
    return load_client_keys(run_folder) if (run_folder / KEYS_FOLDER / CLIENT_FILE).exists() else None


class Router:
    """A ROUTER that accepts only peers with the right keys; used from one thread once it is bound.

    Args:
        keys: Keys of the run; None: no encryption, all peers are accepted.
        max_bytes: Longest message that is accepted.
        bind: Endpoint to listen at.
        knob: Name of the option under `broadcast.medium`, for the error.

    Raises:
        BroadcastError: The socket cannot listen at the endpoint.
    """

    def __init__(self, keys: ClientKeys | None, max_bytes: int, bind: str, knob: str) -> None:
        self._allowed = {keys.public: GUEST} if keys else {}
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()
        self._zap = open_zap_socket(self.context) if keys else None
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.sndhwm, self.socket.rcvhwm = SEND_QUEUE, 2 * WINDOW
        self.socket.maxmsgsize = max_bytes
        self.socket.router_mandatory = True
        self.socket.router_handover = True
        self.socket.heartbeat_ivl = HEARTBEAT_MS
        if keys is not None:
            secure_server(self.socket, keys)
        try:
            self.socket.bind(bind)
        except zmq.ZMQError as error:
            self.close()
            instead = f"broadcast.medium.{knob} must be an address of this machine, with port * if several processes share it"
            raise BroadcastError(f"cannot listen at {bind}: {error}; {instead}") from error
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        for listening in filter(None, (self._zap, self.socket)):
            self._poller.register(listening, zmq.POLLIN)

    def poll(self, timeout_ms: int) -> bool:
        """Wait for a message and return whether there is one; new connections are accepted or refused meanwhile."""
        ready = dict(self._poller.poll(timeout_ms))
        if self._zap is not None and self._zap in ready:
            self._zap.send_multipart(zap_reply(self._zap.recv_multipart(), self._allowed))
        return self.socket in ready

    def say(self, peer: bytes, message: msgspec.Struct, *parts: bytes | memoryview) -> bool:
        """Send to a peer without waiting; return False if the peer is gone or does not read. The peer may ask again."""
        try:
            self.socket.send_multipart([peer, msgspec.msgpack.encode(message), *parts], flags=zmq.NOBLOCK, copy=not parts)
        except zmq.ZMQError:  # EHOSTUNREACH, EAGAIN
            return False
        return True

    def close(self) -> None:
        """Close both sockets and the context."""
        self.context.destroy(linger=0)


def decode(frames: Sequence[bytes], kind: Any) -> Any:  # noqa: ANN401 - a struct, or a union of some
    """Return the message of one frame; None if it is not a message of this kind."""
    try:
        return msgspec.msgpack.decode(frames[0], type=kind) if len(frames) == 1 else None
    except (msgspec.DecodeError, RecursionError):  # RecursionError: nested too deeply
        return None


def ask(dealer: zmq.Socket[bytes], message: msgspec.Struct) -> bool:
    """Send to the other end without waiting; return False if the queue is full."""
    try:
        dealer.send(msgspec.msgpack.encode(message), flags=zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def open_dealer(
    context: zmq.Context[zmq.Socket[bytes]], address: str, keys: ClientKeys | None, max_bytes: int = -1, name: bytes = b""
) -> zmq.Socket[bytes]:
    """Return a DEALER that connects to `address`, now or as soon as the address can be reached.

    Raises:
        BroadcastError: The address is not valid.
    """
    dealer = context.socket(zmq.DEALER)
    dealer.linger = FAREWELL_MS
    dealer.sndhwm = dealer.rcvhwm = SEND_QUEUE
    dealer.maxmsgsize = max_bytes
    if name:
        dealer.routing_id = name
    dealer.heartbeat_ivl = HEARTBEAT_MS
    if keys is not None:
        secure_client(dealer, keys, keys.public)
    try:
        dealer.connect(address)
    except zmq.ZMQError as error:
        dealer.close(linger=0)
        raise BroadcastError(f"cannot fetch weights from {address}: {error}") from error
    return dealer
