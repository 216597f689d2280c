"""What the learner knows of who fetches from it over `zeromq`: one relay tree a version or delta, and which versions to spare.

Invariant: trees are touched by the serving thread alone; the board also by the learner's, under the lock.

Called by zeromq_server.py (serving thread), zeromq_writer.py (`versions_in_use`).
"""

from __future__ import annotations

import threading
import time

from asyncrl.broadcast.board import ChunkAsked, FetchOver, SubscriberBoard
from asyncrl.broadcast.chunks import BLOB, ChunkRequest, PlaceReply, PlaceRequest
from asyncrl.broadcast.relay_tree import Left, PlaceAsked, RelayTree
from asyncrl.broadcast.state import Tick
from asyncrl.broadcast.zeromq_shelf import Key, Shelf


class LearnerDesk:
    """Gives subscribers their places and notes who asks for what."""

    def __init__(self, shelf: Shelf, fanout: int, total_bytes: int) -> None:
        self._shelf = shelf
        self._fanout = fanout
        self._total_bytes = total_bytes
        self._trees: dict[Key, RelayTree] = {}
        self._lock = threading.Lock()
        self._board = SubscriberBoard()

    def versions_in_use(self) -> frozenset[int]:
        """Return the versions that someone is fetching, from here or from others, and may come back for."""
        with self._lock:
            return self._board.versions_in_use(time.monotonic())

    def place(self, request: PlaceRequest) -> PlaceReply | None:
        """Return who is to feed the asker; None where it has everything."""
        key = (request.version, request.fingerprint)
        held = self._shelf.keys()
        if key not in held:
            versions = sorted(version for version, _ in held if version != BLOB)
            return PlaceReply(request.version, gone=f"the learner now holds {versions}")
        self._note(request)
        tree = self._trees.setdefault(key, RelayTree(self._fanout))
        places = tree.handle(_asked(request), time.monotonic())
        return PlaceReply(request.version, places[0].parent, places[0].address) if places else None

    def asked(self, subscriber: bytes, request: ChunkRequest) -> None:
        """Note that parts were asked for."""
        if request.version == BLOB:
            return
        is_last = request.offset + request.num_bytes >= self._total_bytes
        event = FetchOver(subscriber) if is_last else ChunkAsked(subscriber, request.version)
        with self._lock:
            self._board.handle(event, time.monotonic())

    def unreachable(self, subscriber: bytes) -> None:
        """Note that nothing can be sent to it; it may ask again."""
        with self._lock:
            self._board.handle(FetchOver(subscriber), time.monotonic())

    def tick(self) -> None:
        """Forget who is silent and what is no longer held."""
        now = time.monotonic()
        with self._lock:
            self._board.handle(Tick(), now)
        held = self._shelf.keys()
        self._trees = {key: tree for key, tree in self._trees.items() if key in held}
        for tree in self._trees.values():
            tree.handle(Tick(), now)

    def _note(self, request: PlaceRequest) -> None:
        """A place in a version is a fetch under way, and the end of having any other version."""
        if request.version == BLOB:
            return
        name = request.subscriber.encode()
        with self._lock:
            event = FetchOver(name) if request.is_whole else ChunkAsked(name, request.version)
            self._board.handle(event, time.monotonic())
        for (version, fingerprint), tree in self._trees.items():
            if version != BLOB and (version, fingerprint) != (request.version, request.fingerprint):
                tree.handle(Left(request.subscriber), time.monotonic())


def _asked(request: PlaceRequest) -> PlaceAsked:
    return PlaceAsked(
        request.subscriber, request.address, request.host, request.lost, request.have_bytes, is_whole=request.is_whole
    )
