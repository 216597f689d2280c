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

import msgspec
import torch

from asyncrl.errors import BroadcastError, first_line
from asyncrl.models.layout import bucket_ends, check_manifest, view_tensors
from asyncrl.schema.weights import TensorEntry, WeightsAvailable, WeightsManifest
from asyncrl.weights.buckets import device_fingerprints, gpu_for, refuse_damaged
from asyncrl.weights.media.base import NUM_SLOTS, ReceiverArguments
from asyncrl.weights.media.shared_memory import SharedMemoryReader, SharedMemoryWriter

TICKET_BYTES = 4096
_TICKETS = WeightsManifest((TensorEntry("ticket", (TICKET_BYTES,), "U8", 0, TICKET_BYTES),), TICKET_BYTES)


class Ticket(msgspec.Struct, frozen=True):
    """How another process opens a slot."""

    gpu: str
    """The UUID: numbers differ between processes."""
    shared: tuple[bytes, int, int, bytes, int, bytes, bool]
    """What torch's `_share_cuda_` says after the device: handle, bytes, offset, counter and its offset, event, needs event."""


class CUDAIPCWriter(SharedMemoryWriter):
    """The learner's end; owns the slots on the GPU. Its segment holds tickets in place of versions."""

    def open(self, manifest: WeightsManifest) -> tuple[torch.Tensor, ...]:
        """Allocate the slots on the current GPU and write their tickets; see MediumWriter."""
        device = gpu_for("cuda_ipc")
        try:
            slots = tuple(torch.zeros(manifest.total_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS))
        except torch.OutOfMemoryError as error:
            room = f"no room for two versions of {manifest.total_bytes >> 20} MiB beside the learner"
            raise BroadcastError(f"{device} has {room}; set broadcast.medium.kind to shared_memory") from error
        for slot, place in zip(slots, super().open(_TICKETS), strict=True):
            write_ticket(slot, place)
        return slots


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
        gpu_for("cuda_ipc", device)
        lease = self._tickets.lease(msgspec.structs.replace(available, manifest=_TICKETS))
        if lease.path != self._learner:  # what a dead learner left is kept for as long as it is open here
            self._opened.clear()
            self._learner = lease.path
        try:
            flat = open_ticket(lease.flat, device, manifest.total_bytes, self._opened)
            refuse_damaged(available, device_fingerprints(flat, bucket_ends(manifest), device))
            yield from view_tensors(flat, manifest).items()
            torch.cuda.current_stream(device).synchronize()
            lease.check()
        finally:
            lease.release()

    def close(self) -> None:
        """Let go of the learner's memory."""
        self._opened.clear()
        self._tickets.close()


def open_receiver(arguments: bytes) -> CUDAIPCReceiver:
    """Make the receiving end in the process that holds the model; see weights/tensors.py.

    Raises:
        ConfigError: There is no GPU here.
    """
    gpu_for("cuda_ipc")
    return CUDAIPCReceiver(Path(msgspec.json.decode(arguments, type=ReceiverArguments).run_folder))


def write_ticket(slot: torch.Tensor, place: torch.Tensor) -> None:
    """Write what opens a tensor's GPU memory in another process.

    Args:
        slot: uint8, on a GPU, at the start of its storage.
        place: uint8 [TICKET_BYTES], in host memory.
    """
    _, *shared = slot.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    ticket = Ticket(_gpu_id(slot.device), tuple(shared))
    encoded = msgspec.json.encode(ticket).ljust(TICKET_BYTES, b"\0")
    place.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))


def open_ticket(
    place: torch.Tensor, device: torch.device, num_bytes: int, opened: dict[tuple[bytes, int], torch.UntypedStorage]
) -> torch.Tensor:
    """Return the learner's GPU memory, uint8 [num_bytes].

    Args:
        place: What `write_ticket` wrote.
        device: The engine's.
        num_bytes: Wanted.
        opened: What this process has open of that learner; added to.

    Raises:
        BroadcastError: It is of another GPU, too small or gone, or this system does not allow it.
    """
    try:
        ticket = msgspec.json.decode(bytes(place.numpy()).rstrip(b"\0"), type=Ticket)
    except msgspec.DecodeError as error:
        raise BroadcastError(f"there is no handle of GPU memory in the learner's segment: {error}") from error
    handle, held_bytes, offset, *_ = ticket.shared
    if ticket.gpu != _gpu_id(device) or held_bytes < num_bytes:
        gpus = f"the learner has {held_bytes} bytes on GPU {ticket.gpu}, this engine wants {num_bytes} on {_gpu_id(device)}"
        raise BroadcastError(f"{gpus}: both have to be on one; else set broadcast.medium.kind to nccl or shared_memory")
    key = (handle, offset)
    if key not in opened:
        index = device.index if device.index is not None else torch.cuda.current_device()
        try:
            opened[key] = torch.UntypedStorage._new_shared_cuda(index, *ticket.shared)  # noqa: SLF001
        except RuntimeError as error:
            takes = "one IPC namespace for both processes, and no expandable segments (PYTORCH_CUDA_ALLOC_CONF)"
            raise BroadcastError(f"the learner's GPU memory is not opened: {first_line(error)}; it takes {takes}") from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(opened[key], 0, (num_bytes,))  # type: ignore[call-overload, no-any-return]


def _gpu_id(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
