"""Bytes on the wire, both ways: the union of everything that may cross a channel, each one msgpack map with a `type` tag.

Invariants: `decode(encode(m)) == m`; whatever is not a message raises `CodecError` and nothing else; unknown fields are ignored
and missing ones take their defaults, so a field may be added in either order of upgrade. Nothing here is pickled or executed.
"""

from __future__ import annotations

import functools
import operator

import msgspec

from asyncrl.errors import CodecError
from asyncrl.schema import control, samples, weights  # noqa: F401 - they define the messages
from asyncrl.schema.control import Message as Message

MESSAGE_TYPES: tuple[type[Message], ...] = tuple(Message.__subclasses__())
"""Everything that may travel over a channel, told apart by tag: what the modules imported above define."""
MAX_MESSAGE_BYTES = 256 << 20
"""Default limit of one message."""
Frame = bytes | memoryview

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(functools.reduce(operator.or_, MESSAGE_TYPES))


def encode(message: Message, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Return the bytes of `message`.

    Raises:
        CodecError: The message is larger than `max_bytes` or holds something that cannot be encoded.
    """
    try:
        encoded = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CodecError(f"{type(message).__name__} cannot be encoded: {error}") from error
    if len(encoded) > max_bytes:
        raise CodecError(
            f"{type(message).__name__} takes {len(encoded)} bytes, the limit is {max_bytes}; "
            "raise transport.max_message_bytes or send less at once"
        )
    return encoded


def decode(frame: Frame, max_bytes: int = MAX_MESSAGE_BYTES) -> Message:
    """Return the message that `frame` holds; its byte fields are `bytes` of their own.

    Raises:
        CodecError: Truncated, malformed, too large, of an unknown type, or with a field out of its range.
    """
    if len(frame) > max_bytes:
        raise CodecError(f"message of {len(frame)} bytes refused, the limit is {max_bytes} (transport.max_message_bytes)")
    try:
        return _decoder.decode(frame)
    # What msgspec may raise on hostile bytes: its own errors, bad UTF-8 (ValueError), nesting and length bombs.
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise CodecError(f"not a message ({len(frame)} bytes): {error}") from error
