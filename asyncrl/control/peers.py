"""Who is connected, and what is out at whom.

Owns the table of open connections by name. Invariant: a name has at most one connection, the newest. Reward requests are tracked
until their score comes back, so that those of a dead worker are asked again. Called by control/controller.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from asyncrl.errors import ConnectionClosed
from asyncrl.schema.codec import Message
from asyncrl.schema.control import Heartbeat, ProcessKind
from asyncrl.schema.samples import Purpose, Score, ScoreRequest
from asyncrl.transport.channel import Connection, Lane

MOST_LOSSES = 3
RewardKey = tuple[Purpose, int, int]


@dataclass(slots=True)
class Peer:
    """One connected process."""

    name: str
    kind: ProcessKind
    connection: Connection
    heartbeat: Heartbeat | None = None
    num_slots: int = 0
    """Generators: from EngineReady."""
    live_version: int = -1
    """Generators: from VersionLive."""
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

    def add(self, connection: Connection) -> Peer:
        """Register a connection under the name it gave at hello, in place of an older one."""
        hello = connection.peer
        peer = Peer(hello.name, hello.kind, connection)
        self._by_name[hello.name] = peer
        return peer

    def remove(self, peer: Peer) -> bool:
        """Forget a peer; False where a newer connection has taken its name."""
        if self._by_name.get(peer.name) is not peer:
            return False
        del self._by_name[peer.name]
        return True

    def get(self, name: str) -> Peer | None:
        """Return the peer of that name, if it is connected."""
        return self._by_name.get(name)

    def of(self, kind: ProcessKind) -> list[Peer]:
        """Return the connected peers of one kind, by name."""
        return sorted((peer for peer in self._by_name.values() if peer.kind == kind), key=lambda peer: peer.name)

    def all(self) -> list[Peer]:
        """Return every connected peer."""
        return list(self._by_name.values())


@dataclass(slots=True)
class ScoringDesk:
    """Reward requests: waiting for a worker with room, or out at one."""

    _waiting: deque[ScoreRequest] = field(default_factory=deque)
    _out: dict[RewardKey, tuple[str, ScoreRequest]] = field(default_factory=dict)
    _losses: dict[RewardKey, int] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return how many requests are not answered yet."""
        return len(self._waiting) + len(self._out)

    def ask(self, request: ScoreRequest) -> None:
        """Add a request; `dispatch` sends it."""
        self._waiting.append(request)

    def dispatch(self, workers: list[Peer]) -> None:
        """Send waiting requests, oldest first, to the worker with the least to do, while one has room."""
        while self._waiting and workers:
            by_load = sorted(workers, key=lambda peer: peer.connection.unacknowledged())
            worker = next((peer for peer in by_load if peer.offer(self._waiting[0])), None)
            if worker is None:
                return
            request = self._waiting.popleft()
            self._out[_key(request)] = (worker.name, request)

    def answered(self, score: Score) -> bool:
        """Close a request; False where it was not out (an answer that came twice)."""
        self._losses.pop(_key(score), None)
        return self._out.pop(_key(score), None) is not None

    def worker_lost(self, name: str) -> list[Score]:
        """Ask again, first of all, what a dead worker had not answered.

        Returns:
            Verdicts for requests that were out at `MOST_LOSSES` workers as they died: those are failed instead.
        """
        lost = [key for key, (worker, _) in self._out.items() if worker == name]
        given_up = []
        for key in reversed(lost):
            request = self._out.pop(key)[1]
            self._losses[key] = self._losses.get(key, 0) + 1
            if self._losses[key] < MOST_LOSSES:
                self._waiting.appendleft(request)
            else:
                given_up.append(_failed(request))
        return given_up

    def num_out(self, name: str) -> int:
        """Return how many requests a worker holds."""
        return sum(worker == name for worker, _ in self._out.values())


def _failed(request: ScoreRequest) -> Score:
    reason = f"{MOST_LOSSES} reward workers died while they held this sample"
    return Score(request.group_id, request.index, request.attempt, 0.0, error=reason, purpose=request.purpose)


def _key(message: ScoreRequest | Score) -> RewardKey:
    return (message.purpose, message.group_id, message.index)
