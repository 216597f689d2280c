"""Medium `zeromq`, a generator's end: fetches in parts and serves its bytes to others. The rules are in zeromq.py."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import zmq

from asyncrl.config.broadcast import ZeroMQMedium
from asyncrl.errors import BroadcastError
from asyncrl.models.layout import bucket_ends
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.transport.security import ClientKeys
from asyncrl.weights.buckets import fingerprints_of
from asyncrl.weights.delta import blob_fingerprint
from asyncrl.weights.media.base import MediumReader, VersionUnavailableError
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
)
from asyncrl.weights.sockets import WINDOW, ask, decode, open_dealer

T = TypeVar("T")

STALLED_AFTER_S = 20.0
SLOW_BYTES_PER_S = 4 << 20
"""A feeder that sends less than this for SILENT_AFTER_S is slow; the learner then takes its place."""
LEAST_PART_BYTES = 64 << 10
"""If a part takes longer than SILENT_AFTER_S, smaller parts are requested, down to this size."""
ASK_EVERY_S = 1.0
ASK_WAITING_S = 0.1
BLOBS_KEPT = 4
_POLL_MS = 100
_KEPT_BY_ALLOCATOR_BYTES = (32 << 20) - (64 << 10)
"""Slightly below the largest size that glibc takes as a hint (DEFAULT_MMAP_THRESHOLD_MAX)."""


class ZeroMQReader(MediumReader):
    """A generator's end; opens connections for each fetch, and has one server until it is closed.

    Raises:
        BroadcastError: The server cannot listen at `relay_bind`.
    """

    def __init__(self, config: ZeroMQMedium, keys: ClientKeys | None = None, stalled_after_s: float = STALLED_AFTER_S) -> None:
        # This looks useless, but saves half the time of a fetch: until an allocation of this size was freed once, glibc returns
        # freed memory to the system at once, so every message of libzmq causes new page faults.
        np.empty(_KEPT_BY_ALLOCATOR_BYTES, np.uint8)
        self.server = PartServer(config.relay_bind, config.chunk_bytes, keys, copies_parts=True) if config.fanout else None
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.keys = keys
        self.chunk_bytes = config.chunk_bytes
        self.stalled_after_s = stalled_after_s
        self.name = secrets.token_hex(8)
        self._whole: Key | None = None
        """The complete version in the buffer, which is served."""
        self._distrusted: tuple[Key, str] = ((0, ""), "")
        """The version of which damaged bytes arrived, and the feeder that sent them."""

    def fetch(self, available: WeightsAvailable, into: memoryview, cancelled: threading.Event) -> bytes:
        """Fetch the version in parts; see MediumReader."""
        key, find = (available.version, available.fingerprint), partial(fingerprints_of, into, bucket_ends(available.manifest))
        found = self._get(key, available.location, into, cancelled, find, available.bucket_fingerprints)
        self._whole = key
        return found

    def fetch_blob(self, available: WeightsAvailable, name: str, num_bytes: int, cancelled: threading.Event) -> bytes:
        """Fetch a delta; see MediumReader. It will be applied to the buffer, so the version there is no longer served."""
        blob = memoryview(bytearray(num_bytes))
        expected = next(delta.fingerprint for delta in available.deltas if delta.name == name)
        self._get((BLOB, name), available.location, blob, cancelled, lambda: blob_fingerprint(bytes(blob)), expected)
        if self.server is not None:
            for old in [key for key in self.server.held() if key[0] == BLOB][:-BLOBS_KEPT]:
                self.server.drop(old)
        return bytes(blob)

    def close(self) -> None:
        """Stop feeding others and release everything. Safe to repeat."""
        if self.server is not None:
            self.server.close()
        self.context.destroy(linger=0)

    def _get(
        self, key: Key, location: str, into: memoryview, cancelled: threading.Event, find: Callable[[], T], announced: T
    ) -> T:
        """Fetch a version or delta and serve its bytes meanwhile, and later if the fingerprint that `find` returns is right."""
        if self.server is not None:
            if self._whole is not None:
                self.server.drop(self._whole)
            self.server.put(key, into, 0)
        self._whole, is_right = None, False
        fetch = _Fetch(self, key, location, into, self._distrusted[1] if self._distrusted[0] == key else "")
        try:
            fetch.run(cancelled)
            found = find()
            is_right = found == announced
            if is_right:
                fetch.tell(is_whole=True)
            else:
                self._distrusted = key, fetch.feeder or fetch.lost
            return found
        finally:
            if not is_right and self.server is not None:
                self.server.drop(key)
            fetch.close()


class _Fetch:
    """One fetch of a version or delta; use once."""

    def __init__(self, reader: ZeroMQReader, key: Key, location: str, into: memoryview, lost: str) -> None:
        self._reader, self._key = reader, key
        self._what = f"the delta {key[1]!r}" if key[0] == BLOB else f"version {key[0]}"
        self._location = location
        self._into = into
        self._have = self._asked = 0
        """Bytes that have arrived, and bytes that were requested; both in order, from any feeder."""
        self._part_bytes = reader.chunk_bytes
        self.lost = lost
        """The generator that must not be used as feeder any more."""
        self.feeder: str | None = None
        self._sign_s = self._part_s = self._fed_since_s = time.monotonic()
        self._fed_from = 0
        self._told_s = float("-inf")
        self._learner = self._connect(location)
        self._source = self._learner
        """The connection for parts: the learner's, or one to the feeding generator."""

    def run(self, cancelled: threading.Event) -> None:
        """Fetch until all bytes have arrived.

        Raises:
            VersionUnavailableError: The version is gone or does not arrive, or the fetch was cancelled.
        """
        total = len(self._into)
        while self._have < total:
            now = time.monotonic()
            if cancelled.is_set():
                raise VersionUnavailableError(f"the fetch of {self._what} was cancelled")
            self._leave_the_silent(now)
            if now - self._told_s >= (ASK_WAITING_S if self.feeder is None else ASK_EVERY_S):
                self.tell()
            while self.feeder is not None and self._asked < min(total, self._have + WINDOW * self._part_bytes):
                num_bytes = min(self._part_bytes, total - self._asked)
                if not ask(self._source, PartRequest(*self._key, self._asked, num_bytes)):
                    break
                self._asked += num_bytes
            poller = zmq.Poller()
            for connection in {self._learner, self._source}:
                poller.register(connection, zmq.POLLIN)
            for connection, _ in poller.poll(_POLL_MS):
                if not connection.closed:  # an answer from the learner may have closed the other connection
                    self._take(connection)

    def tell(self, *, is_whole: bool = False) -> None:
        """Tell the learner that the fetch is running or complete, and ask for a feeder."""
        reader, address = self._reader, self._reader.server.location if self._reader.server else ""
        request = FeederRequest(*self._key, reader.name, address, socket.gethostname()[:64], self.lost, is_whole)
        ask(self._learner, request)
        self._told_s = time.monotonic()

    def close(self) -> None:
        """Close the connections; the last message is still sent."""
        if self._source is not self._learner:
            self._source.close(linger=0)
        self._learner.close()

    def _leave_the_silent(self, now: float) -> None:
        if now - self._sign_s > self._reader.stalled_after_s:
            here = f"{self._have} of {len(self._into)} bytes here, nothing more for {self._reader.stalled_after_s:g} s"
            ask = f"is the learner at {self._location} alive and reachable, and do the keys match?"
            raise VersionUnavailableError(f"{self._what} stalled: {here}; {ask}")
        is_silent, fed_s = now - self._part_s > SILENT_AFTER_S, now - self._fed_since_s
        is_slow = fed_s > SILENT_AFTER_S and self._have - self._fed_from < SLOW_BYTES_PER_S * fed_s
        if self.feeder and (is_silent or is_slow):
            self._leave()
        elif self.feeder == LEARNER and is_silent:
            # Either the connection broke and the requests are lost; a new connection has none of the old answers. Or the link is
            # slow: libzmq shows only complete parts, and closes a connection on which none arrives for long.
            self._part_bytes = min(self._part_bytes, max(LEAST_PART_BYTES, self._part_bytes // 4))
            self._learner.close(linger=0)
            self._learner = self._connect(self._location)
            self._be_fed_by(LEARNER, self._learner)

    def _take(self, connection: zmq.Socket[bytes]) -> None:
        """Handle one answer."""
        header, *parts = connection.recv_multipart(copy=False)
        part = parts[0].buffer if parts else memoryview(b"")
        reply, is_learner = decode([header.bytes], FeederReply | PartReply), connection is self._learner
        match reply:
            case FeederReply(gone=gone) | PartReply(gone=gone) if gone and is_learner and not self.feeder:
                raise VersionUnavailableError(f"{self._what} can no longer be fetched: {gone}; fetch the newest")
            case FeederReply(wait=True) if is_learner:
                self._sign_s = time.monotonic()
            case FeederReply(feeder, gone="") if is_learner and self.feeder is None and (not feeder or feeder != self.lost):
                try:
                    source = self._connect(reply.address) if feeder else self._learner
                except BroadcastError:
                    self.lost = feeder
                else:
                    self._be_fed_by(feeder, source)
            case PartReply(offset, num_bytes, gone="") if connection is self._source:
                # Other replies are from an earlier feeder. A lost part is requested again after a time-out.
                if offset == self._have and len(part) == min(self._asked - self._have, num_bytes):
                    self._have = offset + len(part)
                    np.copyto(np.frombuffer(self._into[offset : self._have], np.uint8), np.frombuffer(part, np.uint8))
                    if self._reader.server is not None:
                        self._reader.server.put(self._key, self._into, self._have)
                    if time.monotonic() - self._part_s < SILENT_AFTER_S / 8:
                        self._part_bytes = min(2 * self._part_bytes, self._reader.chunk_bytes)
                    self._part_s = self._sign_s = time.monotonic()
            case FeederReply() | PartReply() if is_learner:
                pass
            case _ if is_learner:
                raise BroadcastError(f"the learner at {self._location} sent an invalid answer about {self._what}")
            case _:
                self._leave()

    def _be_fed_by(self, feeder: str, source: zmq.Socket[bytes]) -> None:
        self.feeder, self._source, self._asked = feeder, source, self._have
        self._part_s = self._fed_since_s = time.monotonic()
        self._fed_from = self._have

    def _leave(self) -> None:
        """Leave the feeding generator and ask the learner."""
        self.lost = self.feeder or self.lost
        self._source.close(linger=0)
        self.feeder, self._source = None, self._learner
        self._told_s = float("-inf")

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        return open_dealer(self._reader.context, address, self._reader.keys, self._reader.chunk_bytes + MAX_REQUEST_BYTES)
