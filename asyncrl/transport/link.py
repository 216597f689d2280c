"""What listener and connector share: the limits of a link, socket options, and the pump from an endpoint's outbox to the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from asyncrl.schema.codec import MAX_MESSAGE_BYTES, Frame
from asyncrl.transport.endpoint import PARCEL_BYTES, Endpoint
from asyncrl.transport.packets import Terms, build_parcel

GOODBYE_LINGER_MS = 500
"""How long a closing socket tries in the background to get its last packets out."""


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Sizes and times of a link. Both ends use the smaller window and message size."""

    window: int = 64
    """Most unacknowledged messages per lane and direction."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    ping_s: float = 2.0
    """A connector says that it is there this often."""
    reconnect_after_s: float = 10.0
    """A connector that hears nothing for so long opens a new socket."""
    silence_timeout_s: float = 60.0
    """A listener that hears nothing from a peer for so long ends the connection."""
    give_up_s: float = 120.0
    """A connector that cannot get back for so long ends the connection."""
    are_listeners: bool = False
    """A connector's sizes are whatever its listener's are: it does not know them, and these are only to be larger."""

    @property
    def terms(self) -> Terms:
        """Return what the other end is told."""
        return Terms(self.window, self.max_message_bytes)

    @property
    def max_packet_bytes(self) -> int:
        """Return the largest packet a correct peer sends: one message of the limit, and the rest of its parcel."""
        return self.max_message_bytes + 2 * PARCEL_BYTES


def configure(socket: zmq.SyncSocket, limits: LinkLimits) -> None:
    """Set what both kinds of socket need; call before bind or connect."""
    socket.sndhwm = 0
    socket.rcvhwm = 0
    socket.linger = 0
    # Twice our own limit: what is between the two is read, counted and refused by us; what is above, libzmq cuts off unread.
    socket.maxmsgsize = 2 * limits.max_packet_bytes
    socket.heartbeat_ivl = 10_000
    socket.heartbeat_timeout = 60_000


async def terminate(context: zmq.SyncContext) -> None:
    """Wait for the last packets of sockets that are closed; it is done to its end though the wait for it is cancelled."""
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, context.term))


class Pump:
    """Moves an endpoint's outbox to the wire: at once when a parcel is full, else at the loop's next turn, all at once."""

    def __init__(self, send: Callable[[Sequence[Frame]], bool]) -> None:
        """Start closed; set `endpoint`, `session` and `is_open` once the peer is known."""
        self.endpoint: Endpoint | None = None
        self.session = ""
        self.is_open = False
        """False while there is no peer to send to; the outbox then waits."""
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._is_scheduled = False

    def wake(self, is_full: bool) -> None:
        """Carry soon, or now when a parcel is full."""
        if is_full:
            self.run()
        elif not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._run_scheduled)

    def run(self) -> None:
        """Carry everything that waits; what a failed send lost is sent again when the peer greets or is greeted."""
        while self.is_open and self.endpoint is not None and not (parcel := self.endpoint.take_parcel()).is_empty:
            self.is_open = self._send(build_parcel(self.session, parcel))

    def _run_scheduled(self) -> None:
        self._is_scheduled = False
        self.run()
