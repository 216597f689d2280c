"""Media `cuda_ipc` and `shared_storage`: the engine opens the learner's own memory; only handles are sent.

`cuda_ipc` is for one GPU. It owns two slots in the learner's GPU memory and, for each, a ticket: a slot of the `shared_memory`
medium that contains, instead of a version, the handle that opens the GPU memory. Sequence numbers, locks, the location and the
removal of a killed learner's leftovers are therefore those of shared_memory.py.

`shared_storage` is for placement hybrid: the engine reads the learner's parameters in place, and publishing a version copies
nothing. On a CPU the parameters are in one mapped file, in the flat layout of a version (models/layout.py): each `param.data`
becomes a view of the file at the first publish; the parameter objects and the optimizer's state do not change. On a GPU they are
in one flat tensor, and the file contains the ticket that opens it in the engine's process. The file (in /dev/shm, named and
removed as in shm_segments.py) begins with a page of int64: magic, version. `HybridPublisher` and `HybridSubscriber` replace
Publisher and Subscriber.

Invariants:
- A ticket of `cuda_ipc` is available only while its slot holds a complete version: the publisher computes the slot's fingerprints
  before it commits, so the copy into the slot is complete.
- A receiver holds the ticket's lock while it reads and until its stream is finished; an overwritten slot is detected.
- Handles are JSON, never pickle; memory of another GPU is refused.
- From `publish` to the next step the shared parameters are the version in the header. While the learner steps, nothing may
  sample: phases ensure this, and `SharedTensors.check` verifies it afterwards.
- The fingerprints of a fetched version are computed in place and compared with the announced ones.
- On a CPU an engine's process cannot write to the learner's weights, because it maps the file privately.

docs/weights.md, at the end of "Collectives", says what was run on a GPU; the results are in experiments/gpu/RESULTS.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.clock import Clock
from asyncrl.config.broadcast import BroadcastConfig
from asyncrl.errors import BroadcastError, first_line
from asyncrl.models.layout import bucket_ends, check_tensors, make_manifest, view_tensors
from asyncrl.schema.weights import Probe, TensorEntry, WeightsAvailable, WeightsManifest
from asyncrl.weights.buckets import device_fingerprints, fingerprints_of, gpu_for, refuse_damaged, version_fingerprint
from asyncrl.weights.media.base import NUM_SLOTS, ReceiverArguments, VersionUnavailableError
from asyncrl.weights.media.shared_memory import HEADER_BYTES, Segment, SharedMemoryReader, SharedMemoryWriter
from asyncrl.weights.shm_segments import make_segment, remove_segment
from asyncrl.weights.tensors import SharedTensors

TICKET_BYTES = 4096
_TICKETS = WeightsManifest((TensorEntry("ticket", (TICKET_BYTES,), "U8", 0, TICKET_BYTES),), TICKET_BYTES)
_NEEDED = "it needs one IPC namespace for both processes, and no expandable segments (PYTORCH_CUDA_ALLOC_CONF)"
SHARED_MAGIC = 0x4452_42594841  # "AHYBRD" read as little-endian
_MAGIC, _VERSION = 0, 1


# -- tickets and cuda_ipc -------------------------------------------------------------------------------------------------------


class Ticket(msgspec.Struct, frozen=True):
    """How another process opens a slot."""

    gpu: str
    """The UUID, because GPU numbers differ between processes."""
    shared: tuple[bytes, int, int, bytes, int, bytes, bool]
    """What torch's `_share_cuda_` returns after the device: handle, bytes, offset, counter and its offset, event, needs event."""


class CUDAIPCWriter(SharedMemoryWriter):
    """The learner's end; owns the slots on the GPU. Its segment contains tickets instead of versions."""

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

    def __init__(self, arguments: bytes) -> None:
        self._tickets = SharedMemoryReader(Path(msgspec.json.decode(arguments, type=ReceiverArguments).run_folder))
        self._opened: dict[tuple[bytes, int], torch.UntypedStorage] = {}
        self._learner = ""
        """Path of the tickets of the learner that owns this memory."""

    def fetch(self, available: WeightsAvailable, device: torch.device) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Verify the version in place and yield its tensors; see Receiver."""
        manifest = available.manifest
        gpu_for("cuda_ipc", device)
        lease = self._tickets.lease(msgspec.structs.replace(available, manifest=_TICKETS))
        if lease.path != self._learner:  # the memory of a dead learner is not freed while it is open here
            self._opened.clear()
            self._learner = lease.path
        try:
            flat = open_ticket(lease.flat, device, manifest.total_bytes, self._opened)
            # `device` may have no number, and would not equal that of the bytes.
            refuse_damaged(available, device_fingerprints(flat, bucket_ends(manifest), flat.device))
            yield from view_tensors(flat, manifest).items()
            torch.cuda.current_stream(device).synchronize()
            lease.check()
        finally:
            lease.release()

    def close(self) -> None:
        """Release the learner's memory."""
        self._opened.clear()
        self._tickets.close()


