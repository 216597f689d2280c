"""Medium `zeromq`: versions and deltas part by part over TCP, from the learner and from generators that already have them.

    learner ── ZeroMQWriter: slots ▸ PartServer (ROUTER, a thread) ◂ Feeders: who feeds whom
                    │ FeederRequest, FeederReply, PartRequest, PartReply
    generator ─ ZeroMQReader (zeromq_reader.py): DEALERs ▸ staging buffer ▸ PartServer ── other generators

A request is one frame. A `PartRequest` is answered by a `PartReply` with the bytes. A `FeederRequest`, which only the learner
accepts, is answered by a `FeederReply`. Everything that can be fetched has a number and a name: a version and its fingerprint, or
BLOB and the name of a delta. A feeder is the learner or generator from which a generator fetches.

Invariants:
- Nothing is pushed. A generator asks for parts in order, at most WINDOW at a time, so a slow generator delays no other and no
  queue grows. If a generator does not read its answers, at most SEND_QUEUE parts wait for it; further parts are lost.
- One rule assigns feeders: the learner feeds the first `fanout` generators. After that, generators that have the version, or are
  receiving it, serve their bytes, and the learner assigns the one with the fewest readers.
- A generator leaves a feeder that is silent, slow or no longer has the version; from then on the learner feeds the generator.
  Bytes that have arrived are never requested again.
- A generator serves its bytes of a version until its buffer is written again; parts are copied under the same lock that withdraws
  the version. A requested part that has not arrived yet is sent later. The learner sends parts directly from the slot: if it was
  overwritten meanwhile, the fingerprint shows it. A feeder of damaged bytes is not asked for that version again.
- A slot is not overwritten while a generator that fetches its version is active, for PIN_LIMIT_S at most.
- Anything that is not a request is counted (`refused`) and not answered. With keys, peers without a right key do not pass the
  handshake.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import torch
from msgspec import Meta

from asyncrl.config.broadcast import ZeroMQMedium
from asyncrl.errors import BroadcastError
from asyncrl.schema.weights import WeightsManifest
from asyncrl.transport.security import ClientKeys
from asyncrl.weights.media.base import NUM_SLOTS, MediumWriter
from asyncrl.weights.sockets import WINDOW, Router, decode

MAX_REQUEST_BYTES = 1024
LEARNER = ""
BLOB = 2**62
"""Stands in place of the version number: the request is for a delta, given by its name."""
SILENT_AFTER_S = 3.0
"""A peer that has sent nothing for so long counts as gone or stopped."""
PIN_LIMIT_S = 120.0
MAX_READERS = 4096
_POLL_MS = 100
_POLL_WAITING_MS = 5
MAX_WAITING = 64 * WINDOW
_LOOPBACK = ("tcp://127.", "tcp://localhost", "tcp://[::1]", "ipc:", "inproc:")

Key = tuple[int, str]
"""Version and fingerprint, or BLOB and the name of a delta."""
NonNegative = Annotated[int, Meta(ge=0, le=2**62)]
Name = Annotated[str, Meta(max_length=64)]


class PartRequest(msgspec.Struct, frozen=True, tag="part_request", forbid_unknown_fields=True):
    """Request for these bytes of this version."""

    version: NonNegative
    fingerprint: Name
    """Distinguishes versions with the same number after a learner went back to a checkpoint; for a delta, its name."""
    offset: NonNegative
    num_bytes: Annotated[int, Meta(ge=1, le=2**40)]


class PartReply(msgspec.Struct, frozen=True, tag="part_reply", omit_defaults=True):
    """The header of the requested bytes, or the reason why they are not sent."""

    offset: int
    num_bytes: int
    gone: str = ""
    """Not empty: the version is not held here; says which versions are."""


class FeederRequest(msgspec.Struct, frozen=True, tag="feeder_request", forbid_unknown_fields=True, omit_defaults=True):
    """Generator -> learner, every second of a fetch: asks for a feeder, and says where this generator serves its bytes."""

    version: NonNegative
    fingerprint: Name
    subscriber: Annotated[str, Meta(min_length=1, max_length=16)]
    """The generator's name, chosen when it started."""
    address: Annotated[str, Meta(max_length=128)] = ""
    """Address at which the generator serves its bytes; empty: it does not."""
    host: Name = ""
    """Its machine: a loopback address is given only to generators on the same machine."""
    lost: Annotated[str, Meta(max_length=16)] = ""
    """Name of a feeder that was silent or slow, lost the version, or sent damaged bytes; empty: none yet."""
    is_whole: bool = False
    """The fetch is complete; the generator can feed others and needs no feeder."""


