"""Bytes on the wire, both ways: the union of everything that may cross a channel, and how it becomes frames.

A message is one msgpack map with a `type` tag (frame 0). A byte field of at least `OUT_OF_BAND_BYTES` leaves the map: an
extension value with its frame number takes its place and the bytes themselves travel as a frame of their own, never copied by us.

Invariants: `decode(encode(m)) == m`; whatever is not a message raises `CodecError` and nothing else; unknown fields are ignored
and missing ones take their defaults, so a field may be added in either order of upgrade. Nothing here is pickled or executed.
Called by transport/ for every message and by buffer/ for what the ledger stores.
"""

from __future__ import annotations

import operator
import typing
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from asyncrl.errors import CodecError
from asyncrl.schema.batches import GroupsTaken, StepBatch, StepDone
from asyncrl.schema.control import (
    AbortGroup,
    Checkpoint,
    CheckpointDone,
    EngineReady,
    EngineRoom,
    Fault,
    Heartbeat,
    JoinTerms,
    LearnerReady,
    LoadModel,
    ModelsReady,
    Pause,
    PhaseReached,
    Resume,
    SetPhase,
    Shutdown,
)
from asyncrl.schema.samples import GroupWork, InferRequest, InferResult, Sample, SampleFailure, Score, ScoredGroup, ScoreRequest
from asyncrl.schema.weights import VersionLive, WeightsAvailable

Message = (
    GroupWork
    | Sample
    | SampleFailure
    | ScoreRequest
    | InferRequest
    | InferResult
    | Score
    | ScoredGroup
    | GroupsTaken
    | StepBatch
    | StepDone
    | WeightsAvailable
    | VersionLive
    | Heartbeat
    | LearnerReady
    | JoinTerms
    | LoadModel
    | ModelsReady
    | EngineReady
    | EngineRoom
    | Pause
    | Resume
    | SetPhase
    | PhaseReached
    | Shutdown
    | AbortGroup
    | Checkpoint
    | CheckpointDone
    | Fault
)
"""Everything that may travel over a channel, told apart by tag."""

MESSAGE_TYPES: tuple[type[msgspec.Struct], ...] = typing.get_args(Message)
OUT_OF_BAND_BYTES = 64 << 10
"""Byte fields from this size on travel as frames of their own: below it, copying is cheaper than walking the message."""
MAX_MESSAGE_BYTES = 256 << 20
"""Default limit of one message, all frames together."""

Frame = bytes | memoryview
SizeProbe = Callable[[Any], int]

_FRAME_EXT_CODE = 1
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
# What msgspec may raise on hostile bytes: its own errors, bad UTF-8 (ValueError), nesting and length bombs.
_DECODE_ERRORS = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError)


