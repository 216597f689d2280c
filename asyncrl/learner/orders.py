"""What rank 0 of the learner tells the others to do with it: everything that all ranks must do together.

A step is told by its `StepBatch` itself. Every order travels as msgpack. Called by learner/crew.py and learner/follower.py;
given by learner/start.py and learner/worker.py.
"""

from __future__ import annotations

import msgspec

from asyncrl.schema.batches import StepBatch
from asyncrl.schema.control import Phase


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Open the policy; rank 0 has made or found it on disk."""

    checkpoint: str
    """Folder to go on from; empty: from the run's initial model."""


class Publish(msgspec.Struct, frozen=True, tag="publish"):
    """Help to gather the weights that generators are to have."""


class Settle(msgspec.Struct, frozen=True, tag="settle"):
    """Put what is on the device under a residency manager."""

    model_folder: str
    """What rank 0 opened the policy from."""


class Move(msgspec.Struct, frozen=True, tag="move"):
    """Bring about a phase of a shared device."""

    phase: Phase
    number: int
    """Of the controller's switch."""


class Prefetch(msgspec.Struct, frozen=True, tag="prefetch"):
    """Bring what training needs nearer."""


class Save(msgspec.Struct, frozen=True, tag="save"):
    """Help to gather a checkpoint."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End."""


Order = Begin | StepBatch | Publish | Settle | Move | Prefetch | Save | Stop
_decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)


def encode_order(order: Order) -> bytes:
    """Return the order as bytes."""
    return msgspec.msgpack.encode(order)


def decode_order(encoded: bytes) -> Order:
    """Return the order that `encode_order` wrote.

    Raises:
        msgspec.ValidationError: It is no order.
    """
    return _decoder.decode(encoded)
