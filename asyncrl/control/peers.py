"""Who is connected.

Owns the table of open connections by name. Invariant: a name has at most one connection, the newest.
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
    num_slots: int = 0
    """Generators: from EngineReady, then EngineRoom; 0: not ready."""
    live_version: int = -1
    """Generators: from VersionLive."""
    is_ready: bool = False
    """It has said that it is ready: its engine, its models, or itself."""
    told_weights: WeightsAvailable | None = None
    """Generators: the version they were told of last."""
    _untold: deque[Message] = field(default_factory=deque)

    def offer(self, message: Message, lane: Lane = Lane.DATA) -> bool:
        """Send a message if the window has room and the peer is still there; return whether it went out."""
        try:
            return self.connection.try_send(message, lane)
        except ConnectionClosed:
            return False

    def tell(self, message: Message) -> None:
        """Give an order: it goes out now or, where the window is full, in its turn with a later `tell_rest`."""
        self._untold.append(message)
        self.tell_rest()

    def tell_rest(self) -> None:
        """Send the orders that found the window full, oldest first."""
        while self._untold and self.offer(self._untold[0], Lane.CONTROL):
            self._untold.popleft()


class Peers:
    """All connected processes by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Peer] = {}
        self._by_kind: dict[ProcessKind, list[Peer]] = {}
        """By name; made anew when somebody comes or goes, because every message asks for one kind's."""

    def add(self, connection: Connection) -> Peer:
        """Register a connection under the name it gave at hello, in place of an older one."""
        hello = connection.peer
        peer = Peer(hello.name, hello.kind, connection)
        self._by_name[hello.name] = peer
        self._by_kind.clear()
        return peer

    def remove(self, peer: Peer) -> bool:
        """Forget a peer; False where a newer connection has taken its name."""
        if self._by_name.get(peer.name) is not peer:
            return False
        del self._by_name[peer.name]
        self._by_kind.clear()
        return True

    def get(self, name: str) -> Peer | None:
        """Return the peer of that name, if it is connected."""
        return self._by_name.get(name)

    def of(self, kind: ProcessKind) -> list[Peer]:
        """Return the connected peers of one kind, by name."""
        if kind not in self._by_kind:
            them = (peer for peer in self._by_name.values() if peer.kind == kind)
            self._by_kind[kind] = sorted(them, key=lambda peer: peer.name)
        return self._by_kind[kind]

    def all(self) -> list[Peer]:
        """Return every connected peer."""
        return list(self._by_name.values())
