"""Medium `zeromq`: generators ask the learner for a version part by part, over TCP; any number of machines.

The learner's ROUTER is served by a thread of its own; a generator opens a DEALER for each fetch. Nothing is pushed: a part is
sent because it was asked for, and a generator asks for at most WINDOW at a time, so a slow one slows nobody and no queue grows.

Invariants:
- A part is copied out of its slot under the lock under which the slot may be given to another version: no mixture is ever sent.
- A generator that asks for parts keeps its slot from being overwritten for a bounded time (SubscriberBoard); one that reads no
  answers has at most SEND_QUEUE parts waiting for it, then loses them.
- What is not a request is counted (`refused`) and not answered. With keys, peers without one of the right keys get no further
  than the handshake.
- A break in the connection costs what was under way: it reconnects and asks for those parts again.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
import zmq
import zmq.utils.z85

from asyncrl.broadcast.board import ChunkAsked, FetchOver, SubscriberBoard
from asyncrl.broadcast.chunks import MAX_REQUEST_BYTES, ChunkReply, ChunkRequest, Download
from asyncrl.broadcast.fingerprint import BucketHasher
from asyncrl.broadcast.medium import NUM_SLOTS, VersionUnavailableError
from asyncrl.broadcast.state import Tick
from asyncrl.config.stages import ZeroMQMedium
from asyncrl.errors import BroadcastError
from asyncrl.models.layout import bucket_ends
from asyncrl.schema.weights import WeightsAvailable, WeightsManifest
from asyncrl.transport.security import CLIENT_FILE, KEYS_FOLDER, load_client_keys

WINDOW = 4
SEND_QUEUE = 2 * WINDOW
RESEND_S = 2.0
STALLED_AFTER_S = 20.0
_POLL_MS = 200
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_HEARTBEAT_MS = 2000


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """One end's CURVE keys, Z85 (40 bytes each)."""

    public: bytes
    secret: bytes
    peers: tuple[bytes, ...]
    """Public keys of the other end: whoever may fetch (learner's end), or the learner's, one (generator's end)."""


def keys_of_run(run_folder: Path) -> CurveKeys | None:
    """Return the keys of a run whose channels are encrypted, None for one without keys.

    Every process of a run holds the same client pair (transport/security.py), so both ends show it and believe no other.
    """
    if not (run_folder / KEYS_FOLDER / CLIENT_FILE).exists():
        return None
    keys = load_client_keys(run_folder)
    public = keys.public.encode()
    return CurveKeys(public, keys.secret.encode(), (public,))


@dataclass(slots=True)
class _Whole:
    """A version that can be fetched."""

    slot: int
    version: int
    fingerprint: str


