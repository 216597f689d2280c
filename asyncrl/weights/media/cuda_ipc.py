"""Medium `cuda_ipc`: learner and engine on one GPU; the engine reads the learner's slots where they lie. Only handles travel.

Owns two slots in the learner's GPU memory and, for each, a ticket: a slot of the `shared_memory` medium that holds, instead of a
version, the handle that opens the GPU memory. Sequence numbers, locks, the note of where it all is and the removal of what a
killed learner left are thereby those of shared_memory.py.

Invariants:
- A ticket can be had only while its slot holds a whole version: the publisher has computed the slot's fingerprints, so the copy
  into it is over, before it commits.
- A receiver holds the ticket's lock while it reads, and its stream is empty before it lets go; an overwritten slot is noticed.
- Handles are JSON, never pickle; memory of another GPU is refused.

Not run on a GPU by its authors unless docs/weights.md says so.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import torch

from asyncrl.errors import BroadcastError, ConfigError
from asyncrl.models.layout import bucket_ends, check_manifest
from asyncrl.schema.weights import WeightsAvailable, WeightsManifest
from asyncrl.weights.fingerprint import DIGEST_BYTES, damaged_buckets
from asyncrl.weights.media.base import NUM_SLOTS, ReceiverArguments
from asyncrl.weights.media.device import current_gpu, device_fingerprint, refuse_host_memory
from asyncrl.weights.media.shared_memory import SharedMemoryLease, SharedMemoryReader, SharedMemoryWriter
from asyncrl.weights.tensors import tensors_by_bucket

TICKET_BYTES = 4096
_TICKETS = WeightsManifest((), TICKET_BYTES)


class Ticket(msgspec.Struct, frozen=True):
    """How another process opens a slot: what torch's `_share_cuda_` says, and which GPU it is of."""

    gpu: str
    """Its UUID: numbers differ between processes."""
    handle: bytes
    num_bytes: int
    offset_bytes: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    needs_event: bool


class CUDAIPCWriter:
    """The learner's end; owns the slots."""

    keeps_slots = True

    def __init__(self, run_folder: Path) -> None:
        self._tickets = SharedMemoryWriter(run_folder)
        self._slots: tuple[torch.Tensor, ...] = ()

    def open(self, manifest: WeightsManifest) -> tuple[torch.Tensor, ...]:
        """Allocate the slots on the current GPU and write their tickets; see MediumWriter."""
        device = current_gpu()
        try:
            self._slots = tuple(torch.zeros(manifest.total_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS))
        except torch.OutOfMemoryError as error:
            raise BroadcastError(
                f"{device} has no room for two versions of {manifest.total_bytes >> 20} MiB beside the learner; set "
                f"broadcast.medium.kind to shared_memory"
            ) from error
        for slot, ticket in zip(self._slots, self._tickets.open(_TICKETS), strict=True):
            encoded = msgspec.json.encode(ticket_of(slot))
            assert len(encoded) <= TICKET_BYTES, "a ticket outgrew its place"
            ticket[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        return self._slots

    def busy_slots(self) -> frozenset[int]:
        """Return the slots that an engine reads."""
        return self._tickets.busy_slots()

    def overwrite(self, slot: int, version: int) -> None:
        """Make what the slot holds unfetchable."""
        self._tickets.overwrite(slot, version)

    def commit(self, slot: int, version: int, fingerprint: str) -> str:
        """Make the slot fetchable; see MediumWriter."""
        return self._tickets.commit(slot, version, fingerprint)

    def put_blob(self, name: str, blob: bytes) -> None:
        """Keep a delta; see MediumWriter."""
        self._tickets.put_blob(name, blob)

    def drop_blob(self, name: str) -> None:
        """Keep it no longer."""
        self._tickets.drop_blob(name)

    def close(self) -> None:
        """Take the tickets back; the memory is freed once no engine has it open."""
        self._tickets.close()
        self._slots = ()


class CUDAIPCReceiver:
    """A Receiver (weights/tensors.py): yields views of the learner's memory."""

    def __init__(self, run_folder: Path) -> None:
        self._tickets = SharedMemoryReader(run_folder)
        self._opened: dict[tuple[bytes, int], torch.UntypedStorage] = {}
        self._learner = ""
        """Whose memory that is, by its tickets."""

    def fetch(self, available: WeightsAvailable, device: torch.device) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Verify the version where it lies and yield its tensors; see Receiver."""
        manifest = available.manifest
        check_manifest(manifest)
        refuse_host_memory("cuda_ipc", device)
        lease = self._tickets.lease(msgspec.structs.replace(available, manifest=_TICKETS))
        if lease.path != self._learner:  # what a dead learner left is kept for as long as it is open here
            self._opened.clear()
            self._learner = lease.path
        try:
            flat = self._open(ticket_in(lease), device, manifest.total_bytes)
            starts, announced = [0, *bucket_ends(manifest)[:-1]], available.bucket_fingerprints
            for number, (start, end, inside) in enumerate(
                zip(starts, bucket_ends(manifest), tensors_by_bucket(manifest), strict=True)
            ):
                found = device_fingerprint(flat[start:end])
                if damaged_buckets(found, announced[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]):
                    raise BroadcastError(
                        f"version {available.version} lies damaged in the learner's memory: bucket {number} differs"
                    )
                yield from inside.views(flat[start:end])
            torch.cuda.current_stream(device).synchronize()
            lease.check()
        finally:
            lease.release()

    def close(self) -> None:
        """Let go of the learner's memory."""
        self._opened.clear()
        self._tickets.close()

    def _open(self, ticket: Ticket, device: torch.device, num_bytes: int) -> torch.Tensor:
        """Return the slot; each is opened once."""
        if ticket.gpu != gpu_id(device):
            raise BroadcastError(
                f"the learner is on GPU {ticket.gpu}, this engine on {gpu_id(device)}; broadcast.medium.kind 'cuda_ipc' needs "
                f"both on one, use 'nccl' or 'shared_memory'"
            )
        if ticket.num_bytes < num_bytes:
            raise BroadcastError(f"the learner's slot has {ticket.num_bytes} bytes, the version {num_bytes}")
        key = (ticket.handle, ticket.offset_bytes)
        if key not in self._opened:
            self._opened[key] = opened(ticket, device)
        storage = self._opened[key]
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (num_bytes,))  # type: ignore[call-overload, no-any-return]


