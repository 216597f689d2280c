"""The channel contract: a duplex, acknowledged, bounded connection between one process and the controller.

Invariants, for every implementation (tests/contract/test_channel.py runs over all of them):
- A message is delivered in order within its lane, at least once while either process lives on; within one pair of incarnations
  exactly once. Ids make a repeat after a restart harmless.
- At most `window` messages per lane and direction are sent and not yet acknowledged; `send` waits for room (credit), and nothing
  is ever dropped for lack of it. Acknowledging is the receiver's act, after it has done what it promises (committed, say).
- `DATA` and `CONTROL` are separate lanes with separate windows: a full data lane never holds up a heartbeat.
- The connecting side survives a break: it reconnects by itself and sends again what was not acknowledged. The listening side
  sees `ConnectionClosed` when the peer says goodbye, is silent past the timeout, or comes back as another incarnation.
- What cannot be decoded, is too large, or comes from a peer without the keys is counted and refused, never raised into the run.

The controller listens, everyone else connects; called by pipeline.py and the process entry points it wires.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from asyncrl.schema.codec import Message
from asyncrl.schema.control import Hello

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
    _acknowledge: Callable[[], None]

    def ack(self) -> None:
        """Tell the sender that this message is dealt with; cheap, safe to repeat, does not wait."""
        self._acknowledge()


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


@dataclass(slots=True)
class ConnectionCounts:
    """Messages and bytes of one connection since it opened."""

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    blocked_s: float = field(default=0.0)
    """Total time `send` waited for credit."""


class Connection(Protocol):
    """One end of an open connection."""

    @property
    def peer(self) -> Hello:
        """Who is at the other end (as it said at hello)."""
        ...

    @property
    def counts(self) -> ConnectionCounts:
        """Traffic so far."""
        ...

    @property
    def closed_reason(self) -> str:
        """Why it is over; empty while it is open."""
        ...

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

    @property
    def address(self) -> str:
        """The address that `connect` takes, ports resolved."""
        ...

    @property
    def refused(self) -> RefusalCounts:
        """What was refused so far."""
        ...

    async def accept(self) -> Connection:
        """Return the next new peer. Raises ConnectionClosed once the listener is closed."""
        ...

    async def close(self) -> None:
        """Close every connection and the address."""
        ...
