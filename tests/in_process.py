"""Channels within one event loop: the contract without a socket.

Messages still go through the codec, so what would not travel between processes does not travel here either.
"""

import asyncio

from asyncrl.errors import ConnectionClosed, TransportError
from asyncrl.schema.codec import MAX_MESSAGE_BYTES
from asyncrl.schema.control import PROTOCOL, Hello
from asyncrl.transport.protocol import GOODBYE, Connection, Refused


class InProcessListener:
    """A `Listener` that its own event loop connects to with `connect`."""

    def __init__(self, hello: Hello, window: int = 64, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """Listen; nothing to bind.

        Args:
            hello: Who listens, as `Connection.peer` shows it to those who connect.
            window: Most unacknowledged messages per lane and direction.
            max_message_bytes: Limit of one encoded message.
        """
        self.address = f"inproc://{hello.name}"
        self.refused = Refused()
        self._hello = hello
        self._sizes = window, max_message_bytes
        self._by_name: dict[str, tuple[Connection, Connection]] = {}
        self._accepted: asyncio.Queue[Connection | None] = asyncio.Queue()
        """None: it is closed."""
        self._is_closed = False

    async def connect(self, hello: Hello) -> Connection:
        """Return the connecting end of a new pair; a pair of the same name is closed.

        Raises:
            TransportError: Closed, or of another protocol.
        """
        if self._is_closed:
            raise TransportError(f"{self.address} is closed")
        if hello.protocol != PROTOCOL:
            self.refused["wrong protocol"] += 1
            raise TransportError(f"{self.address} speaks protocol {PROTOCOL}, {hello.name} speaks {hello.protocol}")
        for old in self._by_name.get(hello.name, ()):
            old.end(f"replaced by incarnation {hello.incarnation}")

        async def goodbye(_: Connection, reason: str) -> None:
            near.pump()
            far.pump()
            near.end(reason or GOODBYE)
            far.end(reason or GOODBYE)

        near = Connection(hello, *self._sizes, goodbye, self.refused)
        far = Connection(self._hello, *self._sizes, goodbye, Refused())
        near.wire, far.wire = far.deliver, near.deliver
        self._by_name[hello.name] = near, far
        self._accepted.put_nowait(near)
        return far

    async def accept(self) -> Connection:
        """Return the next new peer. Raises ConnectionClosed once closed."""
        connection = None if self._is_closed else await self._accepted.get()
        if connection is None:
            self._accepted.put_nowait(None)  # for whoever else waits
            raise ConnectionClosed(f"{self.address} is closed")
        return connection

    async def close(self) -> None:
        """Close every connection."""
        self._is_closed = True
        self._accepted.put_nowait(None)
        for near, _ in self._by_name.values():
            await near.close()