def open_receiver(arguments: bytes) -> CUDAIPCReceiver:
    """Make the receiving end in the process that holds the model; see weights/tensors.py.

    Raises:
        ConfigError: There is no GPU here.
    """
    if not torch.cuda.is_available():
        raise ConfigError("broadcast.medium.kind 'cuda_ipc' needs the engine on the learner's GPU, and there is none here")
    return CUDAIPCReceiver(Path(msgspec.json.decode(arguments, type=ReceiverArguments).run_folder))


def ticket_of(slot: torch.Tensor) -> Ticket:
    """Return what opens the slot's memory in another process."""
    shared: Any = slot.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    _, handle, num_bytes, offset, counter, counter_offset, event, needs_event = shared
    return Ticket(gpu_id(slot.device), handle, num_bytes, offset, counter, counter_offset, event, bool(needs_event))


def opened(ticket: Ticket, device: torch.device) -> torch.UntypedStorage:
    """Open the memory.

    Raises:
        BroadcastError: It is gone, or this system does not allow it.
    """
    try:
        return torch.UntypedStorage._new_shared_cuda(  # type: ignore[no-any-return]  # noqa: SLF001
            device.index if device.index is not None else torch.cuda.current_device(),
            ticket.handle,
            ticket.num_bytes,
            ticket.offset_bytes,
            ticket.counter_handle,
            ticket.counter_offset,
            ticket.event_handle,
            ticket.needs_event,
        )
    except RuntimeError as error:
        raise BroadcastError(
            f"the learner's GPU memory cannot be opened here ({str(error).splitlines()[0]}); in containers both processes need "
            f"the same IPC namespace, and expandable segments must be off (PYTORCH_CUDA_ALLOC_CONF)"
        ) from error


def ticket_in(lease: SharedMemoryLease) -> Ticket:
    """Return the ticket that a lease holds.

    Raises:
        BroadcastError: There is none.
    """
    try:
        return msgspec.json.decode(bytes(lease.flat.numpy()).rstrip(b"\0"), type=Ticket)
    except msgspec.DecodeError as error:
        raise BroadcastError(f"{lease.path} holds no handle of GPU memory: {error}") from error


def gpu_id(device: torch.device) -> str:
    """Return the UUID of a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)
