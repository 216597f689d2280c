"""What is on the wire.

A packet is one ZeroMQ multipart message:

    frame 0   a `Packet` in msgpack, told apart by tag
    frame 1   of a Parcel: its messages end to end

`parse(build(p)) == p`, and whatever is not a packet raises `CodecError` and nothing else. A session is one pair of incarnations:
the listener makes its id when it accepts a peer, and every later packet names it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from asyncrl.errors import CodecError
from asyncrl.schema.codec import Frame
from asyncrl.schema.control import PROTOCOL, Hello


class Lane(enum.IntEnum):
    """Two lanes share a connection and nothing else."""

    DATA = 0
    CONTROL = 1


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

MAX_NAME = 256
"""Characters of a peer's name: it is logged, shown, and sent back."""
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
    if hello.protocol != greeting.protocol:
        raise CodecError(f"hello contradicts itself: {hello.protocol}, {greeting.protocol}")
    if not all(0 < len(text) <= MAX_NAME and text.isprintable() for text in (hello.name, hello.incarnation, greeting.token)):
        raise CodecError(f"name, incarnation and token of a hello are 1 to {MAX_NAME} printable characters")
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
