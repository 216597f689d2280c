"""Media `gloo` and `nccl`: the learner broadcasts a version to all generators that are ready, bucket by bucket.

    learner ── CollectiveWriter: slots, one thread ◂── ROUTER: Ready, Answer, Leaving, BlobWanted
                    │                                  Begin, Abort, Refused, Noted, BlobHere
    generator ─ Member (collective_member.py): a DEALER, the group of the present epoch, two bucket buffers

An epoch is one process group (collective_group.py): the learner, rank 0, and the members in order. It lasts while the same
members want the next version; anybody new, missing or failed makes a new one. A member asks (`Ready`) every second until it is
told to begin or is refused; whatever it was told to begin ends with an `Answer`.

Invariants:
- The learner's own thread waits for no member, no socket and no group. Everything here is done on one thread of the medium.
- An attempt ends: everyone answered, or no progress for `timeout_s`, or somebody failed. Then the others are told, have
  ANSWER_S to say that they are out, and whoever says nothing is waited for no more until it asks. The rest ask again: a new
  epoch.
- Members gather for `gather_s` at most, and not at all once everyone of the last attempt is ready and nobody is new.
- A version being sent or gathered for keeps its slot (`busy_slots`); one that had to be overwritten ends the attempt.
- The bytes travel by torch.distributed, which neither encrypts nor asks for a key. The socket does both where the run has keys,
  and says who may take part.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import torch
import zmq
from msgspec import Meta

from asyncrl.config.broadcast import GlooMedium, NCCLMedium
from asyncrl.errors import BroadcastError, ConfigError
from asyncrl.models.layout import bucket_ends
from asyncrl.schema.weights import WeightsManifest
from asyncrl.weights.media.base import NUM_SLOTS
from asyncrl.weights.media.collective_group import (
    Backend,
    Group,
    GroupBrokenError,
    Place,
    check_nccl,
    open_store,
    wait_done,
)
from asyncrl.weights.media.device import NUM_BUFFERS, BucketBuffers
from asyncrl.weights.sockets import UNDECODABLE, CurveKeys, Router

log = logging.getLogger(__name__)

ANSWER_S = 2.0
GONE_AFTER_S = 5.0
"""Who asked and was not heard of for so long does not want the version any more."""
MAX_MESSAGE_BYTES = 4096
_POLL_MS = 10
_JOIN_S = 10.0
_Number = Annotated[int, Meta(ge=0, le=2**62)]
_Name = Annotated[str, Meta(max_length=64)]


class Ready(msgspec.Struct, frozen=True, tag="ready", forbid_unknown_fields=True):
    """Member: I want this version, and take part at once when told to."""

    version: _Number
    fingerprint: _Name


class Answer(msgspec.Struct, frozen=True, tag="answer", forbid_unknown_fields=True):
    """Member: I am through with this attempt."""

    attempt: _Number
    failure: Annotated[str, Meta(max_length=1024)] = ""
    """Empty: all of it is here. Else I am out of the group, and shall ask again if I still want the version."""


class Leaving(msgspec.Struct, frozen=True, tag="leaving", forbid_unknown_fields=True):
    """Member: do not wait for me."""


class BlobWanted(msgspec.Struct, frozen=True, tag="blob_wanted", forbid_unknown_fields=True):
    """Member: send me this delta."""

    name: _Name


class Noted(msgspec.Struct, frozen=True, tag="noted"):
    """Learner: I heard you; wait."""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Learner: receive this version now, in the group of this epoch, which is opened if you are not in it yet."""

    attempt: int
    epoch: int
    version: int
    rank: int
    size: int
    store: str
    """host:port where those of a new epoch meet; empty: the epoch is the last one's."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Learner: this attempt and its group are over."""

    attempt: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Learner: you will not get this version any more."""

    version: int
    reason: str


class BlobHere(msgspec.Struct, frozen=True, tag="blob_here"):
    """Learner: the bytes follow in the next frame, or the delta is gone."""

    name: str
    is_gone: bool = False


FromMember = Ready | Answer | Leaving | BlobWanted
FromLearner = Noted | Begin | Abort | Refused | BlobHere
_FROM_MEMBER: msgspec.msgpack.Decoder[FromMember] = msgspec.msgpack.Decoder(FromMember)


# -- the learner's end ---------------------------------------------------------------------------------------------------------


class CollectiveWriter:
    """The learner's end; owns the slots, the socket and one thread.

    Args:
        config: Host and times.
        keys: Of the run; None: members are not asked for any.
        through: Returns the device whose buffers buckets are sent from; None: gloo, from the slots.
        backend: Of torch.distributed; None: what the config is called.
    """

    keeps_slots = True

    def __init__(
        self,
        config: GlooMedium | NCCLMedium,
        keys: CurveKeys | None = None,
        *,
        through: Callable[[], torch.device] | None = None,
        backend: Backend | None = None,
    ) -> None:
        self._config = config
        self._keys = keys
        self._through = through
        self._backend: Backend = backend or ("nccl" if isinstance(config, NCCLMedium) else "gloo")
        self._lock = threading.Lock()
        """Of what the learner's and the publisher's thread change: versions, blobs."""
        self._versions: dict[int, tuple[int, str]] = {}
        """Slot and fingerprint of each version that can be sent."""
        self._blobs: dict[str, bytes] = {}
        self._slots: tuple[torch.Tensor, ...] = ()
        self._ends: tuple[int, ...] = ()
        self._device: torch.device | None = None
        self._buffers: BucketBuffers | None = None
        self._router: Router | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self.refused = 0
        """Messages that were none."""
        self.location = ""
        # From here on of the medium's own thread.
        self._ready: dict[bytes, tuple[int, float]] = {}
        """Members that wait: for which version, and when they last said so."""
        self._expected: frozenset[bytes] = frozenset()
        """Who took part last: those that are not ready for the next version yet are waited for a moment."""
        self._gathering_since_s: float | None = None
        self._sending = -1
        """The version of the attempt under way; -1: there is none."""
        self._attempt = self._epoch = 0
        self._members: tuple[bytes, ...] = ()
        self._group: Group | None = None
        self._answers: dict[bytes, str] = {}
        """Of the members of the attempt under way: why it failed there; empty: it is done."""

    def open(self, manifest: WeightsManifest) -> tuple[torch.Tensor, ...]:
        """Listen at a free port of the configured host; see MediumWriter.

        Raises:
            ConfigError: It is no address of this machine, or there is no NCCL here.
        """
        if self._backend == "nccl":
            check_nccl()
        self._device = self._through() if self._through is not None else None
        is_pinned = self._device is not None and self._device.type == "cuda"
        self._slots = tuple(torch.zeros(manifest.total_bytes, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(NUM_SLOTS))
        self._ends = bucket_ends(manifest)
        self._buffers = None if self._device is None else BucketBuffers(self._ends, self._device)
        host, self._router = self._config.host, Router(self._keys, MAX_MESSAGE_BYTES)
        try:
            self._router.socket.bind(f"tcp://{socket.gethostbyname(host)}:*")
        except (zmq.ZMQError, OSError) as error:
            self._router.close()
            raise ConfigError(
                f"cannot listen at {host}: {error}; broadcast.medium.host must be an address of the learner's machine"
            ) from error
        self.location = f"{host}:{self._router.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(':')[2]}"
        self._thread = threading.Thread(target=self._serve, name="asyncrl-weights-sender", daemon=True)
        self._thread.start()
        return self._slots

    def busy_slots(self) -> frozenset[int]:
        """Return the slot of the version that is being sent or gathered for."""
        wanted = max((version for version, _ in list(self._ready.values())), default=-1)
        with self._lock:
            slot, _ = self._versions.get(max(wanted, self._sending), (-1, ""))
        return frozenset({slot} - {-1})

    def overwrite(self, slot: int, version: int) -> None:  # noqa: ARG002 - nothing is said about it before it is whole
        """Offer what the slot holds no more."""
        with self._lock:
            self._versions = {held: place for held, place in self._versions.items() if place[0] != slot}

    def commit(self, slot: int, version: int, fingerprint: str) -> str:
        """Offer the version; see MediumWriter."""
        if self._thread is None or not self._thread.is_alive():
            raise BroadcastError(f"version {version} can be fetched by nobody: the thread that sends weights has ended")
        with self._lock:
            self._versions[version] = slot, fingerprint
        return self.location

    def put_blob(self, name: str, blob: bytes) -> None:
        """Keep the delta for whoever asks."""
        with self._lock:
            self._blobs[name] = blob

    def drop_blob(self, name: str) -> None:
        """Keep it no longer."""
        with self._lock:
            self._blobs.pop(name, None)

    def close(self) -> None:
        """Stop whatever is under way; members notice that nothing comes. Safe to repeat."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        if self._router is not None:
            self._router.close()
        self._thread, self._slots = None, ()

    # What follows runs on the medium's own thread.

    def _serve(self) -> None:
        """Listen and send, until closing; on a stream of its own, so that nothing here waits for the learner's step."""
        with contextlib.ExitStack() as on_device:
            if self._device is not None and self._device.type == "cuda":
                on_device.enter_context(torch.cuda.device(self._device))
                on_device.enter_context(torch.cuda.stream(torch.cuda.Stream(self._device)))  # type: ignore[no-untyped-call]
            while not self._closing.is_set():
                self._hear(_POLL_MS)
                self._refuse_overwritten()
                if (version := self._gathered()) is not None:
                    self._send_version(version)
        self._leave_group()

    def _hear(self, timeout_ms: int) -> None:
        """Take in what members say."""
        assert self._router is not None
        while self._router.poll(timeout_ms):
            timeout_ms = 0
            member, *frames = self._router.socket.recv_multipart()
            try:
                message = _FROM_MEMBER.decode(frames[0]) if len(frames) == 1 else None
            except UNDECODABLE:
                message = None
            match message:
                case None:
                    self.refused += 1
                case Ready():
                    self._take_ready(member, message)
                case Answer(attempt, failure) if attempt == self._attempt and member in self._members:
                    self._take_answer(member, failure)
                case Leaving():
                    self._ready.pop(member, None)
                    self._expected -= {member}
                    if member in self._members:
                        self._take_answer(member, "it left")
                case BlobWanted(name):
                    with self._lock:
                        blob = self._blobs.get(name)
                    self._say(member, BlobHere(name, is_gone=blob is None), blob or b"")
                case _:
                    pass  # about an attempt that is over
        now = time.monotonic()
        self._ready = {m: ready for m, ready in self._ready.items() if now - ready[1] < GONE_AFTER_S}

    def _take_ready(self, member: bytes, ready: Ready) -> None:
        version = ready.version
        with self._lock:
            _, fingerprint = self._versions.get(version, (-1, ""))
            held = ", ".join(map(str, sorted(self._versions))) or "none"
        if fingerprint != ready.fingerprint:
            self._ready.pop(member, None)
            self._say(member, Refused(version, f"the learner holds {held}"))
            return
        self._say(member, Noted())
        # One that asks while it should receive has not seen the order to begin yet: the attempt's deadline decides.
        if self._sending < 0 or member not in self._members or member in self._answers:
            self._ready[member] = version, time.monotonic()

    def _take_answer(self, member: bytes, failure: str) -> None:
        """Note that a member is through; where it is out of the group, nobody can use that any more."""
        if self._sending >= 0:
            self._answers[member] = failure
        elif failure:
            self._leave_group()

    def _refuse_overwritten(self) -> None:
        with self._lock:
            held = set(self._versions)
        for member, (version, _) in list(self._ready.items()):
            if version not in held:
                del self._ready[member]
                self._say(member, Refused(version, "the learner went on to newer versions"))

    def _gathered(self) -> int | None:
        """Return the newest version that is waited for, once those that want it have gathered."""
        if not self._ready:
            self._gathering_since_s = None
            return None
        now = time.monotonic()
        self._gathering_since_s = self._gathering_since_s or now
        is_complete = self._ready.keys() == self._expected
        if not is_complete and now - self._gathering_since_s < self._config.gather_s:
            return None
        return max(wanted for wanted, _ in self._ready.values())

    def _send_version(self, version: int) -> None:
        """Make one attempt to send the version to those that are ready for it."""
        members = tuple(sorted(member for member, (wanted, _) in self._ready.items() if wanted == version))
        for member in members:
            del self._ready[member]
        is_new = self._group is None or members != self._members
        self._attempt, self._answers, self._sending, failure = self._attempt + 1, {}, version, ""
        try:
            store, address = None, ""
            if is_new:
                self._leave_group()
                store, address = open_store(self._config.host, self._config.timeout_s)
            self._epoch, self._members = self._epoch + is_new, members
            place = Place(self._epoch, 0, len(members) + 1, address)
            for rank, member in enumerate(members, start=1):
                self._say(member, Begin(self._attempt, self._epoch, version, rank, place.size, address))
            if store is not None:
                host, timeout_s = self._config.host, self._config.timeout_s
                self._group = Group(self._backend, place, host, timeout_s, store, self._device)
            self._broadcast(version)
        except (GroupBrokenError, BroadcastError, RuntimeError) as error:
            failure = str(error) or repr(error)
        self._expected = frozenset(members)
        if failure:
            self._end_attempt(version, failure)
        self._sending = -1

    def _broadcast(self, version: int) -> None:
        """Send all buckets, two under way at most, and wait until every member has said that they are there."""
        group, under_way = self._group, deque[Any]()
        assert group is not None
        with self._lock:
            slot, _ = self._versions.get(version, (-1, ""))
        deadline_s = time.monotonic() + self._config.timeout_s

        def look() -> bool:
            self._hear(0)
            self._check_attempt(version, deadline_s)
            return False

        def finish_oldest() -> None:
            nonlocal deadline_s
            wait_done(under_way.popleft(), look)
            deadline_s = time.monotonic() + self._config.timeout_s

        group.wait_open(look)
        for index, end in enumerate(self._ends):
            if len(under_way) == NUM_BUFFERS:
                finish_oldest()
            bucket = self._slots[slot][self._ends[index - 1] if index else 0 : end]
            if self._buffers is not None:
                bucket = self._buffers[index].copy_(bucket, non_blocking=True)
            under_way.append(group.broadcast(bucket))
        while under_way:
            finish_oldest()
        num_answers = 0
        while len(self._answers) < len(self._members):
            self._hear(_POLL_MS)
            if len(self._answers) > num_answers:
                num_answers, deadline_s = len(self._answers), time.monotonic() + self._config.timeout_s
            self._check_attempt(version, deadline_s)

    def _check_attempt(self, version: int, deadline_s: float) -> None:
        """Raise GroupBrokenError where the attempt is of no use any more."""
        with self._lock:
            is_held = version in self._versions
        if failed := [f"{member.hex()}: {reason}" for member, reason in self._answers.items() if reason]:
            raise GroupBrokenError(failed[0])
        if self._closing.is_set() or not is_held:
            raise GroupBrokenError("the learner closes" if self._closing.is_set() else f"version {version} was overwritten")
        if time.monotonic() > deadline_s:
            silent = ", ".join(member.hex() for member in self._members if member not in self._answers)
            raise GroupBrokenError(f"no progress for {self._config.timeout_s:g} s; silent: {silent or 'nobody'}")

    def _end_attempt(self, version: int, reason: str) -> None:
        """Leave the group, tell the members, and give those that have not answered a moment to say that they are out."""
        log.info("broadcast %d of version %d to %d generators failed: %s", self._attempt, version, len(self._members), reason)
        members = self._members
        self._leave_group()
        self._members = members  # their answers still count
        silent = [member for member in members if member not in self._answers]
        for member in silent:
            self._say(member, Abort(self._attempt))
        deadline_s = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline_s and not self._closing.is_set() and not {*members} <= self._answers.keys():
            self._hear(_POLL_MS)
        for member in members:
            if member not in self._answers:
                self._expected -= {member}
                log.warning("generator %s said nothing and is no longer waited for; it may come back", member.hex())

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group, self._members = None, ()

    def _say(self, member: bytes, message: FromLearner, blob: bytes | None = None) -> None:
        """Tell a member; lost where it is gone or reads nothing."""
        frames = [member, msgspec.msgpack.encode(message), *([] if blob is None else [blob])]
        assert self._router is not None
        with contextlib.suppress(zmq.ZMQError):
            self._router.socket.send_multipart(frames, flags=zmq.NOBLOCK)