class FeederReply(msgspec.Struct, frozen=True, tag="feeder_reply", omit_defaults=True):
    """Learner -> generator: ask this feeder for parts."""

    feeder: str = LEARNER
    address: str = ""
    wait: bool = False
    """There is no feeder yet; ask again."""
    gone: str = ""
    """Not empty: the learner no longer holds the version; says which versions it holds."""


# -- serving -------------------------------------------------------------------------------------------------------------------


class PartServer:
    """Serves versions and deltas; owns an address, a context and a thread.

    Args:
        bind: Endpoint to listen at.
        chunk_bytes: Maximum bytes of a part.
        keys: Keys of the run; None: no encryption, all peers are accepted.
        find_feeder: The learner's answer to a FeederRequest; None: a generator's server, which accepts no such request.
        copies_parts: Copy each part before it is sent, because its memory may be written as soon as it is dropped.
    """

    def __init__(
        self,
        bind: str,
        chunk_bytes: int,
        keys: ClientKeys | None,
        find_feeder: Callable[[FeederRequest], FeederReply] | None = None,
        *,
        copies_parts: bool = False,
    ) -> None:
        self._chunk_bytes, self._find_feeder, self._copies_parts = chunk_bytes, find_feeder, copies_parts
        self._lock = threading.Lock()
        self._held: dict[Key, tuple[memoryview, int]] = {}
        """The memory of each version or delta, and how many of its first bytes have arrived."""
        self._waiting: deque[tuple[bytes, PartRequest]] = deque(maxlen=MAX_WAITING)
        """Requests for bytes that have not arrived yet. If there are too many, the oldest is dropped; its sender asks again."""
        self._closing = threading.Event()
        self.refused = 0
        """Number of invalid requests: malformed, too large, or out of range."""
        self.served_bytes = 0
        self._router = Router(keys, MAX_REQUEST_BYTES, bind, "bind" if find_feeder else "relay_bind")
        self.location = self._router.endpoint.replace("://0.0.0.0:", f"://{socket.gethostname()}:")
        self.thread = threading.Thread(target=self._serve, name="asyncrl-weights-server", daemon=True)
        self.thread.start()

    def put(self, key: Key, memory: memoryview, num_here: int) -> None:
        """Serve the first `num_here` bytes; the rest has not arrived yet."""
        with self._lock:
            self._held[key] = memory, num_here

    def drop(self, key: Key) -> None:
        """Stop serving the version or delta. Unknown keys are ignored."""
        with self._lock:
            self._held.pop(key, None)

    def held(self) -> list[Key]:
        """Return the keys of what is served, the oldest first."""
        with self._lock:
            return list(self._held)

    def close(self) -> None:
        """Stop serving. Safe to repeat."""
        self._closing.set()
        self.thread.join()
        self._router.close()

    def _serve(self) -> None:
        """Answer until closing."""
        while not self._closing.is_set():
            has_message = self._router.poll(_POLL_WAITING_MS if self._waiting else _POLL_MS)
            for _ in range(len(self._waiting)):
                self._send_part(*self._waiting.popleft())
            if not has_message:
                continue
            asker, *frames = self._router.socket.recv_multipart()
            match decode(frames, PartRequest | FeederRequest):
                case FeederRequest() as request if self._find_feeder is not None:
                    self._router.say(asker, self._find_feeder(request))
                case PartRequest() as request if request.num_bytes <= self._chunk_bytes:
                    self._send_part(asker, request)
                case _:
                    self.refused += 1

    def _send_part(self, asker: bytes, request: PartRequest) -> None:
        end = request.offset + request.num_bytes
        part: memoryview | bytes = b""
        with self._lock:
            memory, num_here = self._held.get((request.version, request.fingerprint), (None, 0))
            if memory is not None and end <= num_here:
                part = memory[request.offset : end]
                part = bytes(part) if self._copies_parts else part
        if memory is None:
            versions = sorted({version for version, _ in self.held()})
            self._router.say(asker, PartReply(request.offset, 0, gone=f"what is held now is {versions}"))
        elif not part and end <= len(memory):
            self._waiting.append((asker, request))
        elif not part:
            self.refused += 1
        else:
            # Counted before it is sent: the receiver may read `served_bytes` at once.
            self.served_bytes += len(part)
            if not self._router.say(asker, PartReply(request.offset, len(part)), part):
                self.served_bytes -= len(part)


