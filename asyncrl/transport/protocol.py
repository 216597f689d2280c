"""The channel contract, and the bytes of it: a duplex, acknowledged, bounded connection between one process and the controller.

Invariants, for every implementation (tests/contract/test_channel.py runs over all of them):
- A message is delivered in order within its lane, at least once while either process lives on; within one pair of incarnations
  exactly once. Ids make a repeat after a restart harmless.
- At most `window` messages per lane and direction are sent and not yet acknowledged; `send` waits for room (credit), and nothing
  is ever dropped for lack of it. Acknowledging is the receiver's act, after it has done what it promises (committed, say).
- `DATA` and `CONTROL` are separate lanes with separate windows: a full data lane never holds up a heartbeat.
- The connecting side survives a break: it reconnects by itself and sends again what was not acknowledged. The listening side
  sees `ConnectionClosed` when the peer says goodbye, is silent past the timeout, or comes back as another incarnation.
- What cannot be decoded, is too large, or comes from a peer without the keys is counted and refused, never raised into the run.
- Window and message size are the listener's; whoever connects is told them with its welcome.

The controller listens, everyone else connects. A packet is one ZeroMQ multipart message:

    frame 0   a `Packet` in msgpack, told apart by tag
    frame 1   of a Parcel: its messages end to end

`parse(build(p)) == p`, and whatever is not a packet raises `CodecError` and nothing else. A session is one pair of incarnations:
the listener makes its id when it accepts a peer, and every later packet names it.
"""

from __future__ import annotations

import enum
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from asyncrl.errors import CodecError
from asyncrl.schema.codec import MAX_MESSAGE_BYTES, Frame, Message
from asyncrl.schema.control import PROTOCOL, Hello, ProcessKind

PARCEL_BYTES = 256 << 10
"""A parcel is full from this size on; small messages share one, a larger message has its own."""
GOODBYE = "closed by the peer"
"""`closed_reason` where the other end has ended the connection in good order."""


class Lane(enum.IntEnum):
    """Two lanes share a connection and nothing else."""

    DATA = 0
    CONTROL = 1


@dataclass(slots=True)
class Delivery:
    """One received message; the sender's window opens again when it is acknowledged."""

    message: Message
    _seq: int
    _acknowledge: Callable[[int], None]

    def ack(self) -> None:
        """Tell the sender that this message is dealt with; cheap, safe to repeat, does not wait."""
        self._acknowledge(self._seq)


@dataclass(slots=True)
class RefusalCounts:
    """What a listener would not take, by reason. Never reset within a process."""

    malformed: int = 0
    oversized: int = 0
    wrong_protocol: int = 0
    unknown_peer: int = 0
    unauthenticated: int = 0

    @property
    def total(self) -> int:
        """Return the sum over all reasons."""
        return self.malformed + self.oversized + self.wrong_protocol + self.unknown_peer + self.unauthenticated


