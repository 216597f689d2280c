"""What learner and members of the collective media say to each other, msgpack over ZeroMQ; the weights take another way.

A member asks (`Ready`) until it is told to begin or refused; whatever it was told to begin ends with `Done` or `Failed`.

Called by collective_socket.py, collective_writer.py and collective_member.py.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_MESSAGE_BYTES = 4096
_Name = Annotated[str, Meta(max_length=64)]
_Number = Annotated[int, Meta(ge=0, le=2**62)]
_Reason = Annotated[str, Meta(max_length=1024)]


class Ready(msgspec.Struct, frozen=True, tag="ready", forbid_unknown_fields=True):
    """Member: I want this version, and take part at once when told to. Said again every second."""

    version: _Number
    fingerprint: _Name


class Done(msgspec.Struct, frozen=True, tag="done", forbid_unknown_fields=True):
    """Member: all of it is here."""

    epoch: _Number


class Failed(msgspec.Struct, frozen=True, tag="failed", forbid_unknown_fields=True):
    """Member: I am out of this epoch's group, and shall ask again if I still want the version."""

    epoch: _Number
    reason: _Reason


class Leaving(msgspec.Struct, frozen=True, tag="leaving", forbid_unknown_fields=True):
    """Member: do not wait for me."""


class BlobWanted(msgspec.Struct, frozen=True, tag="blob_wanted", forbid_unknown_fields=True):
    """Member: send me this delta."""

    name: _Name


FromMember = Ready | Done | Failed | Leaving | BlobWanted


class Noted(msgspec.Struct, frozen=True, tag="noted"):
    """Learner: I heard you; wait."""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Learner: receive this version now, in the group of this epoch, which is opened if you are not in it yet."""

    epoch: int
    version: int
    rank: int
    size: int
    store: str
    """host:port where those of a new epoch meet."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Learner: the group of this epoch is no more."""

    epoch: int
    reason: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Learner: you will not get this version."""

    version: int
    reason: str
    is_gone: bool
    """Whether asking again is of no use."""


class BlobHere(msgspec.Struct, frozen=True, tag="blob_here"):
    """Learner: the bytes follow in the next frame, or the delta is gone."""

    name: str
    is_gone: bool = False


FromLearner = Noted | Begin | Abort | Refused | BlobHere


def short(reason: object) -> str:
    """Return a reason as long as a message may carry."""
    return str(reason)[:1000]