class ZeroMQWriter:
    """The learner's end; owns the address, the serving thread and the slots."""

    keeps_slots = True

    def __init__(self, config: ZeroMQMedium, keys: CurveKeys | None = None) -> None:
        self._config = config
        self._keys = keys
        self._lock = threading.Lock()
        self._whole: dict[int, _Whole] = {}
        self._board = SubscriberBoard()
        self._slots: tuple[memoryview, ...] = ()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self.refused = 0
        """Requests that were none: malformed, oversized, out of range."""
        self.location = ""

    def open(self, manifest: WeightsManifest) -> tuple[torch.Tensor, ...]:
        """Bind and start serving; see MediumWriter."""
        slots = tuple(torch.zeros(manifest.total_bytes, dtype=torch.uint8) for _ in range(NUM_SLOTS))
        self._slots = tuple(slot.numpy().data for slot in slots)
        self._context = zmq.Context(io_threads=1)
        sockets = self._bind(self._context)
        self._thread = threading.Thread(target=self._serve, args=sockets, name="asyncrl-weights-server", daemon=True)
        self._thread.start()
        return slots

    def busy_slots(self) -> frozenset[int]:
        """Return the slots that someone fetched from in the last moments."""
        with self._lock:
            in_use = self._board.versions_in_use(time.monotonic())
            return frozenset(whole.slot for whole in self._whole.values() if whole.version in in_use)

    def overwrite(self, slot: int, version: int) -> None:  # noqa: ARG002 - nothing is said about it before it is whole
        """Stop serving what the slot holds."""
        with self._lock:
            self._whole = {held: whole for held, whole in self._whole.items() if whole.slot != slot}

    def commit(self, slot: int, version: int, fingerprint: str) -> str:
        """Start serving the slot; see MediumWriter."""
        with self._lock:
            self._whole[version] = _Whole(slot, version, fingerprint)
        return self.location

    def put_blob(self, name: str, blob: bytes) -> None:
        """Start serving a delta; see MediumWriter."""
        raise NotImplementedError

    def drop_blob(self, name: str) -> None:
        """Stop serving it."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop serving; fetches under way end in BroadcastError."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        if self._context is not None:
            self._context.term()
        self._context, self._thread, self._slots = None, None, ()

    def _bind(self, context: zmq.Context[zmq.Socket[bytes]]) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes] | None]:
        """Return the serving socket and, with keys, the one that libzmq asks whom to let in."""
        doorman = None
        router = context.socket(zmq.ROUTER)
        router.linger = 0
        router.sndhwm = SEND_QUEUE
        router.rcvhwm = 2 * WINDOW
        router.maxmsgsize = MAX_REQUEST_BYTES
        router.router_mandatory = True
        router.heartbeat_ivl = _HEARTBEAT_MS
        if self._keys is not None:
            doorman = context.socket(zmq.REP)
            doorman.linger = 0
            doorman.bind(_ZAP_ADDRESS)
            router.curve_server = True
            router.curve_publickey, router.curve_secretkey = self._keys.public, self._keys.secret
        try:
            router.bind(self._config.bind)
        except zmq.ZMQError as error:
            context.destroy(linger=0)
            raise BroadcastError(f"cannot serve weights at {self._config.bind}: {error}") from error
        self.location = _reachable(router.getsockopt_string(zmq.LAST_ENDPOINT))
        return router, doorman

    def _serve(self, router: zmq.Socket[bytes], doorman: zmq.Socket[bytes] | None) -> None:
        """Answer until closing."""
        poller = zmq.Poller()
        for listening in filter(None, (router, doorman)):
            poller.register(listening, zmq.POLLIN)
        with contextlib.ExitStack() as sockets:
            for listening in filter(None, (router, doorman)):
                sockets.callback(listening.close)
            while not self._closing.is_set():
                ready = dict(poller.poll(_POLL_MS))
                if doorman in ready and doorman is not None:
                    self._admit(doorman)
                if router in ready:
                    self._answer(router)
                with self._lock:
                    self._board.handle(Tick(), time.monotonic())

    def _admit(self, doorman: zmq.Socket[bytes]) -> None:
        """Answer libzmq's question whether the bearer of a key may come in (ZeroMQ RFC 27)."""
        question = doorman.recv_multipart()
        assert self._keys is not None
        allowed = {zmq.utils.z85.decode(key) for key in self._keys.peers}
        is_known = len(question) == 7 and question[5] == b"CURVE" and question[6] in allowed
        status = (b"200", b"OK") if is_known else (b"400", b"unknown key")
        doorman.send_multipart([b"1.0", question[1], *status, b"", b""])

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        """Take one message and answer it if it is a request."""
        subscriber, *frames = router.recv_multipart()
        request = self._understand(frames)
        if request is None:
            self.refused += 1
            return
        reply, part = self._cut(subscriber, request)
        try:
            router.send_multipart([subscriber, msgspec.msgpack.encode(reply), part], flags=zmq.NOBLOCK, copy=len(part) < 65536)
        except zmq.ZMQError:
            # EAGAIN: it reads nothing. EHOSTUNREACH: it is gone. Either way it may ask again.
            with self._lock:
                self._board.handle(FetchOver(subscriber), time.monotonic())

    def _understand(self, frames: list[bytes]) -> ChunkRequest | None:
        if len(frames) != 1:
            return None
        try:
            request = msgspec.msgpack.decode(frames[0], type=ChunkRequest)
        except msgspec.DecodeError:
            return None
        total_bytes = len(self._slots[0])
        fits = request.num_bytes <= self._config.chunk_bytes and request.offset + request.num_bytes <= total_bytes
        return request if fits else None

    def _cut(self, subscriber: bytes, request: ChunkRequest) -> tuple[ChunkReply, bytes]:
        """Return the answer and a copy of the bytes."""
        with self._lock:
            whole = self._whole.get(request.version)
            if whole is None or whole.fingerprint != request.fingerprint:
                gone = f"the learner now holds {sorted(self._whole)}"
                return ChunkReply(request.version, request.offset, 0, gone), b""
            is_last = request.offset + request.num_bytes == len(self._slots[whole.slot])
            event = FetchOver(subscriber) if is_last else ChunkAsked(subscriber, request.version)
            self._board.handle(event, time.monotonic())
            part = bytes(self._slots[whole.slot][request.offset : request.offset + request.num_bytes])
        return ChunkReply(request.version, request.offset, request.num_bytes), part