# -- the learner's end ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Reader:
    since_s: float
    heard_s: float
    address: str = ""
    host: str = ""
    is_whole: bool = False
    is_lost: bool = False
    """A reader lost it as feeder and it has not asked since: it feeds no one."""
    feeder: str | None = None


class Feeders:
    """Assigns the feeders for one version or delta; pure, without sockets or clock.

    There are no cycles: a generator is assigned once, to a feeder that has a feeder itself or is complete; after losing it, the
    learner feeds the generator.

    Example:
        >>> feeders = Feeders(fanout=1)
        >>> asked = [FeederRequest(1, "f", name, f"tcp://10.0.0.{number}:1") for number, name in enumerate("ab")]
        >>> [feeders.find(request, now=0.0) for request in asked][1]
        FeederReply(feeder='a', address='tcp://10.0.0.0:1', wait=False, gone='')
    """

    def __init__(self, fanout: int) -> None:
        self._fanout = fanout
        self._readers: dict[str, _Reader] = {}

    def find(self, request: FeederRequest, now: float) -> FeederReply:
        """Store a subscriber's request and return its feeder."""
        for silent in [n for n, reader in self._readers.items() if not reader.is_whole and now - reader.heard_s > SILENT_AFTER_S]:
            self.forget(silent)
        if len(self._readers) >= MAX_READERS:
            self.forget(next(iter(self._readers)))
        if request.subscriber in self._readers and self._readers[request.subscriber].is_whole and not request.is_whole:
            self.forget(request.subscriber)  # it starts again
        reader = self._readers.setdefault(request.subscriber, _Reader(now, now))
        if request.lost in self._readers and reader.feeder == request.lost:  # it cannot know about other feeders
            self._readers[request.lost].is_lost = True
        reader.heard_s, reader.is_lost, reader.is_whole = now, False, request.is_whole
        reader.address, reader.host = request.address, request.host
        if request.is_whole:
            reader.feeder = None
        elif request.lost or not self._fanout:
            reader.feeder = LEARNER
        elif reader.feeder is None:
            reader.feeder = self._choose(reader)
        if reader.feeder is None:
            return FeederReply(wait=True)
        return FeederReply(reader.feeder, self._readers[reader.feeder].address if reader.feeder else "")

    def forget(self, subscriber: str) -> None:
        """Remove a subscriber that is silent, or that has or wants another version now."""
        self._readers.pop(subscriber, None)
        for reader in self._readers.values():
            if reader.feeder == subscriber:
                reader.feeder = LEARNER

    def is_in_use(self, now: float) -> bool:
        """Return whether a subscriber is still fetching this version or delta."""
        return any(
            not reader.is_whole and now - reader.heard_s <= SILENT_AFTER_S and now - reader.since_s <= PIN_LIMIT_S
            for reader in self._readers.values()
        )

    def check_invariants(self) -> None:
        """Assert the invariants that hold between requests."""
        assert len(self._readers) <= MAX_READERS
        for name, reader in self._readers.items():
            assert not reader.is_whole or reader.feeder is None, f"{name} is whole and is fed"
            chain = [name]
            while (feeder := self._readers[chain[-1]].feeder) and not self._readers[chain[-1]].is_whole:
                assert feeder not in chain, f"{name} feeds itself"
                chain.append(feeder)

    def _choose(self, reader: _Reader) -> str | None:
        """Return the learner for the first `fanout`, else the generator with the fewest readers; None: wait."""
        loads = Counter(other.feeder for other in self._readers.values())
        if loads[LEARNER] + sum(other.is_whole for other in self._readers.values()) < self._fanout:
            return LEARNER
        able = [
            (loads[name], name) for name, other in self._readers.items()
            if (other.is_whole or other.feeder is not None) and other.address and not other.is_lost
            and (other.host == reader.host or not other.address.startswith(_LOOPBACK)) and loads[name] < self._fanout
        ]  # fmt: skip
        return min(able)[1] if able else LEARNER if loads[LEARNER] < self._fanout else None


