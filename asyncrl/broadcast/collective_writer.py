"""Media `gloo` and `nccl`, the learner's end: a desk where members ask, and broadcasts to all who are ready.

Owns the slots, the desk (collective_socket.py) and its thread, and the sender (collective_sender.py). Who takes part is decided
by collective_membership.py; here that is carried out.

Invariants:
- The learner's thread takes one lock for as long as a decision takes, and waits for nothing else: no member, no socket, no group.
- A version being gathered for or sent keeps its slot (`busy_slots`), one at a time; each attempt at it is bounded.
- Instructions are carried out in the order of the decisions, on the desk's thread.
- The bytes travel by torch.distributed, which neither encrypts nor asks for a key; who may take part is a matter of the desk,
  which does both where the run has keys.

Called by media.py.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from asyncrl.broadcast.collective_group import Backend, Place, check_nccl, open_store
from asyncrl.broadcast.collective_membership import (
    Answered,
    Asked,
    Dropped,
    Event,
    Instruction,
    Left,
    Membership,
    Offered,
    Refuse,
    Sent,
    Start,
    Stop,
    Tick,
    Withdrawn,
    ranks_of,
)
from asyncrl.broadcast.collective_sender import Sender, SendOrder
from asyncrl.broadcast.collective_socket import Desk
from asyncrl.broadcast.collective_wire import (
    Abort,
    Begin,
    BlobHere,
    BlobWanted,
    Done,
    Failed,
    FromMember,
    Leaving,
    Noted,
    Ready,
    Refused,
    short,
)
from asyncrl.broadcast.medium import NUM_SLOTS
from asyncrl.broadcast.zeromq_keys import CurveKeys
from asyncrl.config.broadcast import GlooMedium, NCCLMedium
from asyncrl.errors import BroadcastError
from asyncrl.models.layout import bucket_ends
from asyncrl.schema.weights import WeightsManifest

log = logging.getLogger(__name__)

_POLL_S = 0.01
_JOIN_S = 10.0


@dataclass(frozen=True, slots=True)
class _Whole:
    slot: int
    fingerprint: str


class CollectiveWriter:
    """The learner's end.

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
        self._membership = Membership(config.timeout_s, config.gather_s)
        self._to_do: deque[Instruction] = deque()
        self._whole: dict[int, _Whole] = {}
        self._blobs: dict[str, bytes] = {}
        self._slots: tuple[torch.Tensor, ...] = ()
        self._desk: Desk | None = None
        self._sender: Sender | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self.location = ""

    def open(self, manifest: WeightsManifest) -> tuple[torch.Tensor, ...]:
        """Open the desk; see MediumWriter."""
        if self._backend == "nccl":
            check_nccl()
        device = self._through() if self._through is not None else None
        is_pinned = device is not None and device.type == "cuda"
        slots = [torch.zeros(manifest.total_bytes, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(NUM_SLOTS)]
        self._slots = tuple(slots)
        self._desk = Desk(self._config.host, self._keys)
        self.location = self._desk.address
        config = self._config
        self._sender = Sender(self._backend, config.host, config.timeout_s, bucket_ends(manifest), device, self._decide)
        self._thread = threading.Thread(
            target=self._serve, args=(self._desk, self._sender), name="asyncrl-weights-desk", daemon=True
        )
        self._thread.start()
        return self._slots

    def busy_slots(self) -> frozenset[int]:
        """Return the slot of the version that is being sent or gathered for."""
        with self._lock:
            version = self._membership.version_in_use
            return frozenset() if version is None or version not in self._whole else frozenset([self._whole[version].slot])

    def overwrite(self, slot: int, version: int) -> None:  # noqa: ARG002 - nothing is said about it before it is whole
        """Offer what the slot holds no more."""
        with self._lock:
            for held in [version for version, whole in self._whole.items() if whole.slot == slot]:
                del self._whole[held]
                self._decide_locked(Withdrawn(held))

    def commit(self, slot: int, version: int, fingerprint: str) -> str:
        """Offer the version; see MediumWriter."""
        if self._thread is None or self._sender is None or not (self._thread.is_alive() and self._sender.is_alive):
            raise BroadcastError(f"version {version} can be fetched by nobody: the thread that sends weights has ended")
        with self._lock:
            self._whole[version] = _Whole(slot, fingerprint)
            self._decide_locked(Offered(version))
        return self.location

    def put_blob(self, name: str, blob: bytes) -> None:
        """Keep the delta for whoever asks the desk."""
        with self._lock:
            self._blobs[name] = blob

    def drop_blob(self, name: str) -> None:
        """Keep it no longer."""
        with self._lock:
            self._blobs.pop(name, None)

    def close(self) -> None:
        """Stop whatever is under way; members notice that nothing comes."""
        self._closing.set()
        if self._sender is not None:
            self._sender.close()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        if self._desk is not None:
            self._desk.close()
        self._desk, self._sender, self._thread, self._slots = None, None, None, ()

    def _serve(self, desk: Desk, sender: Sender) -> None:
        """Listen, decide, carry out, until closing."""
        while not self._closing.is_set():
            for member, message in desk.hear(_POLL_S):
                self._take(desk, member, message)
            self._decide(Tick())
            while (instruction := self._next_to_do()) is not None:
                self._carry_out(instruction, desk, sender)

    def _take(self, desk: Desk, member: str, message: FromMember) -> None:
        match message:
            case Ready(version, fingerprint):
                if self._is_other(version, fingerprint):
                    desk.say(member, Refused(version, "the learner holds another version of that number", is_gone=True))
                else:
                    desk.say(member, Noted())
                    self._decide(Asked(member, version))
            case Done(epoch):
                self._decide(Answered(member, epoch))
            case Failed(epoch, reason):
                self._decide(Answered(member, epoch, reason or "no reason given"))
            case Leaving():
                self._decide(Left(member))
            case BlobWanted(name):
                with self._lock:
                    blob = self._blobs.get(name)
                desk.say(member, BlobHere(name, is_gone=blob is None), blob or b"")

    def _is_other(self, version: int, fingerprint: str) -> bool:
        with self._lock:
            whole = self._whole.get(version)
        return whole is not None and whole.fingerprint != fingerprint

    def _decide(self, event: Event) -> None:
        with self._lock:
            self._decide_locked(event)

    def _decide_locked(self, event: Event) -> None:
        self._to_do.extend(self._membership.handle(event, time.monotonic()))

    def _next_to_do(self) -> Instruction | None:
        with self._lock:
            return self._to_do.popleft() if self._to_do else None

    def _carry_out(self, instruction: Instruction, desk: Desk, sender: Sender) -> None:
        match instruction:
            case Start():
                self._start(instruction, desk, sender)
            case Stop(epoch, members, reason):
                log.info("broadcast group %d of %d generators ends: %s", epoch, len(members), reason)
                sender.stop()
                for member in members:
                    desk.say(member, Abort(epoch, short(reason)))
            case Refuse(member, version, reason, is_gone):
                desk.say(member, Refused(version, short(reason), is_gone))
            case Dropped(member, reason):
                log.warning("generator %s is no longer waited for: %s; it may come back", member, reason)

    def _start(self, start: Start, desk: Desk, sender: Sender) -> None:
        """Tell the members and the sender; a group that cannot even be called together is a failed attempt."""
        with self._lock:
            whole = self._whole.get(start.version)
        if whole is None:
            self._decide(Sent(start.epoch, f"version {start.version} was overwritten"))
            return
        try:
            store, address = open_store(self._config.host, self._config.timeout_s) if start.is_new else (None, "")
        except (BroadcastError, RuntimeError) as error:
            self._decide(Sent(start.epoch, str(error)))
            return
        size = len(start.members) + 1
        for member, rank in ranks_of(start.members).items():
            desk.say(member, Begin(start.epoch, start.version, rank, size, address))
        sender.send(SendOrder(Place(start.epoch, 0, size, address), self._slots[whole.slot], store))