def encode(message: Message, max_bytes: int = MAX_MESSAGE_BYTES) -> list[Frame]:
    """Return the frames of `message`: the map, then its large byte fields in order.

    Args:
        message: Any member of the union.
        max_bytes: Limit on the sum of all frames.

    Returns:
        At least one frame; the large fields are the message's own objects, not copies.

    Raises:
        CodecError: The message is larger than `max_bytes` or holds something that cannot be encoded.
    """
    probe = _largest_field.get(type(message))
    try:
        if probe is None or probe(message) < OUT_OF_BAND_BYTES:
            frames: list[Frame] = [_encoder.encode(message)]
        else:
            frames = _encode_out_of_band(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CodecError(f"{type(message).__name__} cannot be encoded: {error}") from error
    size = len(frames[0]) if len(frames) == 1 else sum(map(len, frames))
    if size > max_bytes:
        raise CodecError(
            f"{type(message).__name__} takes {size} bytes, the limit is {max_bytes}; "
            "raise transport.max_message_bytes or send less at once"
        )
    return frames


def decode(frames: Sequence[Frame], max_bytes: int = MAX_MESSAGE_BYTES) -> Message:
    """Return the message that `frames` carry.

    Args:
        frames: As `encode` made them; any buffer will do.
        max_bytes: Limit on the sum of all frames.

    Returns:
        A member of the union; its byte fields are `bytes` of their own.

    Raises:
        CodecError: Truncated, malformed, too large, of an unknown type, or with a field out of its range.
    """
    if not frames:
        raise CodecError("a message has at least one frame, got none")
    size = len(frames[0]) if len(frames) == 1 else sum(map(len, frames))
    if size > max_bytes:
        raise CodecError(f"message of {size} bytes refused, the limit is {max_bytes} (transport.max_message_bytes)")
    try:
        if len(frames) == 1:
            return _decoder.decode(frames[0])
        return _decode_out_of_band(frames)
    except _DECODE_ERRORS as error:
        raise CodecError(f"not a message ({len(frames)} frames, {size} bytes): {error}") from error


def _encode_out_of_band(message: Message) -> list[Frame]:
    """Move every large byte field out of the map into a frame of its own."""
    frames: list[Frame] = [b""]

    def lift(value: object) -> object:
        if isinstance(value, bytes):
            if len(value) < OUT_OF_BAND_BYTES:
                return value
            frames.append(value)
            return msgspec.msgpack.Ext(_FRAME_EXT_CODE, (len(frames) - 1).to_bytes(4, "big"))
        if isinstance(value, dict):
            return {key: lift(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [lift(item) for item in value]
        return value

    frames[0] = _encoder.encode(lift(msgspec.to_builtins(message, builtin_types=(bytes,))))
    return frames


def _decode_out_of_band(frames: Sequence[Frame]) -> Message:
    """Put the frames back where the map points to them, each exactly once."""
    used: set[int] = set()

    def fetch(code: int, raw: memoryview) -> bytes:
        index = int.from_bytes(raw, "big")
        if code != _FRAME_EXT_CODE or not 0 < index < len(frames) or index in used:
            raise ValueError(f"extension {code} points to frame {index} of {len(frames)}")
        used.add(index)
        frame = frames[index]
        return frame if isinstance(frame, bytes) else bytes(frame)

    fields = msgspec.msgpack.decode(frames[0], ext_hook=fetch)
    if len(used) != len(frames) - 1:
        raise ValueError(f"{len(frames) - 1 - len(used)} frames belong to no field")
    return cast("Message", msgspec.convert(fields, Message, builtin_types=(bytes,)))


def _bytes_probe(kind: object) -> SizeProbe | None:
    """Return a function that gives the size of the largest byte field below a value of type `kind`; None where it has none."""
    if kind is bytes:
        return len
    arguments = typing.get_args(kind)
    if arguments:
        return _container_probe(kind, arguments)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _struct_probe(kind)
    return None


def _container_probe(kind: object, arguments: tuple[object, ...]) -> SizeProbe | None:
    """Probe `tuple[X, ...]` and `X | None`; a struct that needs another shape extends this."""
    inner = [probe for probe in map(_bytes_probe, arguments) if probe]
    if not inner:
        return None
    (probe,) = inner
    if typing.get_origin(kind) is tuple:
        return lambda items: max(map(probe, items), default=0)
    return lambda value: 0 if value is None else probe(value)


def _struct_probe(kind: type[msgspec.Struct]) -> SizeProbe | None:
    """Probe every field of a struct that can hold bytes."""
    hints = typing.get_type_hints(kind)
    direct = [name for name, hint in hints.items() if hint is bytes]
    nested = [
        (operator.attrgetter(name), probe) for name, hint in hints.items() if hint is not bytes and (probe := _bytes_probe(hint))
    ]
    getter = operator.attrgetter(*direct) if direct else None

    def largest(value: object) -> int:
        size = 0
        if getter is not None:
            fields = getter(value)
            size = max(map(len, fields)) if len(direct) > 1 else len(fields)
        for get, probe in nested:
            size = max(size, probe(get(value)))
        return size

    return largest if direct or nested else None


_largest_field: dict[type, SizeProbe] = {kind: probe for kind in MESSAGE_TYPES if (probe := _struct_probe(kind))}