class Connection(Protocol):
    """One end of an open connection."""

    peer: Hello
    """Who is at the other end (as it said at hello)."""
    closed_reason: str
    """Why it is over; empty while it is open."""

    async def send(self, message: Message, lane: Lane = Lane.DATA) -> None:
        """Queue `message`; wait while the lane's window is full.

        Raises:
            ConnectionClosed: The other end is gone for good.
            CodecError: The message is larger than `max_message_bytes`.
        """
        ...

    def try_send(self, message: Message, lane: Lane = Lane.DATA) -> bool:
        """Queue `message` if the window has room; return whether it had."""
        ...

    async def receive(self, lane: Lane = Lane.DATA) -> Delivery:
        """Return the next message of the lane.

        Raises:
            ConnectionClosed: The other end is gone and everything it sent has been received.
        """
        ...

    def unacknowledged(self, lane: Lane = Lane.DATA) -> int:
        """Return how many sent messages the other end has not acknowledged."""
        ...

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything sent is acknowledged; return False when `timeout_s` passed first."""
        ...

    async def close(self, reason: str = "") -> None:
        """Say goodbye and release everything; what is unacknowledged is given up (call `flush` before).

        Args:
            reason: What the other end has as its `closed_reason`; empty: GOODBYE.
        """
        ...


class Listener(Protocol):
    """The controller's end: one address, many connections."""

    address: str
    """What `connect` takes, ports resolved."""
    refused: RefusalCounts
    """What was refused so far."""

    async def accept(self) -> Connection:
        """Return the next new peer. Raises ConnectionClosed once the listener is closed."""
        ...

    async def close(self) -> None:
        """Close every connection and the address."""
        ...


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Sizes and times of a link. The sizes are the listener's; a connector takes those of its listener."""

    window: int = 64
    """Most unacknowledged messages per lane and direction."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    ping_s: float = 2.0
    """A connector says that it is there this often."""
    reconnect_after_s: float = 10.0
    """A connector that hears nothing for so long opens a new socket."""
    silence_timeout_s: float = 60.0
    """A listener that hears nothing from a peer for so long ends the connection."""
    give_up_s: float = 120.0
    """A connector that cannot get back for so long ends the connection."""

    @property
    def max_packet_bytes(self) -> int:
        """The largest packet a correct peer sends: one message of the limit, and the rest of its parcel."""
        return self.max_message_bytes + 2 * PARCEL_BYTES


def new_hello(kind: ProcessKind, name: str) -> Hello:
    """Return how this start of this process introduces itself; make it once per process."""
    return Hello(PROTOCOL, kind, name, uuid.uuid4().hex, os.getpid())


class Item(NamedTuple):
    """One encoded message on its way."""

    lane: Lane
    seq: int
    body: Frame


class Parcel(NamedTuple):
    """What travels at once: acknowledgements by lane, then messages in order."""

    acks: tuple[list[int], list[int]]
    items: list[Item]


class Greeting(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    """Connector: this is me."""

    protocol: int
    hello: msgspec.Raw
    """A `Hello`; raw, so that the number before it can be judged first."""
    token: str
    """Names the connector object, so that a second one of the same process is not taken for the first."""
    session: str
    """The one I am in; empty at first."""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """Listener: you are in; a session other than the one you named starts from 0."""

    session: str
    hello: Hello
    window: int
    max_message_bytes: int


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """Listener: you cannot come in, and trying again will not help."""

    reason: str


class GreetAgain(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """Listener: something of yours is missing or I do not know you; greet me again."""


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """Either: I close this session for good."""

    session: str
    reason: str = ""


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """Connector: are you there?"""

    session: str


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="q"):
    """Listener: yes."""

    session: str


class ParcelHead(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """Either: acknowledgements by lane, and where the messages lie in the frame that follows."""

    session: str
    data_acks: list[int]
    control_acks: list[int]
    items: list[int]
    """Three numbers a message: lane, sequence number, bytes."""


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
    """Return the frames of a parcel; a message that travels alone is passed on, not copied."""
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
        CodecError: It is none.
    """
    try:
        return _decoder.decode(frame)
    except _DECODE_ERRORS as error:
        raise CodecError(f"not a packet: {error}") from error


def parse_hello(greeting: Greeting) -> Hello:
    """Return who greets; call only where `greeting.protocol` is ours.

    Raises:
        CodecError: It is not a hello of this protocol.
    """
    try:
        hello = _hello_decoder.decode(greeting.hello)
    except _DECODE_ERRORS as error:
        raise CodecError(f"not a hello of protocol {PROTOCOL}: {error}") from error
    if hello.protocol != greeting.protocol or not hello.name or not hello.incarnation:
        raise CodecError(f"hello contradicts itself: {hello}")
    return hello


def parse_parcel(head: ParcelHead, body: Sequence[Frame]) -> Parcel:
    """Return the parcel whose shape `head` tells, its messages still encoded (views of `body`).

    Args:
        head: Frame 0.
        body: All frames after it.

    Raises:
        CodecError: Shape and frames do not fit each other.
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
