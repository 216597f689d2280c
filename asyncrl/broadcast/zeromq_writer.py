"""The learner's end of the `zeromq` medium: the slots, and the server that lends them out part by part.

Invariant: a slot is taken from the shelf before the learner writes to it, and is busy while a part of it is on its way: only
where both are is one written to all the same, and then the fingerprint tells whoever waits for it.

Called by media.py.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncrl.broadcast.chunks import BLOB
from asyncrl.broadcast.medium import NUM_SLOTS
from asyncrl.broadcast.zeromq_desk import LearnerDesk
from asyncrl.broadcast.zeromq_keys import CurveKeys
from asyncrl.broadcast.zeromq_server import PartServer
from asyncrl.broadcast.zeromq_shelf import Key, Shelf
from asyncrl.config.broadcast import ZeroMQMedium
from asyncrl.errors import BroadcastError
from asyncrl.schema.weights import WeightsManifest


class ZeroMQWriter:
    """The learner's end; owns the address, the serving thread and the slots."""

    keeps_slots = True

    def __init__(self, config: ZeroMQMedium, keys: CurveKeys | None = None) -> None:
        self._config = config
        self._keys = keys
        self._shelf = Shelf()
        self._slots: tuple[memoryview, ...] = ()
        self._held: dict[int, Key] = {}
        self._desk: LearnerDesk | None = None
        self._server: PartServer | None = None
        self.location = ""

    @property
    def refused(self) -> int:
        """Requests that were none: malformed, oversized, out of range."""
        return self._server.refused if self._server else 0

    @property
    def served_bytes(self) -> int:
        """Of parts, that this process sent."""
        return self._server.served_bytes if self._server else 0

    def open(self, manifest: WeightsManifest) -> tuple[torch.Tensor, ...]:
        """Bind and start serving; see MediumWriter."""
        # numpy, unlike torch, asks for huge pages: the system copies out of them with less walking of tables.
        slots = tuple(torch.from_numpy(np.zeros(manifest.total_bytes, np.uint8)) for _ in range(NUM_SLOTS))
        self._slots = tuple(slot.numpy().data for slot in slots)
        self._desk = LearnerDesk(self._shelf, self._config.fanout, manifest.total_bytes)
        self._server = PartServer(self._config.bind, self._shelf, self._config.chunk_bytes, self._keys, self._desk)
        self.location = self._server.location
        return slots

    def busy_slots(self) -> frozenset[int]:
        """Return the slots that someone fetched from in the last moments, or may come back to."""
        in_use = self._desk.versions_in_use() if self._desk else frozenset()
        return frozenset(slot for slot, key in list(self._held.items()) if key[0] in in_use or self._shelf.is_lent(key))

    def overwrite(self, slot: int, version: int) -> None:  # noqa: ARG002 - nothing is said about it before it is whole
        """Stop serving what the slot holds."""
        key = self._held.pop(slot, None)
        if key is not None:
            self._shelf.drop(key)

    def commit(self, slot: int, version: int, fingerprint: str) -> str:
        """Start serving the slot; see MediumWriter."""
        if self._server is None or not self._server.is_serving:
            raise BroadcastError(f"version {version} can be fetched by nobody: the thread that serves weights has ended")
        self._held[slot] = (version, fingerprint)
        self._shelf.put((version, fingerprint), self._slots[slot])
        return self.location

    def put_blob(self, name: str, blob: bytes) -> None:
        """Start serving a delta; see MediumWriter."""
        self._shelf.put((BLOB, name), memoryview(blob))

    def drop_blob(self, name: str) -> None:
        """Stop serving it."""
        self._shelf.drop((BLOB, name))

    def close(self) -> None:
        """Stop serving; fetches under way end in BroadcastError."""
        if self._server is not None:
            self._server.close()
        self._slots = ()
