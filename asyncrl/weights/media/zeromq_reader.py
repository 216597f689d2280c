"""Medium `zeromq`, a generator's end: fetches part by part, serves others what it has. The rules stand in zeromq.py."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import zmq

from asyncrl.config.broadcast import ZeroMQMedium
from asyncrl.errors import BroadcastError
from asyncrl.models.layout import bucket_ends
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.weights.delta import blob_fingerprint
from asyncrl.weights.fingerprint import fingerprints_of
from asyncrl.weights.media.base import VersionUnavailableError
from asyncrl.weights.media.zeromq import (
    BLOB,
    LEARNER,
    MAX_REQUEST_BYTES,
    SILENT_AFTER_S,
    FeederReply,
    FeederRequest,
    Key,
    PartReply,
    PartRequest,
    PartServer,
    decode,
    is_slow,
)
from asyncrl.weights.sockets import WINDOW, CurveKeys, open_dealer

STALLED_AFTER_S = 20.0
ASK_EVERY_S = 1.0
ASK_WAITING_S = 0.1
BLOBS_KEPT = 4
_POLL_MS = 100
_KEPT_BY_ALLOCATOR_BYTES = (32 << 20) - (64 << 10)
"""Just under the most that glibc takes as a hint (DEFAULT_MMAP_THRESHOLD_MAX)."""


class ZeroMQReader:
    """A generator's end; connections for each fetch, and a server for as long as it lives.

    Raises:
        BroadcastError: `relay_bind` cannot be listened at.
    """

    def __init__(self, config: ZeroMQMedium, keys: CurveKeys | None = None, stalled_after_s: float = STALLED_AFTER_S) -> None:
        # Looks like nothing, and is worth half the time of a fetch: until glibc has once seen something this large freed, it
        # gives freed memory back to the system at once, and the pages of every message of libzmq are faulted in anew.
        np.empty(_KEPT_BY_ALLOCATOR_BYTES, np.uint8)
        # Other generators hold the same pair as this one, and nobody else does.
        self.relay_keys = CurveKeys(keys.public, keys.secret, (keys.public,)) if keys else None
        self.server = PartServer(config.relay_bind, config.chunk_bytes, self.relay_keys) if config.fanout else None
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.keys = keys
        self.chunk_bytes = config.chunk_bytes
        self.stalled_after_s = stalled_after_s
        self.name = secrets.token_hex(8)
        self._whole: Key | None = None
        self._distrusted: tuple[Key, tuple[str, ...]] = ((0, ""), ())
        """Who fed damaged bytes of which version."""

    def lease(self, available: WeightsAvailable) -> None:
        """Return none: the bytes are elsewhere."""

    def fetch(self, available: WeightsAvailable, into: memoryview, cancelled: threading.Event) -> bytes:
        """Ask for the version part by part; see MediumReader."""
        key = (available.version, available.fingerprint)
        self._withdraw()
        lost = self._distrusted[1] if self._distrusted[0] == key else ()
        with contextlib.closing(_Fetch(self, key, available.location, into, lost)) as fetch, self._serving(key, into):
            fetch.run(cancelled)
            found = fingerprints_of(into, bucket_ends(available.manifest))
            if found != available.bucket_fingerprints:
                self._distrusted = key, fetch.fed_by
                self._drop(key)
            else:
                self._whole = key
                fetch.tell(is_whole=True)
        return found

    def fetch_blob(self, available: WeightsAvailable, name: str, num_bytes: int, cancelled: threading.Event) -> bytes:
        """Ask for a delta; see MediumReader."""
        self._withdraw()  # it is about to be applied to the buffer
        key, blob = (BLOB, name), memoryview(bytearray(num_bytes))
        with contextlib.closing(_Fetch(self, key, available.location, blob, ())) as fetch, self._serving(key, blob):
            fetch.run(cancelled)
            if any(delta.name == name and delta.fingerprint != blob_fingerprint(bytes(blob)) for delta in available.deltas):
                self._drop(key)
            else:
                fetch.tell(is_whole=True)
        if self.server is not None:
            for old in [held for held in self.server.keys() if held[0] == BLOB][:-BLOBS_KEPT]:  # noqa: SIM118 - not a dict
                self.server.drop(old)
        return bytes(blob)

    @contextlib.contextmanager
    def _serving(self, key: Key, into: memoryview) -> Iterator[None]:
        """Serve what arrives; not any longer where the fetch fails."""
        if self.server is not None:
            self.server.put(key, into, copied=True, num_here=0)
        try:
            yield
        except BaseException:
            self._drop(key)
            raise

    def _drop(self, key: Key) -> None:
        if self.server is not None:
            self.server.drop(key)

    def close(self) -> None:
        """Stop feeding others and release everything. Safe to repeat."""
        if self.server is not None:
            self.server.close()
        self.context.destroy(linger=0)

    def _withdraw(self) -> None:
        """Stop serving the buffer of the last fetch: it is about to be written to."""
        if self._whole is not None:
            self._drop(self._whole)
        self._whole = None


class _Fetch:
    """One version, or one delta, on its way here; use once."""

    def __init__(self, reader: ZeroMQReader, key: Key, location: str, into: memoryview, lost: tuple[str, ...]) -> None:
        self._reader = reader
        self._key = key
        self._location = location
        self._into = into
        self._target = np.frombuffer(into, np.uint8)
        self._have = self._asked = 0
        """Bytes that are here, and bytes that were asked for: in order, whoever feeds us."""
        self._lost = lost
        self.fed_by = lost
        """Every subscriber that sent us a part."""
        self._feeder: str | None = None
        now = time.monotonic()
        self._sign_s = self._part_s = self._fed_since_s = now
        self._fed_from = 0
        self._told_s = float("-inf")
        self._learner = self._connect(location, reader.keys)
        self._source = self._learner
        """Where parts come from: the learner's connection, or one to the generator that feeds us."""

    def run(self, cancelled: threading.Event) -> None:
        """Fetch until everything is here.

        Raises:
            VersionUnavailableError: It is gone, does not come, or the fetch was cancelled.
        """
        total, window = len(self._into), WINDOW * self._reader.chunk_bytes
        while self._have < total:
            now = time.monotonic()
            if cancelled.is_set():
                raise VersionUnavailableError(f"the fetch of {self._what()} was cancelled")
            self._look_at_the_clock(now)
            if now - self._told_s >= (ASK_WAITING_S if self._feeder is None else ASK_EVERY_S):
                self.tell()
            while self._feeder is not None and self._asked < min(total, self._have + window):
                num_bytes = min(self._reader.chunk_bytes, total - self._asked)
                if not _try_send(self._source, PartRequest(*self._key, self._asked, num_bytes)):
                    break
                self._asked += num_bytes
            poller = zmq.Poller()
            for connection in {self._learner, self._source}:
                poller.register(connection, zmq.POLLIN)
            for connection, _ in poller.poll(_POLL_MS):
                if not connection.closed:  # an answer of the learner may have ended the other
                    self._take(connection)

    def tell(self, *, is_whole: bool = False) -> None:
        """Tell the learner how far we are, and ask who is to feed us."""
        reader, address = self._reader, self._reader.server.location if self._reader.server else ""
        host = socket.gethostname()[:64]
        _try_send(self._learner, FeederRequest(*self._key, reader.name, address, host, self._lost[-16:], self._have, is_whole))
        self._told_s = time.monotonic()

    def close(self) -> None:
        """Close the connections; what was said last still goes out."""
        if self._source is not self._learner:
            self._source.close(linger=0)
        self._learner.close()

    def _look_at_the_clock(self, now: float) -> None:
        if now - self._sign_s > self._reader.stalled_after_s:
            raise VersionUnavailableError(
                f"{self._what()} stalled: nothing came for {self._reader.stalled_after_s:g} s from {self._location} or those "
                f"that it names ({self._have} of {len(self._into)} bytes here); is the learner alive and reachable, do the keys "
                "match?"
            )
        is_silent = now - max(self._part_s, self._fed_since_s) > SILENT_AFTER_S
        if self._feeder and (is_silent or is_slow(self._have - self._fed_from, now - self._fed_since_s)):
            self._leave()
        elif self._feeder == LEARNER and is_silent:
            # The connection broke: what was asked for is lost. A new one has none of the old answers.
            self._learner.close(linger=0)
            self._learner = self._connect(self._location, self._reader.keys)
            self._be_fed_by(LEARNER, self._learner)

    def _take(self, connection: zmq.Socket[bytes]) -> None:
        """Take one answer in."""
        header, *parts = connection.recv_multipart(copy=False)
        part = parts[0].buffer if parts else memoryview(b"")
        reply = decode([header.bytes], FeederReply | PartReply)
        if isinstance(reply, FeederReply) and connection is self._learner:
            self._take_feeder(reply)
        elif not isinstance(reply, PartReply):
            if connection is self._learner:
                raise BroadcastError(f"the learner at {self._location} answered what is no answer about {self._what()}")
            self._leave()
        elif connection is self._source and reply.gone:
            if connection is self._learner:
                raise self._gone(reply.gone)
            self._leave()
        # Any other part is of a feeder that was left. One that was lost on its way is missed, and asked for again, by time-out.
        elif (
            connection is self._source
            and reply.offset == self._have
            and len(part) == min(self._asked - self._have, reply.num_bytes)
        ):
            end = reply.offset + len(part)
            np.copyto(self._target[reply.offset : end], np.frombuffer(part, np.uint8))
            self._have = end
            if self._reader.server is not None:
                self._reader.server.arrived(self._key, end)
            self._part_s = self._sign_s = time.monotonic()
            if self._feeder and self._feeder not in self.fed_by:
                self.fed_by = (*self.fed_by, self._feeder)

    def _take_feeder(self, reply: FeederReply) -> None:
        if reply.gone:
            if not self._feeder:
                raise self._gone(reply.gone)
        elif reply.wait:
            self._sign_s = time.monotonic()
        elif self._feeder is None and reply.feeder not in self._lost:
            if reply.feeder == LEARNER:
                self._be_fed_by(LEARNER, self._learner)
                return
            try:
                source = self._connect(reply.address, self._reader.relay_keys)
            except BroadcastError:
                self._lost = (*self._lost, reply.feeder)
                return
            self._be_fed_by(reply.feeder, source)

    def _be_fed_by(self, feeder: str, source: zmq.Socket[bytes]) -> None:
        self._feeder, self._source, self._asked = feeder, source, self._have
        self._fed_since_s, self._fed_from = time.monotonic(), self._have

    def _leave(self) -> None:
        """Leave who feeds us and ask for another."""
        if self._feeder:
            self._lost = (*self._lost, self._feeder)
        if self._source is not self._learner:
            self._source.close(linger=0)
        self._feeder, self._source = None, self._learner
        self._told_s = float("-inf")

    def _connect(self, address: str, keys: CurveKeys | None) -> zmq.Socket[bytes]:
        return open_dealer(self._reader.context, address, keys, self._reader.chunk_bytes + MAX_REQUEST_BYTES)

    def _gone(self, reason: str) -> VersionUnavailableError:
        return VersionUnavailableError(f"{self._what()} can no longer be fetched: {reason}; fetch the newest")

    def _what(self) -> str:
        version, name = self._key
        return f"the delta {name!r}" if version == BLOB else f"version {version}"


def _try_send(connection: zmq.Socket[bytes], request: msgspec.Struct) -> bool:
    """Send without waiting; return whether there was room."""
    try:
        connection.send(msgspec.msgpack.encode(request), flags=zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True
