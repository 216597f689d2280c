"""Media `gloo` and `nccl`: the learner broadcasts a version to all generators that are ready, bucket by bucket.

    learner ── CollectiveWriter: slots, one thread ◂── ROUTER: Ready, Answer, Leaving
                    │                                  Noted, Begin, Abort, Refused
    generator ─ Member (collective_member.py): a DEALER, the present group, two bucket buffers

A member sends `Ready` every second until it is told to begin or is refused; each `Begin` is answered by an `Answer`. The learner
gathers the ready members and sends them the version: one attempt. Its process group (collective_group.py; the learner has rank 0)
is kept as long as the same members need the next version; a new, missing or failed member leads to a new group.

Invariants:
- The learner's own thread waits for no member, socket or group. Everything here runs on one thread of the medium.
- An attempt ends when all members answered, when there was no progress for `timeout_s`, or when one failed. The others are then
  told, and ask again.
- Members gather for at most `gather_s`, and not at all if exactly the members of the last attempt are ready.
- The version that is being sent keeps its slot, else the newest gathered for (`busy_slots`); if it must be overwritten, the
  attempt ends.
- The bytes are sent by torch.distributed, without encryption or authentication. The socket has both if the run has keys, and
  decides which members may take part.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from asyncrl.config.broadcast import GlooMedium, NCCLMedium
from asyncrl.errors import BroadcastError, ConfigError
from asyncrl.models.layout import bucket_ends
from asyncrl.schema.weights import WeightsManifest
from asyncrl.transport.security import ClientKeys
from asyncrl.weights.buckets import NUM_BUFFERS, BucketBuffers, side_stream
from asyncrl.weights.media.base import NUM_SLOTS, MediumWriter
from asyncrl.weights.media.collective_group import Backend, Group, GroupBrokenError, open_store, wait_done
from asyncrl.weights.sockets import Router, decode

log = logging.getLogger(__name__)

GONE_AFTER_S = 5.0
"""A member that has not asked for this long does not want the version any more."""
MAX_MESSAGE_BYTES = 4096
_POLL_MS = 10
_JOIN_S = 10.0
_Number = Annotated[int, Meta(ge=0, le=2**62)]


class Ready(msgspec.Struct, frozen=True, tag="ready", forbid_unknown_fields=True):
    """Member -> learner: the member wants this version, and takes part as soon as it is told to."""

    version: _Number
    fingerprint: Annotated[str, Meta(max_length=64)]


class Answer(msgspec.Struct, frozen=True, tag="answer", forbid_unknown_fields=True):
    """Member -> learner: the member has finished this attempt."""

    attempt: _Number = 0
    """0: all attempts; the learner must not wait for this member."""
    failure: Annotated[str, Meta(max_length=1024)] = ""
    """Empty: the version arrived completely. Else the member has left the group, and asks again if it still wants the version."""


class Noted(msgspec.Struct, frozen=True, tag="noted"):
    """Learner -> member: the request is noted; wait."""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Learner -> member: receive this version now."""

    attempt: int
    version: int
    rank: int
    size: int
    store: str
    """host:port where the members of a new group meet; empty: use the present group."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Learner -> member: this attempt and its group have ended."""

    attempt: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Learner -> member: this version will not be sent any more."""

    version: int
    reason: str


FromMember = Ready | Answer
FromLearner = Noted | Begin | Abort | Refused


class CollectiveWriter(MediumWriter):
    """The learner's end; owns the slots, the socket and one thread.

    Args:
        config: Host and times.
        keys: Keys of the run; None: members need no key.
        through: Returns the device from whose buffers buckets are sent; None: gloo, which sends from the slots.
    """

    keeps_slots = True

    def __init__(
        self, config: GlooMedium | NCCLMedium, keys: ClientKeys | None = None, through: Callable[[], torch.device] | None = None
    ) -> None:
        self._config, self._keys, self._through = config, keys, through
        self._backend: Backend = "nccl" if isinstance(config, NCCLMedium) else "gloo"
        self._lock = threading.Lock()
        self._versions: dict[int, tuple[int, str]] = {}
        """Slot and fingerprint of each version that can be sent. Replaced under the lock, never changed: readers need no lock."""
        self._slots: tuple[torch.Tensor, ...] = ()
        self._ends: tuple[int, ...] = ()
        self._device: torch.device | None = None
        self._buffers: BucketBuffers | None = None
        self._router: Router
        self._thread: threading.Thread | None = None
        """Reads the socket; the socket exists once the thread does."""
        self._closing = threading.Event()
        self._location = ""
        # Only the medium's own thread uses the fields below.
        self._ready: dict[bytes, tuple[int, float]] = {}
        """Members that wait: the version they want, and the time of their last request."""
        self._gathering_since_s: float | None = None
        self._attempt = 0
        self._sending = -1
        """The version of the present attempt; -1: there is none."""
        self._members: tuple[bytes, ...] = ()
        """Members of the last attempt. The next attempt waits for them, `gather_s` at most."""
        self._answers: dict[bytes, str] = {}
        """Answers of members in the present attempt: the reason of a failure; empty: the member is done."""
        self._group: Group | None = None

    def open(self, manifest: WeightsManifest) -> tuple[torch.Tensor, ...]:
        """Listen at a free port of the configured host; see MediumWriter.

        Raises:
            ConfigError: The host is not an address of this machine, or this machine has no NCCL.
        """
        self._device = self._through() if self._through is not None else None
        is_pinned = self._device is not None and self._device.type == "cuda"
        self._slots = tuple(torch.zeros(manifest.total_bytes, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(NUM_SLOTS))
        self._ends = bucket_ends(manifest)
        self._buffers = None if self._device is None else BucketBuffers(self._ends, self._device)
        host = self._config.host
        try:
            self._router = Router(self._keys, MAX_MESSAGE_BYTES, f"tcp://{socket.gethostbyname(host)}:*", "host")
        except (OSError, BroadcastError) as error:
            raise ConfigError(f"broadcast.medium.host {host!r} is not an address of the learner's machine: {error}") from error
        self._location = f"{host}:{self._router.endpoint.rpartition(':')[2]}"
        self._thread = threading.Thread(target=self._serve, name="asyncrl-weights-sender", daemon=True)
        self._thread.start()
        return self._slots

    def busy_slots(self) -> frozenset[int]:
        """Return the slot of the version that is being sent, or else of the newest that is gathered for."""
        kept = self._sending
        if kept < 0:
            kept = max((version for version, _ in list(self._ready.values())), default=-1)
        return frozenset(slot for version, (slot, _) in self._versions.items() if version == kept)

    def overwrite(self, slot: int) -> None:
        """Stop offering the version in the slot."""
        with self._lock:
            self._versions = {held: place for held, place in self._versions.items() if place[0] != slot}

    def commit(self, slot: int, version: int, fingerprint: str) -> str:
        """Offer the version; see MediumWriter."""
        if self._thread is None or not self._thread.is_alive():
            raise BroadcastError(f"version {version} cannot be fetched: the thread that sends weights has ended, restart it")
        with self._lock:
            self._versions = self._versions | {version: (slot, fingerprint)}
        return self._location

    def close(self) -> None:
        """Stop a broadcast that is running; its members notice by time-out. Safe to repeat."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            self._router.close()
        self._thread, self._slots = None, ()

    # The methods below run on the medium's own thread.

    def _serve(self) -> None:
        """Listen and send until closing; on a separate stream, so that nothing here waits for the learner's step."""
        with side_stream(self._device or torch.device("cpu")):
            while not self._closing.is_set():
                self._hear(_POLL_MS)
                if (version := self._gathered()) is not None:
                    self._send_version(version)
        self._leave_group()

    def _hear(self, timeout_ms: int) -> None:
        """Handle the members' messages; anything else is ignored."""
        while self._router.poll(timeout_ms):
            timeout_ms = 0
            member, *frames = self._router.socket.recv_multipart()
            match decode(frames, FromMember):
                case Ready(version, fingerprint):
                    held = self._versions
                    if held.get(version, (-1, ""))[1] != fingerprint:
                        self._ready.pop(member, None)
                        names = ", ".join(map(str, sorted(held))) or "none"
                        self._router.say(member, Refused(version, f"the learner holds {names}"))
                        continue
                    self._router.say(member, Noted())
                    # A member that asks while it should receive has not seen `Begin` yet.
                    if self._sending < 0 or member not in self._members or member in self._answers:
                        self._ready[member] = version, time.monotonic()
                case Answer(attempt, failure) if attempt in {0, self._attempt}:
                    if not attempt:
                        self._ready.pop(member, None)
                    if member in self._members and self._sending >= 0:
                        self._answers[member] = failure
                    elif member in self._members and not attempt:
                        self._leave_group()
                        self._members = tuple(other for other in self._members if other != member)

    def _gathered(self) -> int | None:
        """Return the newest requested version once the members that want it have gathered; else None."""
        now, held = time.monotonic(), self._versions  # members that want another version ask again, and are refused
        self._ready = {m: (v, s) for m, (v, s) in self._ready.items() if v in held and now - s < GONE_AFTER_S}
        if not self._ready:
            self._gathering_since_s = None
            return None
        self._gathering_since_s = self._gathering_since_s or now
        if self._ready.keys() != {*self._members} and now - self._gathering_since_s < self._config.gather_s:
            return None
        return max(wanted for wanted, _ in self._ready.values())

    def _send_version(self, version: int) -> None:
        """Make one attempt to send the version to the members that are ready for it."""
        members = tuple(sorted(member for member, (wanted, _) in self._ready.items() if wanted == version))
        for member in members:
            del self._ready[member]
        host, timeout_s, size = self._config.host, self._config.timeout_s, len(members) + 1
        self._attempt, self._answers, self._sending, self._gathering_since_s = self._attempt + 1, {}, version, None
        try:
            store, address = None, ""
            if self._group is None or members != self._members:
                self._leave_group()
                store, address = open_store(host, timeout_s)
            self._members = members
            for rank, member in enumerate(members, start=1):
                self._router.say(member, Begin(self._attempt, version, rank, size, address))
            if store is not None:
                self._group = Group(self._backend, 0, size, host, timeout_s, store, self._device)
            self._broadcast(version)
        except (GroupBrokenError, BroadcastError, RuntimeError, OSError) as error:
            log.warning("version %d was not sent to all of %d generators: %s; they ask again", version, len(members), error)
            self._leave_group()
            for member in members:
                if member not in self._answers:
                    self._router.say(member, Abort(self._attempt))
        self._sending = -1

    def _broadcast(self, version: int) -> None:
        """Send all buckets, at most two at a time, and wait until every member has confirmed them."""
        group, under_way = self._group, deque[Any]()
        assert group is not None
        slot, _ = self._versions.get(version, (-1, ""))
        progress_s = time.monotonic()

        def look(timeout_ms: int = 0) -> None:
            self._hear(timeout_ms)
            if failed := [f"{member.hex()}: {reason}" for member, reason in self._answers.items() if reason]:
                raise GroupBrokenError(failed[0])
            if self._closing.is_set() or version not in self._versions:
                raise GroupBrokenError("the version was overwritten, or the learner is closing")
            if time.monotonic() - progress_s > self._config.timeout_s:
                silent = ", ".join(member.hex() for member in self._members if member not in self._answers)
                raise GroupBrokenError(f"no progress for {self._config.timeout_s:g} s; silent: {silent or 'nobody'}")

        group.wait_open(look)
        for index, end in enumerate(self._ends):
            if len(under_way) == NUM_BUFFERS:
                wait_done(under_way.popleft(), look)
                progress_s = time.monotonic()
            bucket = self._slots[slot][self._ends[index - 1] if index else 0 : end]
            if self._buffers is not None:
                bucket = self._buffers[index].copy_(bucket, non_blocking=True)
            under_way.append(group.broadcast(bucket))
        while under_way:
            wait_done(under_way.popleft(), look)
        progress_s = time.monotonic()
        while not {*self._members} <= self._answers.keys():
            look(_POLL_MS)

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group = None
