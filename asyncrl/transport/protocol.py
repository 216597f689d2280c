"""The channel contract: a duplex, acknowledged, bounded connection between one process and the controller.

Invariants, for every implementation (tests/contract/test_channel.py runs over all of them):
- Messages are delivered in order within their lane: exactly once between the same two incarnations, at least once if one of the
  processes was restarted. Ids make a repeat after a restart harmless.
- At most `window` messages per lane and direction are sent and not yet acknowledged; `send` waits for room (credit), and nothing
  is ever dropped for lack of room. The receiver acknowledges a message once its work is done (for example, committed).
- `DATA` and `CONTROL` are separate lanes with separate windows: a full data lane never delays a heartbeat.
- The connecting side survives a break: it reconnects by itself and sends again what was not acknowledged. The listening side
  sees `ConnectionClosed` when the peer says goodbye, is silent past the timeout, or comes back as another incarnation.
- A message that cannot be decoded, is too large, or comes from a peer without the keys is counted and refused, without an error.
- The listener decides window and message size; its welcome message tells them to the connecting side.

Inside, a connection exchanges `Parcel`s with the other end through `wire`, which may be lost and replaced. The connection is
passive: `send` puts an encoded message into the outbox, which is handed to the wire at the event loop's next turn, or at once
when a parcel is full; arriving parcels are passed to `deliver`. `resend_all` queues every unacknowledged message again, and
`start_over` does so for a peer that was restarted. The sending half of a lane holds unacknowledged messages in the order of their
numbers; the receiving half accepts numbers one by one, so it has seen exactly `[0, expected)` and recognises a repeat by its
number alone. Everything runs on one event loop, without tasks.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import sys
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from asyncrl.errors import CodecError, ConnectionClosed, shown
from asyncrl.schema.codec import MAX_MESSAGE_BYTES, Frame, Message, decode, encode
from asyncrl.schema.control import PROTOCOL, Hello, ProcessKind

PARCEL_BYTES = 256 << 10
"""A parcel is full from this size on; small messages share one, a larger message has its own."""
GOODBYE = "closed by the peer"
"""`closed_reason` if the other end has ended the connection in an orderly way."""
log = logging.getLogger(__name__)


class Lane(enum.IntEnum):
    """Two lanes share a connection and nothing else."""

    DATA = 0
    CONTROL = 1


class Item(NamedTuple):
    """One encoded message to send."""

    lane: Lane
    seq: int
    body: Frame


class Parcel(NamedTuple):
    """What is sent together: acknowledgements by lane, then messages in order."""

    acks: tuple[list[int], list[int]]
    items: list[Item]


@dataclass(slots=True)
class Delivery:
    """Received messages that are handled together; acknowledging them gives the sender's window room again."""

    messages: list[Message]
    _seqs: list[int]
    _acknowledge: Callable[[list[int]], None]

    @property
    def message(self) -> Message:
        """Return the first message; from `receive` it is the only one."""
        return self.messages[0]

    def ack(self) -> None:
        """Tell the sender that the messages are handled; cheap, safe to repeat, does not wait."""
        self._acknowledge(self._seqs)


Refused = Counter[str]
"""Number of refused messages, by reason: malformed, oversized, wrong protocol, unknown peer, unauthenticated. Never reset."""


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Sizes and times of a link. A connector uses its listener's sizes."""

    window: int = 64
    """Most unacknowledged messages per lane and direction."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    ping_s: float = 2.0
    """A connector sends a ping this often."""
    reconnect_after_s: float = 10.0
    """A connector that receives nothing for this long opens a new socket."""
    silence_timeout_s: float = 60.0
    """A listener that receives nothing from a peer for this long ends the connection."""
    give_up_s: float = 120.0
    """A connector that cannot reconnect for this long ends the connection."""

    @property
    def max_packet_bytes(self) -> int:
        """The largest packet that a correct peer sends: one message of maximum size, and the rest of its parcel."""
        return self.max_message_bytes + 2 * PARCEL_BYTES


def new_hello(kind: ProcessKind, name: str) -> Hello:
    """Return the hello message of this process, with a new incarnation; call it once per process."""
    return Hello(PROTOCOL, kind, name, uuid.uuid4().hex, os.getpid())


Wire = Callable[[Parcel], bool]
"""Sends a parcel; returns False if it is lost because the wire is gone."""


@dataclass(slots=True)
class OutLane:
    """The sending half of a lane: the unacknowledged messages, and whether there is room for more."""

    next_seq: int = 0
    unacked: dict[int, Message] = field(default_factory=dict)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lets senders wait for room one at a time, in the order of their calls."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever something was acknowledged or the connection ended."""


