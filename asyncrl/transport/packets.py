"""The bytes of one ZeroMQ multipart message: who speaks to whom, acknowledgements, and many small messages in one frame.

    frame 0   a `Packet` in msgpack, told apart by tag
    frame 1   of a Parcel: the first frames of all its messages end to end
    frame 2.. of a Parcel: large byte fields, in the order of the messages they belong to

Invariant: `parse(build(p)) == p`, and whatever is not a packet raises `CodecError` and nothing else. A session is one pair of
incarnations: the listener makes its id when it accepts a peer, and every later packet names it.
Used by listener.py, connector.py and link.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from asyncrl.errors import CodecError
from asyncrl.schema.codec import Frame
from asyncrl.schema.control import PROTOCOL, Hello
from asyncrl.transport.channel import Lane
from asyncrl.transport.endpoint import Item, Parcel

_INTS_PER_ITEM = 4
_LANES = tuple(Lane)


class Terms(msgspec.Struct, frozen=True, array_like=True):
    """What one end takes; the other sends no more than that."""

    window: int
    max_message_bytes: int


class Greeting(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    """Connector: this is me."""

    protocol: int
    hello: msgspec.Raw
    """A `Hello`; raw, so that the number before it can be judged first."""
    token: str
    """Names the connector object, so that a second one of the same process is not taken for the first."""
    session: str
    """The one I am in; empty at first."""
    terms: Terms


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """Listener: you are in; a session other than the one you named starts from 0."""

    session: str
    hello: Hello
    terms: Terms


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """Listener: you cannot come in, and trying again will not help."""

    reason: str


class Stranger(msgspec.Struct, frozen=True, array_like=True, tag="s"):
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
    """Either: acknowledgements by lane, and the shape of the messages in the frames that follow."""

    session: str
    data_acks: list[int]
    control_acks: list[int]
    items: list[int]
    """Four numbers a message: lane, sequence number, bytes of its first frame, number of its other frames."""


Packet = Greeting | Welcome | Refusal | Stranger | Goodbye | Ping | Pong | ParcelHead

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Packet] = msgspec.msgpack.Decoder(Packet)
_hello_decoder = msgspec.msgpack.Decoder(Hello)


def build(packet: Packet) -> bytes:
    """Return frame 0 of a packet that carries no messages."""
    return _encoder.encode(packet)


def build_greeting(hello: Hello, token: str, session: str, terms: Terms) -> bytes:
    """Return the packet a connector opens with."""
    return _encoder.encode(Greeting(hello.protocol, msgspec.Raw(_encoder.encode(hello)), token, session, terms))


def build_parcel(session: str, parcel: Parcel) -> list[Frame]:
    """Return the frames of a parcel; large byte fields are passed on, not copied."""
    shape: list[int] = []
    heads: list[Frame] = []
    tails: list[Frame] = []
    for item in parcel.items:
        frames = item.frames
        head = frames[0]
        shape += (item.lane, item.seq, len(head), len(frames) - 1)
        heads.append(head)
        if len(frames) > 1:
            tails += frames[1:]
    first = _encoder.encode(ParcelHead(session, *parcel.acks, shape))
    if not heads:
        return [first]
    return [first, b"".join(heads) if len(heads) > 1 else heads[0], *tails]


def parse(frame: Frame) -> Packet:
    """Return the packet of frame 0.

    Raises:
        CodecError: It is none.
    """
    try:
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise CodecError(f"not a packet: {error}") from error


def parse_hello(greeting: Greeting) -> Hello:
    """Return who greets; call only where `greeting.protocol` is ours.

    Raises:
        CodecError: It is not a hello of this protocol.
    """
    try:
        hello = _hello_decoder.decode(greeting.hello)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise CodecError(f"not a hello of protocol {PROTOCOL}: {error}") from error
    if hello.protocol != greeting.protocol or not hello.name or not hello.incarnation or greeting.terms.window < 1:
        raise CodecError(f"hello contradicts itself: {hello}, {greeting.terms}")
    return hello


def parse_parcel(head: ParcelHead, body: Sequence[Frame]) -> Parcel:
    """Return the parcel whose shape `head` tells, its messages still encoded (views of `body`).

    Args:
        head: Frame 0.
        body: All frames after it.

    Raises:
        CodecError: Shape and frames do not fit each other.
    """
    parcel = Parcel((head.data_acks, head.control_acks))
    shape = head.items
    if not shape:
        if body:
            raise CodecError(f"parcel of no messages comes with {len(body)} frames")
        return parcel
    if len(shape) % _INTS_PER_ITEM or not body:
        raise CodecError(f"parcel shape of {len(shape)} numbers with {len(body)} frames")
    heads = memoryview(body[0])
    offset, tail = 0, 1
    for lane, seq, size, num_tails in zip(shape[::4], shape[1::4], shape[2::4], shape[3::4], strict=True):
        if lane not in _LANES or min(seq, size, num_tails) < 0 or offset + size > len(heads) or tail + num_tails > len(body):
            raise CodecError(f"message {seq} of lane {lane} ({size} bytes, {num_tails} more frames) lies outside its parcel")
        frames: list[Frame] = [heads[offset : offset + size]]
        num_bytes = size
        if num_tails:
            tails = body[tail : tail + num_tails]
            frames += tails
            num_bytes += sum(map(len, tails))
            tail += num_tails
        offset += size
        parcel.items.append(Item(_LANES[lane], seq, frames, num_bytes))
    if offset != len(heads) or tail != len(body):
        raise CodecError(f"parcel has {len(heads) - offset} bytes and {len(body) - tail} frames that belong to no message")
    return parcel
