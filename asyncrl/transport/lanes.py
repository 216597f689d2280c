"""One lane in one direction: sequence numbers, credit on the sending half, order and acknowledgement on the receiving half.

Invariants: `unacked` is in sequence order and never longer than `window`; the receiving half takes sequence numbers one by one,
so what it has seen is exactly `[0, expected)` and a repeat is recognised by its number alone; a number is acknowledged at most
once per arrival, and again whenever the sender repeats it. No sockets here; called by endpoint.py only.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable, Iterable

from asyncrl.schema.codec import Message


class Arrival(enum.Enum):
    """What an arriving sequence number turned out to be."""

    NEW = "new"
    REPEAT = "repeat"
    GAP = "gap"
    OVER_WINDOW = "over_window"


class OutLane:
    """The sending half: what is not yet acknowledged, and whether there is room for more."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.next_seq = 0
        self.unacked: dict[int, Message] = {}
        self.turn = asyncio.Lock()
        """Senders that wait for room do so one at a time, in the order they came."""
        self.changed = asyncio.Event()
        """Set whenever room appeared or the connection ended."""

    @property
    def has_room(self) -> bool:
        """Return whether one more message may be sent now, without overtaking a sender that waits."""
        return len(self.unacked) < self.window and not self.turn.locked()

    def append(self, message: Message) -> int:
        """Hold `message` until it is acknowledged; return its sequence number."""
        seq = self.next_seq
        self.next_seq = seq + 1
        self.unacked[seq] = message
        return seq

    def acknowledge(self, seqs: Iterable[int]) -> None:
        """Forget what the other end has dealt with; numbers that are not held are repeats."""
        unacked = self.unacked
        for seq in seqs:
            unacked.pop(seq, None)
        if len(unacked) < self.window:
            self.changed.set()

    def renumber(self) -> None:
        """Start from 0 with what is unacknowledged: the other end has no memory of us."""
        self.unacked = dict(enumerate(self.unacked.values()))
        self.next_seq = len(self.unacked)


class InLane:
    """The receiving half: messages in order, waiting to be received and then acknowledged."""

    def __init__(self, window: int, on_ack: Callable[[], None]) -> None:
        self.window = window
        self.expected = 0
        self.inbox: deque[tuple[int, Message]] = deque()
        self.unhandled: set[int] = set()
        """Numbers that arrived and are not acknowledged yet."""
        self.acks: list[int] = []
        """Numbers to tell the sender about with the next packet."""
        self.changed = asyncio.Event()
        """Set whenever a message arrived or the connection ended."""
        self._on_ack = on_ack

    def classify(self, seq: int) -> Arrival:
        """Judge an arriving number; a repeat that was dealt with before is acknowledged once more."""
        if seq < self.expected:
            if seq not in self.unhandled:
                self.acks.append(seq)
                self._on_ack()
            return Arrival.REPEAT
        if seq > self.expected:
            return Arrival.GAP
        return Arrival.NEW if len(self.unhandled) < self.window else Arrival.OVER_WINDOW

    def accept(self, seq: int, message: Message) -> None:
        """Take the expected message in."""
        self.expected = seq + 1
        self.unhandled.add(seq)
        self.inbox.append((seq, message))
        self.changed.set()

    def discard(self, seq: int) -> None:
        """Step over a message that cannot be decoded: its place in the sender's window is given back."""
        self.expected = seq + 1
        self.acks.append(seq)
        self._on_ack()

    def acknowledge(self, seq: int) -> None:
        """Note that the receiver has dealt with `seq`; safe to repeat."""
        if seq in self.unhandled:
            self.unhandled.remove(seq)
            self.acks.append(seq)
            self._on_ack()