def write_ticket(slot: torch.Tensor, place: torch.Tensor) -> None:
    """Write the handle with which another process opens a tensor's GPU memory.

    Args:
        slot: uint8, on a GPU, at the start of its storage.
        place: uint8 [TICKET_BYTES], in host memory.

    Raises:
        BroadcastError: This system does not allow it.
    """
    try:
        _, *shared = slot.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise BroadcastError(f"the learner's GPU memory is not shared: {first_line(error)}; {_NEEDED}") from error
    ticket = Ticket(_gpu_id(slot.device), tuple(shared))
    encoded = msgspec.json.encode(ticket).ljust(TICKET_BYTES, b"\0")
    place.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))


def open_ticket(
    place: torch.Tensor, device: torch.device, num_bytes: int, opened: dict[tuple[bytes, int], torch.UntypedStorage]
) -> torch.Tensor:
    """Return the learner's GPU memory, uint8 [num_bytes].

    Args:
        place: The ticket that `write_ticket` wrote.
        device: The engine's device.
        num_bytes: Bytes needed.
        opened: The memory of that learner that this process has opened; this function adds to it.

    Raises:
        BroadcastError: The memory is on another GPU, too small or gone, or this system does not allow opening it.
    """
    try:
        ticket = msgspec.json.decode(bytes(place.numpy()).rstrip(b"\0"), type=Ticket)
    except msgspec.DecodeError as error:
        raise BroadcastError(f"the learner's segment has no valid handle of GPU memory: {error}") from error
    handle, held_bytes, offset, *_ = ticket.shared
    if ticket.gpu != _gpu_id(device) or held_bytes < num_bytes:
        gpus = f"the learner has {held_bytes} bytes on GPU {ticket.gpu}, this engine needs {num_bytes} on {_gpu_id(device)}"
        raise BroadcastError(f"{gpus}: both must be on one GPU; else set broadcast.medium.kind to nccl or shared_memory")
    key = (handle, offset)
    if key not in opened:
        index = device.index if device.index is not None else torch.cuda.current_device()
        try:
            opened[key] = torch.UntypedStorage._new_shared_cuda(index, *ticket.shared)  # noqa: SLF001
        except RuntimeError as error:
            raise BroadcastError(f"the learner's GPU memory is not opened: {first_line(error)}; {_NEEDED}") from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(opened[key], 0, (num_bytes,))  # type: ignore[call-overload, no-any-return]