@dataclass(slots=True)
class InLane:
    """The receiving half of a lane: messages in order, waiting to be received and then acknowledged."""

    pump_soon: Callable[[], None]
    expected: int = 0
    inbox: deque[tuple[int, Message]] = field(default_factory=deque)
    unhandled: set[int] = field(default_factory=set)
    """Numbers that arrived and are not acknowledged yet."""
    acks: list[int] = field(default_factory=list)
    """Numbers to tell the sender about with the next packet."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever a message arrived or the connection ended."""

    def acknowledge(self, seqs: list[int]) -> None:
        """Queue an acknowledgement for each message, once, however often it is called."""
        fresh = self.unhandled.intersection(seqs)
        if fresh:
            self.unhandled -= fresh
            self.acks += sorted(fresh)
            self.pump_soon()


@dataclass(eq=False)
class Connection:
    """One end of an open connection, over the `wire` that is set; at first nothing is sent or received, and there is no wire."""

    peer: Hello
    """The hello message of the other end."""
    window: int
    """Most unacknowledged messages per lane and direction."""
    max_message_bytes: int
    on_close: Callable[[Connection, str], Awaitable[None]]
    """Awaited by `close`: it sends goodbye with the reason and releases the wire; safe to repeat."""
    refused: Refused
    """Counts the messages that were refused."""

    def __post_init__(self) -> None:
        self.closed_reason = ""
        """Why the connection has ended; empty while it is open."""
        self.wire: Wire | None = None
        """None while the other end cannot be reached; messages then wait in the outbox."""
        self._out = (OutLane(), OutLane())
        self._in = (InLane(self._pump_soon), InLane(self._pump_soon))
        self._outbox: list[Item] = []
        self._outbox_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._is_scheduled = self._has_warned = False

    async def send(self, message: Message, lane: Lane = Lane.DATA) -> None:
        """Queue `message`; wait while the lane's window is full.

        Raises:
            ConnectionClosed: The other end is gone for good.
            CodecError: The message is larger than `max_message_bytes`.
        """
        if self.try_send(message, lane):
            return
        out = self._out[lane]
        async with out.turn:
            while len(out.unacked) >= self.window:
                self._raise_if_closed()
                out.changed.clear()
                await out.changed.wait()
            self._raise_if_closed()
            self._enqueue(message, lane, out)

    def try_send(self, message: Message, lane: Lane = Lane.DATA) -> bool:
        """Queue `message` if the window has room and no `send` waits; return whether it was queued. Raises as `send`."""
        self._raise_if_closed()
        out = self._out[lane]
        if len(out.unacked) >= self.window or out.turn.locked():
            return False
        self._enqueue(message, lane, out)
        return True

    async def receive(self, lane: Lane = Lane.DATA) -> Delivery:
        """Return the next message of the lane.

        Raises:
            ConnectionClosed: The other end is gone and everything it sent has been received.
        """
        return await self.receive_all(lane, 1)

    async def receive_all(self, lane: Lane = Lane.DATA, most: int = sys.maxsize) -> Delivery:
        """Return all messages of the lane that are there, in order: at least one and at most `most`. Raises as `receive`."""
        while not (half := self._in[lane]).inbox:
            self._raise_if_closed()
            half.changed.clear()
            await half.changed.wait()
        arrived = [half.inbox.popleft() for _ in range(min(len(half.inbox), most))]
        return Delivery([message for _, message in arrived], [seq for seq, _ in arrived], half.acknowledge)

    def unacknowledged(self, lane: Lane = Lane.DATA) -> int:
        """Return how many sent messages the other end has not acknowledged."""
        return len(self._out[lane].unacked)

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything sent is acknowledged; return False if `timeout_s` passed or the connection ended first."""
        try:
            async with asyncio.timeout(timeout_s):
                while (out := next((out for out in self._out if out.unacked), None)) and not self.closed_reason:
                    out.changed.clear()
                    await out.changed.wait()
        except TimeoutError:
            return False
        return not any(out.unacked for out in self._out)

    async def close(self, reason: str = "") -> None:
        """Say goodbye and release everything; unacknowledged messages are dropped (call `flush` before). Safe to repeat.

        Args:
            reason: The other end's `closed_reason`; empty: GOODBYE.
        """
        if not self.closed_reason:
            self.pump()
            self.end("closed on this side")
            for half in self._in:
                half.inbox.clear()
        await self.on_close(self, reason)

    def end(self, reason: str) -> None:
        """Mark the connection as ended and wake all waiting calls; messages that already arrived can still be received."""
        self.closed_reason = self.closed_reason or reason
        self.wire = None
        for half in (*self._out, *self._in):
            half.changed.set()

    def pump(self) -> None:
        """Hand the whole outbox to the wire; parcels lost with a wire are sent again at the next hello or welcome."""
        self._is_scheduled = False
        while self.wire is not None and (self._outbox or self._in[0].acks or self._in[1].acks):
            num_items = num_bytes = 0
            for item in self._outbox:
                if num_items and num_bytes + len(item.body) > PARCEL_BYTES:
                    break
                num_items += 1
                num_bytes += len(item.body)
            parcel = Parcel((self._in[0].acks, self._in[1].acks), self._outbox[:num_items])
            self._in[0].acks, self._in[1].acks = [], []
            self._outbox = self._outbox[num_items:]
            self._outbox_bytes -= num_bytes
            if not self.wire(parcel):
                self.wire = None

    def deliver(self, parcel: Parcel) -> bool:
        """Enter what arrived.

        Returns:
            True if nothing is missing; False if messages before these are missing, so that the wire must have them sent again.
        """
        for out, acks in zip(self._out, parcel.acks, strict=True):
            if acks:
                for seq in acks:
                    out.unacked.pop(seq, None)  # a number that is not held is a repeat
                out.changed.set()
        for lane, seq, body in parcel.items:
            half = self._in[lane]
            if seq > half.expected:
                return False
            if seq < half.expected:
                if seq not in half.unhandled:
                    half.acks.append(seq)
                    self._pump_soon()
                continue
            if len(half.unhandled) >= self.window:
                self.refused["malformed"] += 1
                return False
            half.expected = seq + 1
            try:
                message = decode(body, self.max_message_bytes)
            except CodecError as error:
                if not self._has_warned:  # a peer that sends millions fills no log
                    self._has_warned = True
                    log.warning("a message from %s is left out, and later ones in silence: %s", self.peer.name, shown(str(error)))
                self.refused["oversized" if len(body) > self.max_message_bytes else "malformed"] += 1
                half.acks.append(seq)  # stepped over: its place in the sender's window is given back
                self._pump_soon()
                continue
            half.unhandled.add(seq)
            half.inbox.append((seq, message))
            half.changed.set()
        return True

    def resend_all(self) -> None:
        """Queue every unacknowledged message again, in order; the other end recognises repeats by their numbers."""
        self._outbox = [
            Item(lane, seq, encode(message, sys.maxsize))
            for lane, out in zip(Lane, self._out, strict=True)
            for seq, message in out.unacked.items()
        ]
        self._outbox_bytes = sum(len(item.body) for item in self._outbox)
        self.pump()

    def start_over(self, peer: Hello) -> None:
        """Start again with a restarted peer: number unacknowledged messages from 0, and drop what the old peer sent."""
        self.peer = peer
        stale, self._in = self._in, (InLane(self._pump_soon), InLane(self._pump_soon))
        for half in stale:
            half.changed.set()
        for out in self._out:
            out.unacked = dict(enumerate(out.unacked.values()))
            out.next_seq = len(out.unacked)
        self.resend_all()

    def _enqueue(self, message: Message, lane: Lane, out: OutLane) -> None:
        """Encode, number and queue one message; nothing changes if it cannot be encoded."""
        item = Item(lane, out.next_seq, encode(message, self.max_message_bytes))
        out.unacked[out.next_seq] = message
        out.next_seq += 1
        self._outbox.append(item)
        self._outbox_bytes += len(item.body)
        if self._outbox_bytes >= PARCEL_BYTES:
            self.pump()
        else:
            self._pump_soon()

    def _pump_soon(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self.pump)

    def _raise_if_closed(self) -> None:
        if self.closed_reason:
            raise ConnectionClosed(f"connection to {self.peer.name} ({self.peer.incarnation}): {self.closed_reason}")


class Listener(Protocol):
    """The controller's end: one address, many connections."""

    address: str
    """The address to give to `connect`, with resolved ports."""
    refused: Refused

    async def accept(self) -> Connection:
        """Return the next new peer. Raises ConnectionClosed once the listener is closed."""

    async def close(self) -> None:
        """Close every connection and the address."""
