"""Serves parts over a ROUTER socket on a thread of its own: for the learner, and for a generator that feeds others.

Invariants:
- A part is sent because it was asked for. One that reads no answers has at most SEND_QUEUE parts waiting for it, then loses them.
- What is asked for and still arriving here is answered once it has arrived; until then the asker hears every TICK_S that we
  live. At most WINDOW requests of MAX_WAITING askers wait.
- What is not a request is counted (`refused`) and not answered. With keys, peers without one of the right keys get no further
  than the handshake.

Called by zeromq_writer.py and zeromq_reader.py.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq
import zmq.utils.z85

from asyncrl.broadcast.chunks import MAX_REQUEST_BYTES, UNDECODABLE, ChunkReply, ChunkRequest, PlaceReply, PlaceRequest, parts_of
from asyncrl.broadcast.zeromq_keys import CurveKeys
from asyncrl.broadcast.zeromq_shelf import Shelf
from asyncrl.errors import BroadcastError

WINDOW = 8
SEND_QUEUE = 4 * WINDOW
"""libzmq hears of what was read half a queue at a time: twice the window would be full with a whole window on its way."""
HEARTBEAT_MS = 2000
TICK_S = 0.5
MAX_WAITING = 64
_POLL_MS = 200
_DONE = zmq.MessageTracker()
_ZAP_ADDRESS = "inproc://zeromq.zap.01"

_Request = ChunkRequest | PlaceRequest


class Desk(Protocol):
    """Where the learner keeps who fetches what; all calls come from the serving thread."""

    def place(self, request: PlaceRequest) -> PlaceReply | None:
        """Return who is to feed the asker; None: it needs nobody."""
        ...

    def asked(self, subscriber: bytes, request: ChunkRequest) -> None:
        """Note that parts were asked for."""
        ...

    def unreachable(self, subscriber: bytes) -> None:
        """Note that nothing can be sent to it."""
        ...

    def tick(self) -> None:
        """Let time pass."""
        ...


class PartServer:
    """Owns an address, a context and the thread that serves a shelf.

    Args:
        bind: Endpoint to listen at.
        shelf: What there is.
        chunk_bytes: Of a part; a request asks for a window of them at most.
        keys: Own pair and who may come in; None: plain, everyone.
        desk: The learner's; None: places are not given here.
    """

    def __init__(self, bind: str, shelf: Shelf, chunk_bytes: int, keys: CurveKeys | None, desk: Desk | None = None) -> None:
        self._shelf = shelf
        self._chunk_bytes = chunk_bytes
        self._keys = keys
        self._desk = desk
        self._buffers = _Buffers(chunk_bytes)
        self._waiting: dict[bytes, dict[int, ChunkRequest]] = {}
        self._ticked_s = 0.0
        self._closing = threading.Event()
        self.refused = 0
        """Requests that were none: malformed, oversized, out of range."""
        self.served_bytes = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        with contextlib.ExitStack() as undo:
            undo.callback(self._context.destroy, linger=0)
            router, doorman = self._bind(bind)
            self.location = reachable(router.getsockopt_string(zmq.LAST_ENDPOINT))
            self._bell, self._listening = map(undo.enter_context, socket.socketpair())
            self._bell.setblocking(False)
            self._listening.setblocking(False)
            self._thread = threading.Thread(
                target=self._serve, args=(router, doorman), name="asyncrl-weights-server", daemon=True
            )
            self._thread.start()
            undo.pop_all()

    @property
    def is_serving(self) -> bool:
        """Return whether requests are answered; False after `close`, or where the serving thread broke."""
        return self._thread.is_alive()

    def ring(self) -> None:
        """Say that something arrived on the shelf; from any one thread."""
        # Who begins to wait after this look finds the part on the shelf: what waits is tried once more after it is noted.
        if self._waiting or self._closing.is_set():
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._bell.send(b"\0")

    def close(self) -> None:
        """Stop serving. Safe to repeat."""
        self._closing.set()
        self.ring()
        self._thread.join()
        self._context.term()
        self._bell.close()
        self._listening.close()

    def _bind(self, address: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes] | None]:
        """Return the serving socket and, with keys, the one that libzmq asks whom to let in."""
        doorman = None
        router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.sndhwm = SEND_QUEUE
        router.rcvhwm = 2 * WINDOW
        router.maxmsgsize = MAX_REQUEST_BYTES
        router.router_mandatory = True
        router.heartbeat_ivl = HEARTBEAT_MS
        if self._keys is not None:
            doorman = self._context.socket(zmq.REP)
            doorman.linger = 0
            doorman.bind(_ZAP_ADDRESS)
            router.curve_server = True
            router.curve_publickey, router.curve_secretkey = self._keys.public, self._keys.secret
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            raise BroadcastError(
                f"cannot serve weights at {address}: {error}; give an address of this machine, and port * where several "
                "processes share it (broadcast.medium.bind, broadcast.medium.relay_bind)"
            ) from error
        return router, doorman

    def _serve(self, router: zmq.Socket[bytes], doorman: zmq.Socket[bytes] | None) -> None:
        """Answer until closing."""
        poller = zmq.Poller()
        for listening in filter(None, (router, doorman)):
            poller.register(listening, zmq.POLLIN)
        poller.register(self._listening, zmq.POLLIN)
        with contextlib.ExitStack() as sockets:
            for listening in filter(None, (router, doorman)):
                sockets.callback(listening.close)
            while not self._closing.is_set():
                ready = dict(poller.poll(_POLL_MS))
                if doorman is not None and doorman in ready:
                    self._admit(doorman)
                if router in ready:
                    self._answer_all(router)
                if self._listening.fileno() in ready:
                    self._listening.recv(4096)
                self._serve_waiting(router)
                self._tick(router, time.monotonic())

    def _admit(self, doorman: zmq.Socket[bytes]) -> None:
        """Answer libzmq's question whether the bearer of a key may come in (ZeroMQ RFC 27)."""
        question = doorman.recv_multipart()
        assert self._keys is not None
        allowed = {zmq.utils.z85.decode(key) for key in self._keys.peers}
        is_known = len(question) == 7 and question[5] == b"CURVE" and question[6] in allowed
        status = (b"200", b"OK") if is_known else (b"400", b"unknown key")
        doorman.send_multipart([b"1.0", question[1], *status, b"", b""])

    def _answer_all(self, router: zmq.Socket[bytes]) -> None:
        """Answer what is there; a bounded number, the doorman waits."""
        with contextlib.suppress(zmq.Again):
            for _ in range(SEND_QUEUE):
                self._answer(router, *router.recv_multipart(flags=zmq.NOBLOCK))

    def _answer(self, router: zmq.Socket[bytes], subscriber: bytes, *frames: bytes) -> None:
        """Answer one message if it is a request."""
        match self._understand(frames):
            case PlaceRequest() as request if self._desk is not None:
                if (place := self._desk.place(request)) is not None:
                    self._send(router, subscriber, place)
            case ChunkRequest() as request if request.num_bytes <= WINDOW * self._chunk_bytes:
                if self._desk is not None:
                    self._desk.asked(subscriber, request)
                for part in parts_of(request, self._chunk_bytes):
                    self._answer_chunk(router, subscriber, part)
            case _:
                self.refused += 1

    def _understand(self, frames: tuple[bytes, ...]) -> _Request | None:
        if len(frames) != 1:
            return None
        try:
            return msgspec.msgpack.decode(frames[0], type=_Request)  # type: ignore[arg-type, no-any-return]
        except UNDECODABLE:
            return None

    def _answer_chunk(self, router: zmq.Socket[bytes], subscriber: bytes, request: ChunkRequest) -> bool:
        """Send the part, or why there is none; return whether that settles the request."""
        reply = ChunkReply(request.version, request.offset, request.num_bytes)
        if (lent := self._shelf.lend(request)) is not None:
            if (sent := self._send(router, subscriber, reply, lent)) is not None:
                self._shelf.lent(request, sent)
            return True
        buffer = self._buffers.take()
        cut = self._shelf.cut(request, buffer.data)
        if cut == "here":
            self._buffers.give_back(buffer, self._send(router, subscriber, reply, buffer.data[: request.num_bytes]))
            return True
        self._buffers.give_back(buffer)
        if cut == "gone":
            held = sorted({version for version, _ in self._shelf.keys()})  # noqa: SIM118 - not a dict
            self._send(router, subscriber, ChunkReply(request.version, request.offset, 0, gone=f"what is held now is {held}"))
        elif cut == "outside":
            self.refused += 1
        else:
            self._let_wait(subscriber, request)
        return cut != "later"

    def _let_wait(self, subscriber: bytes, request: ChunkRequest) -> None:
        """Keep a request until its part arrives; one too many is forgotten, its asker asks again."""
        if subscriber in self._waiting or len(self._waiting) < MAX_WAITING:
            requests = self._waiting.setdefault(subscriber, {})
            if len(requests) < WINDOW:
                requests[request.offset] = request

    def _serve_waiting(self, router: zmq.Socket[bytes]) -> None:
        """Answer what has arrived since it was asked for."""
        for subscriber, requests in list(self._waiting.items()):
            for offset in sorted(requests):
                if self._answer_chunk(router, subscriber, requests[offset]):
                    del requests[offset]
            if not requests:
                del self._waiting[subscriber]

    def _tick(self, router: zmq.Socket[bytes], now: float) -> None:
        """Tell those that wait, now and then, that we live."""
        if now - self._ticked_s < TICK_S:
            return
        self._ticked_s = now
        if self._desk is not None:
            self._desk.tick()
        for subscriber, requests in list(self._waiting.items()):
            request = next(iter(requests.values()))
            if self._send(router, subscriber, ChunkReply(request.version, request.offset, 0, waiting=True)) is None:
                del self._waiting[subscriber]

    def _send(
        self,
        router: zmq.Socket[bytes],
        subscriber: bytes,
        reply: ChunkReply | PlaceReply,
        part: memoryview | bytes = b"",
    ) -> zmq.MessageTracker | None:
        """Send without waiting; return what says when `part` is done with, None where nothing went out."""
        is_chunk = isinstance(reply, ChunkReply)
        sent = _DONE
        # Before it goes out: who has the part may ask at once how much was served.
        self.served_bytes += len(part)
        try:
            router.send(subscriber, zmq.SNDMORE | zmq.NOBLOCK)
            router.send(msgspec.msgpack.encode(reply), zmq.NOBLOCK | (zmq.SNDMORE if is_chunk else 0))
            if is_chunk:
                sent = router.send(part, zmq.NOBLOCK, copy=False, track=True) or _DONE
        except zmq.ZMQError:
            # EAGAIN: it reads nothing. EHOSTUNREACH: it is gone. Either way it may ask again.
            self.served_bytes -= len(part)
            if self._desk is not None:
                self._desk.unreachable(subscriber)
            return None
        return sent


