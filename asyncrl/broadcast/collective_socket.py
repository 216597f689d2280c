"""ZeroMQ under the collective media: the learner's socket and a member's, with the keys of the run. Messages: collective_wire.py.

What is not a message of this protocol is counted and left. Neither end is used by two threads at once.

Called by collective_writer.py (Desk) and collective_member.py (Line).
"""

from __future__ import annotations

import contextlib
import secrets
import socket

import msgspec
import zmq
import zmq.utils.z85

from asyncrl.broadcast.chunks import UNDECODABLE
from asyncrl.broadcast.collective_wire import MAX_MESSAGE_BYTES, FromLearner, FromMember
from asyncrl.broadcast.zeromq_keys import CurveKeys
from asyncrl.errors import BroadcastError, ConfigError

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_HEARTBEAT_MS = 2000
_SEND_QUEUE = 64
_LINGER_MS = 200
_HEARD_AT_ONCE = 1000
_FROM_MEMBER: msgspec.msgpack.Decoder[FromMember] = msgspec.msgpack.Decoder(FromMember)
_FROM_LEARNER: msgspec.msgpack.Decoder[FromLearner] = msgspec.msgpack.Decoder(FromLearner)


class Desk:
    """The learner's end: hears every member, answers by name."""

    def __init__(self, host: str, keys: CurveKeys | None) -> None:
        """Listen at a free port of `host`.

        Raises:
            ConfigError: It is no address of this machine.
        """
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = _LINGER_MS
        self._router.sndhwm = _SEND_QUEUE
        self._router.maxmsgsize = MAX_MESSAGE_BYTES
        self._router.router_mandatory = True
        self._router.router_handover = True
        self._router.heartbeat_ivl = _HEARTBEAT_MS
        self._doorman = self._open_door() if keys is not None else None
        try:
            self._router.bind(f"tcp://{socket.gethostbyname(host)}:*")
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"cannot listen at {host}: {error}; broadcast.medium.host must be an address of the learner's machine"
            ) from error
        port = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self.address = f"{host}:{port}"
        self._poller = zmq.Poller()
        for listening in filter(None, (self._router, self._doorman)):
            self._poller.register(listening, zmq.POLLIN)
        self.refused = 0
        """Messages that were none."""

    def hear(self, timeout_s: float) -> list[tuple[str, FromMember]]:
        """Wait for something to be said, and return all that has been."""
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._doorman is not None and self._doorman in ready:
            self._admit(self._doorman)
        heard: list[tuple[str, FromMember]] = []
        with contextlib.suppress(zmq.Again):
            for _ in range(_HEARD_AT_ONCE):
                member, *frames = self._router.recv_multipart(flags=zmq.NOBLOCK)
                if (message := _understood(frames)) is None:
                    self.refused += 1
                else:
                    heard.append((member.hex(), message))
        return heard

    def say(self, member: str, message: FromLearner, blob: bytes = b"") -> None:
        """Tell one member; lost where it is gone or does not listen."""
        frames = [bytes.fromhex(member), msgspec.msgpack.encode(message), blob]
        with contextlib.suppress(zmq.ZMQError):
            self._router.send_multipart(frames, flags=zmq.NOBLOCK, copy=len(blob) < 65536)

    def close(self) -> None:
        """Stop listening. Safe to repeat."""
        self._context.destroy(linger=_LINGER_MS)

    def _open_door(self) -> zmq.Socket[bytes]:
        """Speak CURVE, and open the socket that libzmq asks whom to let in."""
        assert self._keys is not None
        doorman = self._context.socket(zmq.REP)
        doorman.linger = 0
        doorman.bind(_ZAP_ADDRESS)
        self._router.curve_server = True
        self._router.curve_publickey, self._router.curve_secretkey = self._keys.public, self._keys.secret
        return doorman

    def _admit(self, doorman: zmq.Socket[bytes]) -> None:
        """Answer libzmq's question whether the bearer of a key may come in (ZeroMQ RFC 27)."""
        assert self._keys is not None
        question = doorman.recv_multipart()
        allowed = {zmq.utils.z85.decode(key) for key in self._keys.peers}
        is_known = len(question) == 7 and question[5] == b"CURVE" and question[6] in allowed
        status = (b"200", b"OK") if is_known else (b"400", b"unknown key")
        doorman.send_multipart([b"1.0", question[1], *status, b"", b""])


class Line:
    """A member's end: one connection to the learner, under a name of its own."""

    def __init__(self, address: str, keys: CurveKeys | None) -> None:
        """Connect to `host:port`, now or whenever it can be reached.

        Raises:
            BroadcastError: That is no address.
        """
        self.address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.linger = _LINGER_MS
        self._dealer.sndhwm = _SEND_QUEUE
        self._dealer.heartbeat_ivl = _HEARTBEAT_MS
        # The first byte of a ROUTER's names must not be zero.
        self._dealer.routing_id = b"m" + secrets.token_bytes(11)
        if keys is not None:
            self._dealer.curve_publickey, self._dealer.curve_secretkey = keys.public, keys.secret
            self._dealer.curve_serverkey = keys.peers[0]
        try:
            self._dealer.connect(f"tcp://{address}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise BroadcastError(f"{address!r} is not where a learner can be asked for weights: {error}") from error

    def say(self, message: FromMember) -> None:
        """Tell the learner; lost where the connection has been down for long."""
        with contextlib.suppress(zmq.Again):
            self._dealer.send(msgspec.msgpack.encode(message), flags=zmq.NOBLOCK)

    def hear(self, timeout_s: float) -> tuple[FromLearner, bytes] | None:
        """Wait for one message and its blob; None where none came.

        Raises:
            BroadcastError: It was not one of this protocol.
        """
        if not self._dealer.poll(int(timeout_s * 1000)):
            return None
        header, *blobs = self._dealer.recv_multipart()
        try:
            return _FROM_LEARNER.decode(header), b"".join(blobs)
        except UNDECODABLE as error:
            raise BroadcastError(f"{self.address} said what is not of this protocol: {error}") from error

    def close(self) -> None:
        """Hang up, once what was said last is out. Safe to repeat."""
        self._context.destroy(linger=_LINGER_MS)


def _understood(frames: list[bytes]) -> FromMember | None:
    if len(frames) != 1:
        return None
    try:
        return _FROM_MEMBER.decode(frames[0])
    except UNDECODABLE:
        return None
