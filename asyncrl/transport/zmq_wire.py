"""The wire format, and one ZeroMQ socket on the running asyncio loop.

A packet is one ZeroMQ multipart message:

    frame 0   a `Packet` in msgpack, distinguished by tag
    frame 1   in a Parcel: its messages, one after the other

`parse(build(p)) == p`, and anything that is not a packet raises `CodecError` and nothing else. A session is one pair of
incarnations: the listener makes its id when it accepts a peer, and every later packet contains it.

The socket does not use pyzmq's asyncio layer (a future and a poll per frame). ZeroMQ's descriptor is edge-triggered: it becomes
readable when the socket's state may have changed, and any call on the socket may consume that edge. So after every read or write
the real state (`EVENTS`) is checked, and reading continues with `call_soon` while there are messages. Nothing polls: an idle
socket costs nothing. Sends never block. The lanes' windows limit the messages in flight of correct peers; a listener also limits
its queues, because a peer may be wrong.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence

import msgspec
import zmq
import zmq.utils.monitor

from asyncrl.errors import CodecError
from asyncrl.schema.codec import Frame
from asyncrl.schema.control import PROTOCOL, Hello
from asyncrl.transport.protocol import Item, Lane, Parcel

GOODBYE_LINGER_MS = 500
"""How long a closing socket tries in the background to get its last packets out."""
READS_PER_TURN = 64
"""Multipart messages read per turn of the event loop, so that other work is not delayed."""
MOST_DRAINED = 4096
"""Maximum number of multipart messages that `drain` reads: one from each possible peer (senders take turns)."""
MAX_NAME = 256
"""Maximum length of a peer's name, in characters: it is logged, shown, and sent back."""


# -- packets -------------------------------------------------------------------------------------------------------------


class Greeting(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    """Connector -> listener: who connects."""

    protocol: int
    hello: msgspec.Raw
    """A `Hello`; raw, so that the protocol number can be checked first."""
    token: str
    """Identifies the connector object, so that a second one of the same process is not confused with it."""
    session: str
    """The connector's current session; empty at first."""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """Listener -> connector: accepted; if the session differs from the one in the greeting, numbers start from 0."""

    session: str
    hello: Hello
    window: int
    max_message_bytes: int


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """Listener -> connector: refused for good; trying again does not help."""

    reason: str


class GreetAgain(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """Listener -> connector: packets are missing or the session is unknown; send a Greeting again."""


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """Either side: this session is closed for good."""

    session: str
    reason: str = ""


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """Connector -> listener: request for a Pong."""

    session: str


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="q"):
    """Listener -> connector: answer to a Ping."""

    session: str


class ParcelHead(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """Either side: acknowledgements by lane, and the positions of messages in the next frame."""

    session: str
    data_acks: list[int]
    control_acks: list[int]
    items: list[int]
    """Three numbers per message: lane, sequence number, size in bytes."""


Packet = Greeting | Welcome | Refusal | GreetAgain | Goodbye | Ping | Pong | ParcelHead

_LANES = tuple(Lane)
_DECODE_ERRORS = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Packet] = msgspec.msgpack.Decoder(Packet)
_hello_decoder = msgspec.msgpack.Decoder(Hello)


def build(packet: Packet) -> bytes:
    """Return frame 0 of a packet that carries no messages."""
    return _encoder.encode(packet)


def build_greeting(hello: Hello, token: str, session: str) -> bytes:
    """Return the packet a connector opens with."""
    return _encoder.encode(Greeting(hello.protocol, msgspec.Raw(_encoder.encode(hello)), token, session))


def build_parcel(session: str, parcel: Parcel) -> list[Frame]:
    """Return the frames of a parcel; a message that is sent alone is not copied."""
    shape: list[int] = []
    for item in parcel.items:
        shape += (item.lane, item.seq, len(item.body))
    head = _encoder.encode(ParcelHead(session, *parcel.acks, shape))
    if not shape:
        return [head]
    bodies = [item.body for item in parcel.items]
    return [head, b"".join(bodies) if len(bodies) > 1 else bodies[0]]


def parse(frame: Frame) -> Packet:
    """Return the packet of frame 0.

    Raises:
        CodecError: It is not a packet.
    """
    try:
        return _decoder.decode(frame)
    except _DECODE_ERRORS as error:
        raise CodecError(f"not a packet: {error}") from error


def parse_hello(greeting: Greeting) -> Hello:
    """Return the hello of a greeting; call it only if `greeting.protocol` is this protocol.

    Raises:
        CodecError: It is not a hello of this protocol.
    """
    try:
        hello = _hello_decoder.decode(greeting.hello)
    except _DECODE_ERRORS as error:
        raise CodecError(f"not a hello of protocol {PROTOCOL}: {error}") from error
    if not all(0 < len(text) <= MAX_NAME and text.isprintable() for text in (hello.name, hello.incarnation, greeting.token)):
        raise CodecError(f"name, incarnation and token of a hello are 1 to {MAX_NAME} printable characters")
    return hello


def parse_parcel(head: ParcelHead, body: Sequence[Frame]) -> Parcel:
    """Return the parcel that `head` describes, with messages still encoded (views of `body`).

    Args:
        head: Frame 0.
        body: All frames after it.

    Raises:
        CodecError: The description and the frames contradict each other.
    """
    shape, items = head.items, []
    if len(shape) % 3 or len(body) != bool(shape):
        raise CodecError(f"parcel shape of {len(shape)} numbers with {len(body)} frames")
    view, offset = memoryview(body[0] if body else b""), 0
    for lane, seq, size in zip(shape[::3], shape[1::3], shape[2::3], strict=True):
        end = offset + size
        if not 0 <= lane < len(_LANES) or seq < 0 or not offset <= end <= len(view):
            raise CodecError(f"message {seq} of lane {lane} ({size} bytes) lies outside its parcel")
        items.append(Item(_LANES[lane], seq, view[offset:end]))
        offset = end
    if offset != len(view):
        raise CodecError(f"parcel has {len(view) - offset} bytes that belong to no message")
    return Parcel((head.data_acks, head.control_acks), items)


# -- the socket ----------------------------------------------------------------------------------------------------------


def configure(socket: zmq.SyncSocket) -> None:
    """Set what both ends' sockets need; call before bind or connect."""
    socket.sndhwm = 0
    socket.rcvhwm = 0
    socket.linger = 0
    socket.heartbeat_ivl = 10_000
    socket.heartbeat_timeout = 60_000


async def terminate(context: zmq.SyncContext) -> None:
    """Wait until closed sockets have sent their last packets; it completes even if the caller is cancelled."""
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, context.term))