@dataclass(slots=True)
class _Buffer:
    """Memory for one part on its way out."""

    data: memoryview
    sent: zmq.MessageTracker | None = None
    """None: it is free."""


class _Buffers:
    """Parts' memory, used again and again: fresh pages cost as much as the copy into them."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._out: deque[_Buffer] = deque()
        self._free: list[_Buffer] = []

    def take(self) -> _Buffer:
        """Return one that nobody uses, the one used last first."""
        for _ in range(len(self._out)):
            buffer = self._out.popleft()
            self.give_back(buffer, None if buffer.sent is None or buffer.sent.done else buffer.sent)
        return self._free.pop() if self._free else _Buffer(memoryview(bytearray(self._num_bytes)))

    def give_back(self, buffer: _Buffer, sent: zmq.MessageTracker | None = None) -> None:
        """Take it back, to be used again once what lies in it is sent; more than two windows of free ones are not kept."""
        buffer.sent = sent
        if sent is not None:
            self._out.append(buffer)
        elif len(self._free) < 2 * WINDOW:
            self._free.append(buffer)


def reachable(endpoint: str) -> str:
    """Return the endpoint with a host that other machines know where it was bound to all interfaces."""
    return endpoint.replace("://0.0.0.0:", f"://{socket.gethostname()}:")