class ZeroMQReader:
    """A generator's end; a connection for each fetch."""

    def __init__(self, config: ZeroMQMedium, keys: CurveKeys | None = None, stalled_after_s: float = STALLED_AFTER_S) -> None:
        self._config = config
        self._keys = keys
        self._stalled_after_s = stalled_after_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)

    def lease(self, available: WeightsAvailable) -> None:
        """Return none: the bytes are elsewhere."""

    def fetch_blob(self, available: WeightsAvailable, name: str, num_bytes: int, cancelled: threading.Event) -> bytes:
        """Ask for a delta; see MediumReader."""
        raise NotImplementedError

    def fetch(self, available: WeightsAvailable, into: memoryview, cancelled: threading.Event) -> bytes:
        """Ask for the version part by part; see MediumReader."""
        download = Download(len(into), self._config.chunk_bytes, WINDOW, RESEND_S)
        hasher = BucketHasher(bucket_ends(available.manifest))
        hashed = 0
        last_progress_s = time.monotonic()
        with self._connected(available.location) as dealer:
            while not download.is_done:
                self._ask(dealer, available, download)
                if self._take(dealer, available, download, into):
                    last_progress_s = time.monotonic()
                    hasher.update(into[hashed : download.whole_until])
                    hashed = download.whole_until
                elif cancelled.is_set():
                    raise VersionUnavailableError(f"the fetch of version {available.version} was cancelled")
                elif time.monotonic() - last_progress_s > self._stalled_after_s:
                    raise VersionUnavailableError(
                        f"version {available.version} stalled: nothing from {available.location} for {self._stalled_after_s:g} s "
                        f"({download.whole_until} of {len(into)} here); is the learner alive and reachable, do the keys match?"
                    )
        return hasher.digests()

    def close(self) -> None:
        """Release the context."""
        self._context.destroy(linger=0)

    @contextlib.contextmanager
    def _connected(self, location: str) -> Iterator[zmq.Socket[bytes]]:
        dealer = self._context.socket(zmq.DEALER)
        try:
            dealer.linger = 0
            dealer.rcvhwm = dealer.sndhwm = SEND_QUEUE
            dealer.maxmsgsize = self._config.chunk_bytes + MAX_REQUEST_BYTES
            dealer.heartbeat_ivl = _HEARTBEAT_MS
            if self._keys is not None:
                dealer.curve_publickey, dealer.curve_secretkey = self._keys.public, self._keys.secret
                dealer.curve_serverkey = self._keys.peers[0]
            dealer.connect(location)
            yield dealer
        except zmq.ZMQError as error:
            raise BroadcastError(f"cannot fetch weights from {location}: {error}") from error
        finally:
            dealer.close(linger=0)

    def _ask(self, dealer: zmq.Socket[bytes], available: WeightsAvailable, download: Download) -> None:
        for offset, num_bytes in download.to_ask(time.monotonic()):
            request = ChunkRequest(available.version, available.fingerprint, offset, num_bytes)
            # A full queue means that the connection is down; the part is asked for again when it is overdue.
            with contextlib.suppress(zmq.Again):
                dealer.send(msgspec.msgpack.encode(request), flags=zmq.NOBLOCK)

    def _take(self, dealer: zmq.Socket[bytes], available: WeightsAvailable, download: Download, into: memoryview) -> bool:
        """Wait a moment for one answer and put it where it belongs; return whether there was a part that was wanted."""
        if not dealer.poll(_POLL_MS):
            return False
        header, *parts = dealer.recv_multipart(copy=False)
        try:
            reply = msgspec.msgpack.decode(header.buffer, type=ChunkReply)
        except msgspec.DecodeError as error:
            raise BroadcastError(f"{available.location} answered what is no answer: {error}") from error
        if reply.gone:
            raise VersionUnavailableError(f"version {available.version} can no longer be fetched: {reply.gone}; fetch the newest")
        if len(parts) != 1 or len(parts[0].buffer) != reply.num_bytes or reply.version != available.version:
            raise BroadcastError(f"{available.location} answered with {len(parts)} parts that do not fit {reply}")
        if not download.take(reply.offset, reply.num_bytes):
            return False
        target = np.frombuffer(into, np.uint8)[reply.offset : reply.offset + reply.num_bytes]
        np.copyto(target, np.frombuffer(parts[0].buffer, np.uint8))
        return True


def _reachable(endpoint: str) -> str:
    """Return the endpoint with a host that other machines know where it was bound to all interfaces."""
    return endpoint.replace("://0.0.0.0:", f"://{socket.gethostname()}:")
