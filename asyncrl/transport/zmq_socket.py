"""One ZeroMQ socket on the running asyncio loop, without pyzmq's own asyncio layer (a future and a poll per frame).

ZeroMQ's descriptor is edge-triggered: it becomes readable when the socket's state may have changed, and any call on the socket
may consume that edge. So after every read or write the real state (`EVENTS`) is asked, and reading goes on by `call_soon` while
there is something to read. Nothing polls: an idle socket costs nothing. Sends never block. The lanes' windows bound what is in
flight of whoever keeps to them; a listener bounds its queues besides, as not everybody may.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence

import zmq
import zmq.utils.monitor

from asyncrl.schema.codec import Frame

GOODBYE_LINGER_MS = 500
"""How long a closing socket tries in the background to get its last packets out."""
READS_PER_TURN = 64
"""Multipart messages taken per turn of the event loop, so that reading never starves the rest."""

MOST_DRAINED = 4096
"""Multipart messages that `drain` takes: one of each peer that there may be (senders take turns), and no more."""


def configure(socket: zmq.SyncSocket) -> None:
    """Set what both ends' sockets need; call before bind or connect."""
    socket.sndhwm = 0
    socket.rcvhwm = 0
    socket.linger = 0
    socket.heartbeat_ivl = 10_000
    socket.heartbeat_timeout = 60_000


async def terminate(context: zmq.SyncContext) -> None:
    """Wait for the last packets of sockets that are closed; it is done to its end though the wait for it is cancelled."""
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, context.term))


class LoopSocket:
    """Owns a bound or connected socket and its place in the event loop until `close`."""

    def __init__(self, socket: zmq.SyncSocket, on_message: Callable[[list[zmq.Frame]], None]) -> None:
        """Start reading.

        Args:
            socket: Configured; this object closes it.
            on_message: Called in the event loop with the frames of each message; must not raise.
        """
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._is_reading_soon = False
        self._fd = socket.FD
        self._loop.add_reader(self._fd, self._read)
        self.read_soon()

    def send(self, frames: Sequence[Frame]) -> bool:
        """Send one multipart message; large frames are not copied.

        Returns:
            False where there is nobody to send it to (a router's peer is gone, or the socket is closed).
        """
        if self._socket.closed:
            return False
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except (zmq.Again, zmq.ZMQError) as error:
            if error.errno not in {zmq.EAGAIN, zmq.EHOSTUNREACH, zmq.ETERM, zmq.ENOTSOCK}:
                raise
            return False
        finally:
            self.read_soon()
        return True

    def read_soon(self) -> None:
        """Ask for the socket's state at the loop's next turn."""
        if not self._is_reading_soon and not self._socket.closed:
            self._is_reading_soon = True
            self._loop.call_soon(self._read_scheduled)

    def drain(self) -> None:
        """Take in what is there now, or as much of it as lets every sender be heard: one may never stop."""
        for _ in range(0, MOST_DRAINED, READS_PER_TURN):
            if not self._read():
                return

    def close(self, linger_ms: int) -> None:
        """Leave the loop and close; what is unsent is kept in the background for `linger_ms`."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(linger_ms)

    def _read_scheduled(self) -> None:
        self._is_reading_soon = False
        self._read()

    def _read(self) -> bool:
        """Take what is there, READS_PER_TURN messages at most; return whether there may be more."""
        socket = self._socket
        if socket.closed or not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return False
        for _ in range(READS_PER_TURN):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            self._on_message(frames)
            if socket.closed:
                return False
        self.read_soon()
        return True


class SocketWatch:
    """Reports what happens below a socket (handshakes, broken links) until `close`."""

    def __init__(self, watched: zmq.SyncSocket, events: int, on_event: Callable[[int], None]) -> None:
        """Start watching.

        Args:
            watched: The socket; call `close` before it is closed.
            events: Which, as a sum of `zmq.EVENT_*`.
            on_event: Called in the event loop with each.
        """
        self._watched = watched
        reader, address = watched.context.socket(zmq.PAIR), f"inproc://watch-{uuid.uuid4().hex}"
        reader.rcvhwm = 0  # events are never waited with: a loop that stands still would hold up ZeroMQ's own thread, then itself
        watched.monitor(address, events)
        reader.connect(address)
        parse = zmq.utils.monitor.parse_monitor_message
        self._socket = LoopSocket(reader, lambda frames: on_event(int(parse([frame.bytes for frame in frames])["event"])))

    def close(self) -> None:
        """Stop watching; safe to repeat.

        The reader is closed last: ZeroMQ's own thread holds a lock while it hands an event over, and without a reader it would do
        so for ever, and this call with it.
        """
        if not self._watched.closed:
            self._watched.monitor(None, 0)
            self._socket.close(0)
