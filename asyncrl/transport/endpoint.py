"""One end of a connection above any wire: lanes, credit, order, repeats, counts. The wire moves `Parcel`s between two of these.

An endpoint is passive: `send` puts an encoded message into the outbox and wakes the wire (`on_outgoing`), the wire takes what is
there (`take_parcel`) and hands over what arrives (`deliver`). It survives any number of wires: `resend_all` queues every
unacknowledged message again, `start_over` does so towards a peer that has no memory of us. Everything runs on one event loop;
no tasks. Used by inprocess.py, listener.py and connector.py.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from asyncrl.errors import CodecError, ConnectionClosed
from asyncrl.schema.codec import Frame, Message, decode, encode
from asyncrl.schema.control import Hello
from asyncrl.transport.channel import ConnectionCounts, Delivery, Lane, RefusalCounts
from asyncrl.transport.lanes import Arrival, InLane, OutLane

log = logging.getLogger(__name__)

PARCEL_BYTES = 256 << 10
"""A parcel is full from this size on; small messages share one, a larger message has its own."""


@dataclass(slots=True)
class Item:
    """One encoded message on its way."""

    lane: Lane
    seq: int
    frames: Sequence[Frame]
    num_bytes: int


@dataclass(slots=True)
class Parcel:
    """What travels at once: acknowledgements by lane, then messages in order."""

    acks: tuple[list[int], list[int]]
    items: list[Item] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to carry."""
        return not (self.items or self.acks[0] or self.acks[1])


