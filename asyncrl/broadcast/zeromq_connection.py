"""One DEALER connection of a `zeromq` fetch: requests out, answers in, and the news that it broke.

Invariants:
- Nothing is queued for a peer that is not connected (`send` says so), so whatever was asked for before a break is lost for sure.
- A part is not copied here: its bytes lie in the message until they are let go of.

Called by zeromq_fetch.py.
"""

from __future__ import annotations

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from asyncrl.broadcast.chunks import MAX_REQUEST_BYTES, UNDECODABLE, ChunkReply, ChunkRequest, PlaceReply, PlaceRequest
from asyncrl.broadcast.zeromq_keys import CurveKeys
from asyncrl.broadcast.zeromq_server import HEARTBEAT_MS, SEND_QUEUE
from asyncrl.errors import BroadcastError

FAREWELL_MS = 500
_BROKEN = zmq.EVENT_DISCONNECTED
_UNREACHABLE = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_Reply = ChunkReply | PlaceReply


class Connection:
    """A connection to whoever serves parts.

    Args:
        context: Of the reader.
        address: Endpoint.
        chunk_bytes: Largest part to expect.
        keys: Own pair and, as the first peer, the key of the other end; None: plain.

    Raises:
        BroadcastError: The address is none.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, chunk_bytes: int, keys: CurveKeys | None) -> None:
        self.address = address
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.immediate = True
        self.socket.rcvhwm = self.socket.sndhwm = SEND_QUEUE
        self.socket.maxmsgsize = chunk_bytes + MAX_REQUEST_BYTES
        self.socket.heartbeat_ivl = HEARTBEAT_MS
        if keys is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey = keys.public, keys.secret
            self.socket.curve_serverkey = keys.peers[0]
        self.news = self.socket.get_monitor_socket(_BROKEN | _UNREACHABLE | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            self.socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise BroadcastError(f"cannot fetch weights from {address}: {error}") from error

    def send(self, request: ChunkRequest | PlaceRequest) -> bool:
        """Send without waiting; return whether there was a connection to send over."""
        try:
            self.socket.send(msgspec.msgpack.encode(request), flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> tuple[ChunkReply | PlaceReply, memoryview]:
        """Take one answer that is there already.

        Returns:
            The answer, and the bytes of its part where the socket put them; empty where it has none.

        Raises:
            BroadcastError: It is no answer, or its bytes are not as many as it says.
        """
        header = self.socket.recv(flags=zmq.NOBLOCK)
        try:
            reply: ChunkReply | PlaceReply = msgspec.msgpack.decode(header, type=_Reply)  # type: ignore[arg-type]
        except UNDECODABLE as error:
            self._skip()
            raise BroadcastError(f"{self.address} answered what is no answer: {error}") from error
        part = self.socket.recv(flags=zmq.NOBLOCK, copy=False).buffer if self.socket.rcvmore else memoryview(b"")
        if self._skip() or len(part) != (reply.num_bytes if isinstance(reply, ChunkReply) else 0):
            raise BroadcastError(f"{self.address} answered with {len(part)} bytes that do not fit {reply}")
        return reply, part

    def take_news(self) -> tuple[bool, bool]:
        """Return whether the connection broke since, and whether it could not be made."""
        broken = unreachable = False
        while self.news.poll(0):
            event = recv_monitor_message(self.news)["event"]
            broken |= bool(event & _BROKEN)
            unreachable |= bool(event & _UNREACHABLE)
        return broken, unreachable

    def close(self, linger_ms: int = 0) -> None:
        """Close both sockets; what was sent still goes out for `linger_ms`, in the background."""
        self.socket.disable_monitor()
        self.news.close(linger=0)
        self.socket.close(linger=linger_ms)

    def _skip(self) -> bool:
        """Drop the rest of the message; return whether there was any."""
        had_more = False
        while self.socket.rcvmore:
            self.socket.recv(flags=zmq.NOBLOCK)
            had_more = True
        return had_more