def _gpu_id(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


# -- shared_storage -------------------------------------------------------------------------------------------------------------


class HybridPublisher:
    """The learner's end; owns the file, and on a GPU the flat tensor.

    Example:
        >>> publisher = HybridPublisher(config.broadcast, run_folder, on_available, clock)  # doctest: +SKIP
        >>> publisher.publish(0, dict(model.named_parameters()))  # doctest: +SKIP
    """

    def __init__(
        self, config: BroadcastConfig, run_folder: Path, on_available: Callable[[WeightsAvailable], object], clock: Clock
    ) -> None:
        """Store the arguments; the file is made at the first publish."""
        self._config, self._run_folder, self._on_available, self._clock = config, run_folder, on_available, clock
        self._path: Path | None = None
        self._header: NDArray[np.int64] = np.zeros(0, np.int64)
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._views: dict[str, torch.Tensor] = {}
        self._manifest: WeightsManifest | None = None

    def publish(self, version: int, named_tensors: Mapping[str, torch.Tensor], probe: Probe | None = None) -> float:
        """Announce that the parameters are this version now; the first call moves them to memory that the engine can read.

        Args:
            version: Greater than any before.
            named_tensors: The parameters themselves, all on one device; the same ones every time.
            probe: For engines to compare with.

        Returns:
            Milliseconds that the learner was blocked, to compute the fingerprints in place.

        Raises:
            BroadcastError: There is not enough memory, or a parameter is no longer in the memory that the engine reads.
        """
        started_s = time.perf_counter()
        manifest = self._manifest = self._manifest or self._move_in(named_tensors)
        check_tensors(named_tensors, manifest)
        for name, view in self._views.items():
            if named_tensors[name].data_ptr() != view.data_ptr():
                raise BroadcastError(f"{name} has left the memory that the engine reads: something replaced its data")
        digests = _fingerprints(self._flat, manifest)
        self._header[_VERSION] = version
        blocked_ms = (time.perf_counter() - started_s) * 1e3
        name, now, path = version_fingerprint(digests), self._clock.now(), str(self._path)
        self._on_available(WeightsAvailable(version, "shared_storage", path, manifest, name, now, blocked_ms, probe, digests))
        return blocked_ms

    def close(self) -> None:
        """Remove the file; the parameters stay where they are. Safe to repeat."""
        if self._path is not None:
            remove_segment(self._path)
        self._path = None

    def _move_in(self, named_tensors: Mapping[str, torch.Tensor]) -> WeightsManifest:
        """Make the shared memory and turn every parameter into a view of it."""
        manifest = make_manifest(named_tensors, "model", self._config.bucket_bytes)
        left_out = [name for name in named_tensors if name not in {entry.name for entry in manifest.entries}]
        if left_out:
            raise BroadcastError(f"{left_out[0]} shares its memory with another parameter: shared_storage cannot move both")
        device, num_bytes = next(iter(named_tensors.values())).device, manifest.total_bytes
        on_gpu = device.type == "cuda"
        self._path, segment = make_segment(self._run_folder, HEADER_BYTES + (TICKET_BYTES if on_gpu else num_bytes))
        self._header = np.frombuffer(segment, np.int64, count=HEADER_BYTES // 8)
        self._header[[_VERSION, _MAGIC]] = -1, SHARED_MAGIC
        self._flat = inside = torch.frombuffer(segment, dtype=torch.uint8)[HEADER_BYTES:]
        if on_gpu:
            self._flat = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            write_ticket(self._flat, inside)
        self._views = view_tensors(self._flat, manifest)
        with torch.no_grad():
            for name, view in self._views.items():
                view.copy_(named_tensors[name])
                named_tensors[name].data = view
        return manifest


class HybridSubscriber:
    """A generator's end: opens the learner's parameters once per learner."""

    def __init__(self, run_folder: Path, device: str) -> None:
        """Store the arguments: `device` is the engine's."""
        self._run_folder = run_folder
        self._device = torch.device(device)
        self._open: tuple[str, NDArray[np.int64], torch.Tensor] | None = None

    async def fetch(self, available: WeightsAvailable) -> SharedTensors:
        """Return the learner's own parameters, verified to be this version.

        Raises:
            BroadcastError: The parameters are another version by now, or belong to another learner.
        """
        return await asyncio.to_thread(self._fetch, available)

    def close(self) -> None:
        """Release the memory; tensors that were returned stay valid."""
        self._open = None

    def _fetch(self, available: WeightsAvailable) -> SharedTensors:
        if self._open is None or self._open[0] != available.location:
            segment, num_bytes = Segment(self._run_folder, available.location, SHARED_MAGIC), available.manifest.total_bytes
            inside = segment.whole[HEADER_BYTES:]
            if self._device.type == "cuda":
                inside = open_ticket(inside, self._device, num_bytes, {})
            self._open = available.location, segment.header, inside[:num_bytes]
        _, header, flat = self._open

        def check() -> None:
            if int(header[_VERSION]) != available.version:
                made = f"the learner made version {int(header[_VERSION])} of version {available.version} while that was in use"
                raise VersionUnavailableError(f"{made}: phases did not keep training and sampling apart")

        check()
        refuse_damaged(available, _fingerprints(flat, available.manifest))
        return SharedTensors(available.manifest, flat, check=check)


def _fingerprints(flat: torch.Tensor, manifest: WeightsManifest) -> bytes:
    """Return the buckets' fingerprints, computed in place."""
    if flat.device.type == "cuda":
        return device_fingerprints(flat, bucket_ends(manifest), flat.device)
    return fingerprints_of(flat.numpy().data, bucket_ends(manifest))
