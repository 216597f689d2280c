"""One version, or one delta, on its way here over `zeromq`: from the learner or from whoever the learner sends us to.

Invariants:
- At most WINDOW parts are under way; what is here already is never asked for again, whoever feeds us.
- A feeder that breaks, falls silent or no longer has it costs what was under way (relay_child.py decides).

Called by zeromq_reader.py, on the fetching thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import zmq

from asyncrl.broadcast.chunks import BLOB, ChunkReply, ChunkRequest, Download, PlaceReply, PlaceRequest
from asyncrl.broadcast.medium import VersionUnavailableError
from asyncrl.broadcast.relay_child import AskFrom, AskPlace, ChildInstruction, GiveUp, Gone, Heard, Lost, Placed, RelayChild
from asyncrl.broadcast.relay_tree import LEARNER
from asyncrl.broadcast.state import Tick
from asyncrl.broadcast.zeromq_connection import FAREWELL_MS, Connection
from asyncrl.broadcast.zeromq_keys import CurveKeys, relay_keys
from asyncrl.broadcast.zeromq_server import WINDOW
from asyncrl.broadcast.zeromq_shelf import Key
from asyncrl.errors import BroadcastError

RESEND_S = 2.0
_POLL_MS = 200


@dataclass(frozen=True, slots=True)
class FetchSetting:
    """What all fetches of a reader have in common."""

    context: zmq.Context[zmq.Socket[bytes]]
    keys: CurveKeys | None
    chunk_bytes: int
    stalled_after_s: float
    subscriber: str
    """Own name."""
    address: str
    """Where this process feeds others; empty: nowhere, and it is fed by the learner alone."""
    host: str


class PartFetch:
    """One fetch; use once.

    Args:
        setting: Of the reader.
        key: What to fetch.
        location: The learner's address.
        into: Where it goes.
        lost: Subscribers not to be fed by.
        on_part: Told the offset of every part that is final.
        on_more: Given the next bytes, in order, as soon as everything before them is here too, and where to copy them; None: they
            lie in their place already.
    """

    def __init__(
        self,
        setting: FetchSetting,
        key: Key,
        location: str,
        into: memoryview,
        lost: tuple[str, ...],
        on_part: Callable[[int], None],
        on_more: Callable[[memoryview, memoryview | None], None],
    ) -> None:
        self._setting = setting
        self._key = key
        self._into = into
        self._on_part = on_part
        self._on_more = on_more
        self._passed_on = 0
        self._download = Download(len(into), setting.chunk_bytes, WINDOW, RESEND_S)
        self._child = RelayChild(time.monotonic(), setting.stalled_after_s, lost)
        self._learner = Connection(setting.context, location, setting.chunk_bytes, setting.keys)
        self._parent: Connection | None = None
        self._poller = zmq.Poller()
        self._watch(self._learner)
        self._unsent_place: PlaceRequest | None = None
        if not setting.address:
            self._carry_out(self._child.handle(Placed(LEARNER), time.monotonic()))

    @property
    def fed_by(self) -> tuple[str, ...]:
        """Return the subscribers that sent parts or were lost."""
        return self._child.fed_by + self._child.lost

    def run(self, cancelled: threading.Event) -> None:
        """Fetch until everything is here.

        Raises:
            VersionUnavailableError: It is gone, does not come, or the fetch was cancelled.
            BroadcastError: The learner answered nonsense.
        """
        try:
            while not self._download.is_done:
                self._carry_out(self._child.handle(Tick(), time.monotonic()))
                self._send_place()
                self._ask()
                self._listen()
                if cancelled.is_set():
                    raise VersionUnavailableError(f"the fetch of {self._what()} was cancelled")
            self._say_whole()
        finally:
            self._drop_parent()
            self._learner.close(FAREWELL_MS)

    def _ask(self) -> None:
        """Keep as many parts under way as the window allows."""
        if self._child.parent is None:
            return
        feeder = self._parent or self._learner
        for offset, num_bytes in self._download.to_ask(time.monotonic()):
            if not feeder.send(ChunkRequest(*self._key, offset, num_bytes)):
                self._download.lose()
                return

    def _listen(self) -> None:
        """Wait a moment for answers and news, and take them."""
        ready = dict(self._poller.poll(_POLL_MS))
        for connection in (self._parent, self._learner):
            if connection is not None and connection.news in ready:
                self._take_news(connection)
            if connection is not None and connection.socket in ready:
                self._take_answers(connection)

    def _take_news(self, connection: Connection) -> None:
        broken, unreachable = connection.take_news()
        if broken and connection is (self._parent or self._learner):
            self._download.lose()
        if connection is self._parent and (broken or unreachable):
            self._handle_lost()

    def _take_answers(self, connection: Connection) -> None:
        """Take what is there, asking on meanwhile; a window's worth at most, others wait."""
        with contextlib.suppress(zmq.Again):
            for _ in range(WINDOW):
                if connection.socket.closed:
                    return
                self._take_answer(connection)
                self._ask()

    def _take_answer(self, connection: Connection) -> None:
        source = self._source(connection)
        try:
            reply, part = connection.receive()
        except BroadcastError:
            if connection is self._learner:
                raise
            self._handle_lost()
            return
        now = time.monotonic()
        match reply:
            case PlaceReply(gone="") if connection is self._learner:
                self._carry_out(self._child.handle(Placed(reply.parent, reply.address), now))
            case PlaceReply(gone=reason) if connection is self._learner:
                self._carry_out(self._child.handle(Gone(LEARNER, reason), now))
            case ChunkReply(gone=reason) if reason:
                self._carry_out(self._child.handle(Gone(source, reason), now))
            case ChunkReply():
                is_part = bool(part) and reply.version == self._key[0] and self._download.take(reply.offset, reply.num_bytes)
                self._child.handle(Heard(source, is_part), now)
                if is_part:
                    self._put(reply.offset, part)

    def _put(self, offset: int, part: memoryview) -> None:
        """Copy a part to its place; where it is the next, it is passed on as it is copied."""
        end = offset + len(part)
        if offset == self._passed_on:
            self._on_more(part, self._into[offset:end])
            self._passed_on = end
        else:
            np.copyto(np.frombuffer(self._into, np.uint8)[offset:end], np.frombuffer(part, np.uint8))
        self._on_part(offset)
        if self._download.whole_until > self._passed_on:
            self._on_more(self._into[self._passed_on : self._download.whole_until], None)
            self._passed_on = self._download.whole_until

    def _carry_out(self, instructions: list[ChildInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case AskPlace(lost) if self._setting.address:
                    if self._child.parent is None:
                        self._drop_parent()
                    self._unsent_place = self._place_request(lost)
                case AskFrom(parent, address):
                    self._change_feeder(parent, address)
                case GiveUp(reason, is_stalled):
                    raise VersionUnavailableError(self._why(reason, is_stalled=is_stalled))

    def _change_feeder(self, parent: str, address: str) -> None:
        self._drop_parent()
        if parent == LEARNER:
            return
        setting = self._setting
        try:
            self._parent = Connection(setting.context, address, setting.chunk_bytes, relay_keys(setting.keys))
        except BroadcastError:
            self._handle_lost()
            return
        self._watch(self._parent)

    def _handle_lost(self) -> None:
        """Say that whoever feeds us now is lost."""
        if self._child.parent:
            self._carry_out(self._child.handle(Lost(self._child.parent), time.monotonic()))

    def _drop_parent(self) -> None:
        """Stop asking whoever fed us: what is under way will not come."""
        self._download.lose()
        if self._parent is not None:
            self._poller.unregister(self._parent.socket)
            self._poller.unregister(self._parent.news)
            self._parent.close()
            self._parent = None

    def _send_place(self) -> None:
        if self._unsent_place is not None and self._learner.send(self._unsent_place):
            self._unsent_place = None

    def _say_whole(self) -> None:
        """Tell the learner that we need nobody any more and can feed others."""
        if self._setting.address:
            self._learner.send(self._place_request((), is_whole=True))

    def _place_request(self, lost: tuple[str, ...], *, is_whole: bool = False) -> PlaceRequest:
        setting = self._setting
        have_bytes = self._download.have_bytes
        return PlaceRequest(*self._key, setting.subscriber, setting.address, setting.host, lost, have_bytes, is_whole)

    def _watch(self, connection: Connection) -> None:
        self._poller.register(connection.socket, zmq.POLLIN)
        self._poller.register(connection.news, zmq.POLLIN)

    def _source(self, connection: Connection) -> str:
        return LEARNER if connection is self._learner else self._child.parent or LEARNER

    def _what(self) -> str:
        version, name = self._key
        return f"the delta {name!r}" if version == BLOB else f"version {version}"

    def _why(self, reason: str, *, is_stalled: bool) -> str:
        if not is_stalled:
            return f"{self._what()} can no longer be fetched: {reason}; fetch the newest"
        return (
            f"{self._what()} stalled: {reason} from {self._learner.address} or those that it names "
            f"({self._download.have_bytes} of {len(self._into)} bytes here); is the learner alive and reachable, "
            "do the keys match?"
        )
