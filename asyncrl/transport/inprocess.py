"""Channels within one event loop: the contract without a socket, for tests, simulations and embedded runs.

Messages still go through the codec, so what would not travel between processes does not travel here either. A parcel is
handed over at the loop's next turn, never inside `send`.
"""

from __future__ import annotations

import asyncio
from collections import deque

from asyncrl.errors import ConnectionClosed, TransportError
from asyncrl.schema.codec import MAX_MESSAGE_BYTES
from asyncrl.schema.control import PROTOCOL, Hello
from asyncrl.transport.channel import GOODBYE, Connection, RefusalCounts
from asyncrl.transport.endpoint import Endpoint


class InProcessListener:
    """A `Listener` that its own event loop connects to with `connect`."""

    def __init__(self, hello: Hello, window: int = 64, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """Listen; nothing to bind.

        Args:
            hello: Who listens, as `Connection.peer` shows it to those who connect.
            window: Most unacknowledged messages per lane and direction.
            max_message_bytes: Limit of one encoded message.
        """
        self._hello = hello
        self._window = window
        self._max_message_bytes = max_message_bytes
        self._refused = RefusalCounts()
        self._by_name: dict[str, _Pair] = {}
        self._accepted: deque[Connection] = deque()
        self._changed = asyncio.Event()
        self._is_closed = False

    @property
    def address(self) -> str:
        """A name for logs; `connect` needs none."""
        return f"inproc://{self._hello.name}"

    @property
    def refused(self) -> RefusalCounts:
        """What was refused so far."""
        return self._refused

    async def connect(self, hello: Hello) -> Connection:
        """Return the connecting end of a new pair; a pair of the same name is closed.

        Raises:
            TransportError: Closed, or of another protocol.
        """
        if self._is_closed:
            raise TransportError(f"{self.address} is closed")
        if hello.protocol != PROTOCOL:
            self._refused.wrong_protocol += 1
            raise TransportError(f"{self.address} speaks protocol {PROTOCOL}, {hello.name} speaks {hello.protocol}")
        old = self._by_name.get(hello.name)
        if old is not None:
            old.near.end(f"replaced by incarnation {hello.incarnation}")
            old.far.end(f"replaced by incarnation {hello.incarnation}")
        pair = _Pair(self._hello, hello, self._window, self._max_message_bytes, self._refused)
        self._by_name[hello.name] = pair
        self._accepted.append(pair.near)
        self._changed.set()
        return pair.far

    async def accept(self) -> Connection:
        """Return the next new peer. Raises ConnectionClosed once closed."""
        while not self._accepted:
            if self._is_closed:
                raise ConnectionClosed(f"{self.address} is closed")
            self._changed.clear()
            await self._changed.wait()
        return self._accepted.popleft()

    async def close(self) -> None:
        """Close every connection."""
        self._is_closed = True
        self._accepted.clear()
        self._changed.set()
        for pair in self._by_name.values():
            await pair.near.close()


class _Pair:
    """Two endpoints and the loop's call queue between them."""

    def __init__(self, listener: Hello, connector: Hello, window: int, max_message_bytes: int, refused: RefusalCounts) -> None:
        self.near = Endpoint(connector, window, max_message_bytes, self._carry_later, self._goodbye, refused)
        self.far = Endpoint(listener, window, max_message_bytes, self._carry_later, self._goodbye, RefusalCounts())
        self._loop = asyncio.get_running_loop()
        self._is_scheduled = False

    def _carry_later(self, _is_full: bool) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._carry)

    def _carry(self) -> None:
        self._is_scheduled = False
        self._hand_over(self.near, self.far)
        self._hand_over(self.far, self.near)

    @staticmethod
    def _hand_over(source: Endpoint, target: Endpoint) -> None:
        while not (parcel := source.take_parcel()).is_empty:
            if not target.closed_reason:
                target.deliver(parcel)

    async def _goodbye(self, reason: str) -> None:
        self._carry()
        self.near.end(reason or GOODBYE)
        self.far.end(reason or GOODBYE)
