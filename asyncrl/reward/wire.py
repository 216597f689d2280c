"""What the pool and its scoring processes say to each other: msgpack frames over a socket pair, no pickle.

One conversation: `Begin`, `Ready`, then for every `RewardInput` one `Judgement`, in order. A frame is its length in 4 bytes,
little-endian, and the payload.
"""

from __future__ import annotations

import struct

import msgspec

from asyncrl.config.reward import RewardConfig

LENGTH = struct.Struct("<I")


class Begin(msgspec.Struct, frozen=True):
    """Pool to process: build these rewards."""

    config: RewardConfig
    parent_pid: int
    """Whose death ends the process."""
    import_paths: tuple[str, ...] = ()
    """The pool's own `sys.path`, so that a user's modules are found in the process too."""


class Ready(msgspec.Struct, frozen=True):
    """Process to pool: the rewards are built, or why they cannot be."""

    error: str = ""
    is_config_error: bool = False


class Judgement(msgspec.Struct, frozen=True):
    """Process to pool: one sample's rewards."""

    reward: float = 0.0
    parts: dict[str, float] = {}
    error: str = ""
    seconds: float = 0.0
    retiring: bool = False
    """The process ends after this one; what it was sent beyond is not scored."""


def frame(message: msgspec.Struct) -> bytes:
    """Return a message with its length in front."""
    payload = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(payload)) + payload
