"""The run's open connections, and what each peer has reported about itself.

Invariant: a name has at most one connection, the newest.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from asyncrl.errors import ConnectionClosed
from asyncrl.schema.codec import Message
from asyncrl.schema.control import Heartbeat, ProcessKind
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.transport.protocol import Connection, Lane


@dataclass(slots=True)
class Peer:
    """One connected process."""

    name: str
    kind: ProcessKind
    connection: Connection
    heartbeat: Heartbeat | None = None
    heard_s: float = 0.0
    """Clock seconds at which that came."""
    num_slots: int = 0
    """For generators, from EngineReady and later EngineRoom; 0: not ready."""
    live_version: int = -1
    """For generators, from VersionLive."""
    is_ready: bool = False
    """For the learner, from LearnerReady."""
    told_weights: WeightsAvailable | None = None
    """For generators, the version announced to them last."""
    refused_s: list[float] = field(default_factory=list)
    """Times of its last refused messages."""
    _untold: deque[Message] = field(default_factory=deque)

    def offer(self, message: Message, lane: Lane = Lane.DATA) -> bool:
        """Send a message if the window has room and the peer is still connected; return whether it was sent."""
        try:
            return self.connection.try_send(message, lane)
        except ConnectionClosed:
            return False

    def tell(self, *messages: Message) -> None:
        """Send orders, oldest first. If the window is full, they are sent with a later call, which may have no messages."""
        self._untold.extend(messages)
        while self._untold and self.offer(self._untold[0], Lane.CONTROL):
            self._untold.popleft()


class Peers(dict[str, Peer]):
    """All connected processes by name."""

    def __init__(self) -> None:
        super().__init__()
        self._by_kind: dict[ProcessKind, list[Peer]] = {}
        """Peers by kind, rebuilt at each connect and disconnect, because every message looks up one kind."""

    def add(self, connection: Connection) -> Peer:
        """Register a connection under the name in its hello; it replaces an older connection."""
        hello = connection.peer
        peer = self[hello.name] = Peer(hello.name, hello.kind, connection)
        self._by_kind.clear()
        return peer

    def remove(self, peer: Peer) -> bool:
        """Forget a peer; False where a newer connection has taken its name."""
        if self.get(peer.name) is not peer:
            return False
        del self[peer.name]
        self._by_kind.clear()
        return True

    def of(self, kind: ProcessKind) -> list[Peer]:
        """Return the connected peers of one kind, by name."""
        if kind not in self._by_kind:
            self._by_kind[kind] = sorted((peer for peer in self.values() if peer.kind == kind), key=lambda peer: peer.name)
        return self._by_kind[kind]