class ZeroMQWriter(MediumWriter):
    """The learner's end; owns the slots and the server that sends them in parts."""

    keeps_slots = True

    def __init__(self, config: ZeroMQMedium, keys: ClientKeys | None = None) -> None:
        self._config, self._keys = config, keys
        self._slots: tuple[memoryview, ...] = ()
        self._committed: dict[int, Key] = {}
        self._feeders: dict[Key, Feeders] = {}
        self._lock = threading.Lock()
        """Protects `_feeders`, which the serving thread changes and the learner's thread reads."""
        self.server: PartServer
        """Exists after `open`."""

    def open(self, manifest: WeightsManifest) -> tuple[torch.Tensor, ...]:
        """Bind and start serving; see MediumWriter."""
        # numpy, unlike torch, requests huge pages: copies from them need fewer page-table lookups.
        slots = tuple(torch.from_numpy(np.zeros(manifest.total_bytes, np.uint8)) for _ in range(NUM_SLOTS))
        self.server = PartServer(self._config.bind, self._config.chunk_bytes, self._keys, self._find_feeder)
        self._slots = tuple(slot.numpy().data for slot in slots)
        return slots

    def busy_slots(self) -> frozenset[int]:
        """Return the slots whose version is being fetched."""
        now = time.monotonic()
        with self._lock:
            in_use = {key for key, feeders in self._feeders.items() if feeders.is_in_use(now)}
        committed = self._committed.copy()  # the publisher's thread may commit a slot meanwhile
        return frozenset(slot for slot, key in committed.items() if key in in_use)

    def overwrite(self, slot: int) -> None:
        """Stop serving the version in the slot."""
        if (key := self._committed.pop(slot, None)) is not None:
            self.server.drop(key)

    def commit(self, slot: int, version: int, fingerprint: str) -> str:
        """Start serving the slot; see MediumWriter."""
        if not self.server.thread.is_alive():
            raise BroadcastError(f"version {version} cannot be fetched: the thread that serves weights has ended, restart it")
        self._committed[slot] = (version, fingerprint)
        self.server.put((version, fingerprint), self._slots[slot], len(self._slots[slot]))
        return self.server.location

    def put_blob(self, name: str, blob: bytes) -> None:
        """Start serving a delta; see MediumWriter."""
        self.server.put((BLOB, name), memoryview(blob), len(blob))

    def drop_blob(self, name: str) -> None:
        """Stop serving a delta."""
        self.server.drop((BLOB, name))

    def close(self) -> None:
        """Stop serving; running fetches end with BroadcastError."""
        if self._slots:
            self.server.close()
        self._slots = ()

    def _find_feeder(self, request: FeederRequest) -> FeederReply:
        key, held = (request.version, request.fingerprint), self.server.held()
        if key not in held:
            versions = sorted(version for version, _ in held if version != BLOB)
            return FeederReply(gone=f"the learner now holds {versions}")
        with self._lock:
            self._feeders = {kept: feeders for kept, feeders in self._feeders.items() if kept in held}
            for other, feeders in self._feeders.items():
                if other != key and BLOB not in {other[0], request.version}:  # its buffer is now used for this version
                    feeders.forget(request.subscriber)
            return self._feeders.setdefault(key, Feeders(self._config.fanout)).find(request, time.monotonic())