class LoopSocket:
    """Owns a bound or connected socket and its place in the event loop until `close`."""

    def __init__(self, socket: zmq.SyncSocket, on_message: Callable[[list[zmq.Frame]], object]) -> None:
        """Start reading.

        Args:
            socket: Configured; this object closes it.
            on_message: Called in the event loop with the frames of each message; must not raise.
        """
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._is_reading_soon = False
        self._fd = socket.FD
        self._loop.add_reader(self._fd, self._read)
        self.read_soon()

    def send(self, frames: Sequence[Frame]) -> bool:
        """Send one multipart message; large frames are not copied.

        Returns:
            False if it cannot be sent (a router's peer is gone, or the socket is closed).
        """
        if self._socket.closed:
            return False
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except (zmq.Again, zmq.ZMQError) as error:
            if error.errno not in {zmq.EAGAIN, zmq.EHOSTUNREACH, zmq.ETERM, zmq.ENOTSOCK}:
                raise
            return False
        finally:
            self.read_soon()
        return True

    def read_soon(self) -> None:
        """Check the socket's state at the loop's next turn."""
        if not self._is_reading_soon and not self._socket.closed:
            self._is_reading_soon = True
            self._loop.call_soon(self._read_scheduled)

    def drain(self) -> None:
        """Read what is there now, with a limit, because a sender may never stop."""
        for _ in range(0, MOST_DRAINED, READS_PER_TURN):
            if not self._read():
                return

    def close(self, linger_ms: int) -> None:
        """Leave the event loop and close; unsent messages are kept in the background for `linger_ms`."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(linger_ms)

    def _read_scheduled(self) -> None:
        self._is_reading_soon = False
        self._read()

    def _read(self) -> bool:
        """Read up to READS_PER_TURN messages; return whether there may be more."""
        socket = self._socket
        if socket.closed or not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return False
        for _ in range(READS_PER_TURN):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            self._on_message(frames)
            if socket.closed:
                return False
        self.read_soon()
        return True


class SocketWatch:
    """Reports events below a socket (handshakes, broken links) until `close`."""

    def __init__(self, watched: zmq.SyncSocket, events: int, on_event: Callable[[int], None]) -> None:
        """Start watching.

        Args:
            watched: The socket; call `close` before it is closed.
            events: The events to report, as a sum of `zmq.EVENT_*`.
            on_event: Called in the event loop with each event.
        """
        self._watched = watched
        reader, address = watched.context.socket(zmq.PAIR), f"inproc://watch-{uuid.uuid4().hex}"
        reader.rcvhwm = 0  # events are never waited with: a loop that stands still would hold up ZeroMQ's own thread, then itself
        watched.monitor(address, events)
        reader.connect(address)
        parse = zmq.utils.monitor.parse_monitor_message
        self._socket = LoopSocket(reader, lambda frames: on_event(int(parse([frame.bytes for frame in frames])["event"])))

    def close(self) -> None:
        """Stop watching; safe to repeat.

        The reader is closed last: ZeroMQ's own thread holds a lock while it delivers an event; without a reader it would hold it
        for ever, and this call would block.
        """
        if not self._watched.closed:
            self._watched.monitor(None, 0)
            self._socket.close(0)