class Endpoint:
    """A `Connection` (see channel.py) without a wire of its own."""

    def __init__(
        self,
        peer: Hello,
        window: int,
        max_message_bytes: int,
        on_outgoing: Callable[[bool], None],
        on_close: Callable[[str], Awaitable[None]],
        refused: RefusalCounts,
    ) -> None:
        """Open with nothing sent and nothing received.

        Args:
            peer: Who is at the other end.
            window: Most unacknowledged messages per lane and direction.
            max_message_bytes: Limit of one encoded message.
            on_outgoing: Called when there is something to carry; True when a parcel is full and should leave at once.
            on_close: Awaited by `close`: say goodbye, with the reason there is, and release the wire; safe to repeat.
            refused: Where messages that cannot be taken are counted.
        """
        self._refused = refused
        self._peer = peer
        self._window = window
        self._max_message_bytes = max_message_bytes
        self._send_limit_bytes = max_message_bytes
        self._on_outgoing = on_outgoing
        self._on_close = on_close
        self._counts = ConnectionCounts()
        self._out = (OutLane(window), OutLane(window))
        self._in = self._new_in_lanes()
        self._outbox: list[Item] = []
        self._outbox_bytes = 0
        self._acked = asyncio.Event()
        self._closed = ""

    @property
    def peer(self) -> Hello:
        """Who is at the other end."""
        return self._peer

    @property
    def counts(self) -> ConnectionCounts:
        """Traffic so far."""
        return self._counts

    @property
    def closed_reason(self) -> str:
        """Return why the connection ended; empty while it is open."""
        return self._closed

    async def send(self, message: Message, lane: Lane = Lane.DATA) -> None:
        """Queue `message`; wait while the lane's window is full. See `Connection.send`."""
        if self.try_send(message, lane):
            return
        out = self._out[lane]
        loop = asyncio.get_running_loop()
        blocked_since_s = loop.time()
        try:
            async with out.turn:
                while len(out.unacked) >= out.window:
                    self._raise_if_closed()
                    out.changed.clear()
                    await out.changed.wait()
                self._raise_if_closed()
                self._enqueue(message, lane, out)
        finally:
            self._counts.blocked_s += loop.time() - blocked_since_s

    def try_send(self, message: Message, lane: Lane = Lane.DATA) -> bool:
        """Queue `message` if the window has room; return whether it had. Raises as `send`."""
        if self._closed:
            self._raise_if_closed()
        out = self._out[lane]
        if not out.has_room:
            return False
        self._enqueue(message, lane, out)
        return True

    async def receive(self, lane: Lane = Lane.DATA) -> Delivery:
        """Return the next message of the lane. See `Connection.receive`."""
        while not (inbox := self._in[lane]).inbox:
            self._raise_if_closed()
            inbox.changed.clear()
            await inbox.changed.wait()
        seq, message = inbox.inbox.popleft()
        return Delivery(message, functools.partial(inbox.acknowledge, seq))

    def unacknowledged(self, lane: Lane = Lane.DATA) -> int:
        """Return how many sent messages the other end has not acknowledged."""
        return len(self._out[lane].unacked)

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything sent is acknowledged; False when `timeout_s` passed or the connection ended first."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._is_owed() and not self._closed:
                    self._acked.clear()
                    await self._acked.wait()
        except TimeoutError:
            return False
        return not self._is_owed()

    async def close(self, reason: str = "") -> None:
        """Say goodbye and release everything; safe to repeat. See `Connection.close`."""
        if not self._closed:
            self._on_outgoing(True)
            self.end("closed on this side")
            for half in self._in:
                half.inbox.clear()
        await self._on_close(reason)

    def end(self, reason: str) -> None:
        """Mark the connection as over and wake everyone who waits; what already arrived can still be received."""
        self._closed = self._closed or reason
        for event in (*(out.changed for out in self._out), *(half.changed for half in self._in), self._acked):
            event.set()

    def take_parcel(self) -> Parcel:
        """Return the next parcel and forget it; an empty one means there is nothing to carry."""
        parcel = Parcel((self._in[0].acks, self._in[1].acks))
        for half in self._in:
            if half.acks:
                half.acks = []
        if self._outbox_bytes <= PARCEL_BYTES:
            parcel.items, self._outbox, self._outbox_bytes = self._outbox, [], 0
            return parcel
        taken = taken_bytes = 0
        for item in self._outbox:
            if taken and taken_bytes + item.num_bytes > PARCEL_BYTES:
                break
            taken += 1
            taken_bytes += item.num_bytes
        parcel.items, self._outbox = self._outbox[:taken], self._outbox[taken:]
        self._outbox_bytes -= taken_bytes
        return parcel

    def deliver(self, parcel: Parcel) -> bool:
        """Take in what arrived.

        Returns:
            True when all is well; False when messages are missing in between, so that the wire must have them sent again.
        """
        for out, acks in zip(self._out, parcel.acks, strict=True):
            if acks:
                out.acknowledge(acks)
                self._acked.set()
        return all(map(self._take_in, parcel.items))

    def resend_all(self) -> None:
        """Queue every unacknowledged message again, in order; the other end knows the repeats by their numbers."""
        self._outbox = [
            _encode_item(message, lane, seq, sys.maxsize)
            for lane, out in zip(Lane, self._out, strict=True)
            for seq, message in out.unacked.items()
        ]
        self._outbox_bytes = sum(item.num_bytes for item in self._outbox)
        self._on_outgoing(True)

    def start_over(self, peer: Hello) -> None:
        """Face a peer that has no memory of us: number what is unacknowledged from 0, drop what the old one sent."""
        self._peer = peer
        stale, self._in = self._in, self._new_in_lanes()
        for half in stale:
            half.changed.set()
        for out in self._out:
            out.renumber()
        self.resend_all()

    def adopt(self, window: int, max_message_bytes: int) -> None:
        """Have these sizes for its own from now on."""
        self._window, self._max_message_bytes, self._send_limit_bytes = window, max_message_bytes, max_message_bytes
        for half in self._in:
            half.window = window

    def heed(self, window: int, max_message_bytes: int) -> None:
        """Send no more at once, and nothing larger, than the other end takes."""
        limit_bytes = min(self._max_message_bytes, max_message_bytes)
        if limit_bytes < self._send_limit_bytes:
            log.warning(
                "%s takes messages of at most %d bytes, this side of %d: nothing larger is sent to it; set "
                "transport.max_message_bytes alike", self._peer.name, max_message_bytes, self._max_message_bytes,
            )  # fmt: skip
        self._send_limit_bytes = limit_bytes
        for out in self._out:
            out.window = min(self._window, window)

    def _new_in_lanes(self) -> tuple[InLane, InLane]:
        wake = functools.partial(self._on_outgoing, False)
        return InLane(self._window, wake), InLane(self._window, wake)

    def _enqueue(self, message: Message, lane: Lane, out: OutLane) -> None:
        """Encode, number and queue one message; nothing changes where it cannot be encoded."""
        item = _encode_item(message, lane, out.next_seq, self._send_limit_bytes)
        out.append(message)
        self._outbox.append(item)
        self._outbox_bytes += item.num_bytes
        counts = self._counts
        counts.sent += 1
        counts.sent_bytes += item.num_bytes
        self._on_outgoing(self._outbox_bytes >= PARCEL_BYTES)

    def _take_in(self, item: Item) -> bool:
        """Judge one arriving message; False where messages are missing before it."""
        inbox = self._in[item.lane]
        arrival = inbox.classify(item.seq)
        if arrival is Arrival.REPEAT:
            return True
        if arrival is not Arrival.NEW:
            self._refused.malformed += arrival is Arrival.OVER_WINDOW
            return False
        try:
            message = decode(item.frames, self._max_message_bytes)
        except CodecError:
            if item.num_bytes > self._max_message_bytes:
                self._refused.oversized += 1
            else:
                self._refused.malformed += 1
            inbox.discard(item.seq)
            return True
        inbox.accept(item.seq, message)
        self._counts.received += 1
        self._counts.received_bytes += item.num_bytes
        return True

    def _is_owed(self) -> bool:
        return any(out.unacked for out in self._out)

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise ConnectionClosed(f"connection to {self._peer.name} ({self._peer.incarnation}): {self._closed}")


def _encode_item(message: Message, lane: Lane, seq: int, limit_bytes: int) -> Item:
    frames = encode(message, limit_bytes)
    return Item(lane, seq, frames, len(frames[0]) if len(frames) == 1 else sum(map(len, frames)))
