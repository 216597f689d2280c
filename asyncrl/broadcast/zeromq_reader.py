"""A generator's end of the `zeromq` medium: fetches, and feeds other generators with what it has already.

Invariants:
- The buffer of a fetch is served from the first part that is in it until the next fetch; it is taken from the shelf, under its
  lock, before anything else is written to it. A delta fetched is about to be applied to it: that ends it too.
- What turned out to be damaged is not served on, and is fetched again from others than before.
- Of deltas the last BLOBS_KEPT are kept, to be fed on.

Called by media.py.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator

import numpy as np
import zmq

from asyncrl.broadcast.chunks import BLOB
from asyncrl.broadcast.delta import blob_fingerprint
from asyncrl.broadcast.fingerprint import BucketHasher
from asyncrl.broadcast.zeromq_fetch import FetchSetting, PartFetch
from asyncrl.broadcast.zeromq_keys import CurveKeys, relay_keys
from asyncrl.broadcast.zeromq_server import PartServer
from asyncrl.broadcast.zeromq_shelf import Key, Shelf
from asyncrl.config.broadcast import ZeroMQMedium
from asyncrl.models.layout import bucket_ends
from asyncrl.schema.weights import WeightsAvailable

STALLED_AFTER_S = 20.0
BLOBS_KEPT = 4
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
        self._shelf = Shelf()
        self._server = PartServer(config.relay_bind, self._shelf, config.chunk_bytes, relay_keys(keys)) if config.fanout else None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._setting = FetchSetting(
            self._context,
            keys,
            config.chunk_bytes,
            stalled_after_s,
            secrets.token_hex(8),
            self._server.location if self._server else "",
            socket.gethostname()[:64],
        )
        self._whole: Key | None = None
        self._suspects: tuple[Key, tuple[str, ...]] | None = None

    @property
    def location(self) -> str:
        """Where this generator feeds others; empty: it does not."""
        return self._setting.address

    @property
    def refused(self) -> int:
        """Requests to it that were none."""
        return self._server.refused if self._server else 0

    @property
    def served_bytes(self) -> int:
        """Of parts, that it sent to others."""
        return self._server.served_bytes if self._server else 0

    def lease(self, available: WeightsAvailable) -> None:
        """Return none: the bytes are elsewhere."""

    def fetch(self, available: WeightsAvailable, into: memoryview, cancelled: threading.Event) -> bytes:
        """Ask for the version part by part; see MediumReader."""
        key = (available.version, available.fingerprint)
        self._withdraw()
        lost = self._suspects[1] if self._suspects and self._suspects[0] == key else ()
        hasher = BucketHasher(bucket_ends(available.manifest))
        with self._shared(key, into):
            fetch = self._begin(key, available.location, into, lost, hasher.update)
            fetch.run(cancelled)
        self._whole = key
        found = hasher.digests()
        if found != available.bucket_fingerprints:
            self._suspects = (key, fetch.fed_by)
            self._withdraw()
        return found

    def fetch_blob(self, available: WeightsAvailable, name: str, num_bytes: int, cancelled: threading.Event) -> bytes:
        """Ask for a delta; see MediumReader."""
        self._withdraw()
        key = (BLOB, name)
        blob = bytearray(num_bytes)
        with self._shared(key, memoryview(blob)):
            self._begin(key, available.location, memoryview(blob), (), _copy).run(cancelled)
        fetched = bytes(blob)
        if any(delta.name == name and delta.fingerprint != blob_fingerprint(fetched) for delta in available.deltas):
            self._shelf.drop(key)
        for version, old in [held for held in self._shelf.keys() if held[0] == BLOB][:-BLOBS_KEPT]:  # noqa: SIM118
            self._shelf.drop((version, old))
        return fetched

    def close(self) -> None:
        """Stop feeding others and release everything. Safe to repeat."""
        if self._server is not None:
            self._server.close()
        self._context.destroy(linger=0)

    def _begin(
        self,
        key: Key,
        location: str,
        into: memoryview,
        lost: tuple[str, ...],
        on_more: Callable[[memoryview, memoryview | None], None],
    ) -> PartFetch:
        def on_part(offset: int) -> None:
            if self._server is not None:
                self._shelf.arrived(key, offset)
                self._server.ring()

        return PartFetch(self._setting, key, location, into, lost, on_part, on_more)

    @contextlib.contextmanager
    def _shared(self, key: Key, into: memoryview) -> Iterator[None]:
        """Serve what arrives; not any longer where the fetch fails."""
        if self._server is not None:
            self._shelf.begin(key, into, self._setting.chunk_bytes)
        try:
            yield
        except BaseException:
            self._shelf.drop(key)
            raise

    def _withdraw(self) -> None:
        """Stop serving the buffer of the last fetch: it is about to be written to."""
        if self._whole is not None:
            self._shelf.drop(self._whole)
            self._whole = None


def _copy(source: memoryview, target: memoryview | None) -> None:
    if target is not None:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
