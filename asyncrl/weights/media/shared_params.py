"""Medium `shared_storage`: the engine reads the learner's own parameters, where they lie; publishing a version copies nothing.

On a CPU the learner's parameters live in one mapped file, in the flat layout of a version (models/layout.py): `param.data` become
views of it at the first publish, the parameter objects and the optimizer's state stay what they are. On a GPU they live in one
flat tensor, and the file has the ticket that opens it in the engine's process (cuda_ipc.py). The file (in /dev/shm, named and
removed as in shm_segments.py) begins with a page of int64: magic, bytes, version.

Invariants:
- The bytes are those of the version in the header from one `publish` to the next step. While the learner steps nothing may
  sample: phases see to that (placement hybrid), and `SharedTensors.check` says afterwards whether they did.
- A version that is fetched has the announced fingerprints, computed where it lies.
- An engine's process cannot write to the learner's weights on a CPU: it maps the file privately, and reads through.

`HybridPublisher` and `HybridSubscriber` stand in for Publisher and Subscriber. Not run on a GPU by its authors.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.clock import Clock
from asyncrl.config.broadcast import BroadcastConfig
from asyncrl.errors import BroadcastError
from asyncrl.models.layout import bucket_ends, check_manifest, check_tensors, make_manifest, view_tensors
from asyncrl.schema.weights import Probe, WeightsAvailable, WeightsManifest
from asyncrl.weights.buckets import device_fingerprints, device_of, fingerprints_of, refuse_damaged, version_fingerprint
from asyncrl.weights.media.base import VersionUnavailableError
from asyncrl.weights.media.cuda_ipc import TICKET_BYTES, open_ticket, write_ticket
from asyncrl.weights.media.shared_memory import Segment
from asyncrl.weights.shm_segments import disown, make_segment, remove_leftover_segments
from asyncrl.weights.tensors import SharedTensors

KIND = "shared_storage"
HEADER_BYTES = mmap.PAGESIZE
MAGIC = 0x4452_42594841  # "AHYBRD" read as little-endian
_MAGIC, _NUM_BYTES, _VERSION = 0, 1, 2


class HybridPublisher:
    """The learner's end; owns the file, and on a GPU the flat tensor.

    Example:
        >>> publisher = HybridPublisher(config.broadcast, run_folder, on_available, clock)  # doctest: +SKIP
        >>> publisher.publish(0, dict(model.named_parameters()))  # doctest: +SKIP
    """

    def __init__(
        self, config: BroadcastConfig, run_folder: Path, on_available: Callable[[WeightsAvailable], None], clock: Clock
    ) -> None:
        """Note where; the file is made at the first publish."""
        self._config, self._run_folder, self._on_available, self._clock = config, run_folder, on_available, clock
        self._path: Path | None = None
        self._header: NDArray[np.int64] = np.zeros(0, np.int64)
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._views: dict[str, torch.Tensor] = {}
        self._manifest: WeightsManifest | None = None

    def publish(self, version: int, named_tensors: Mapping[str, torch.Tensor], probe: Probe | None = None) -> float:
        """Say that the parameters are this version now; the first time, move them to where the engine can read them.

        Args:
            version: Greater than any before.
            named_tensors: The parameters themselves, all on one device; the same ones every time.
            probe: For engines to compare with.

        Returns:
            Milliseconds: of a fingerprint where they lie.

        Raises:
            BroadcastError: There is no room, or a parameter no longer lies where the engine reads it.
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
        self._on_available(WeightsAvailable(version, KIND, path, manifest, name, now, blocked_ms, probe, digests))
        return blocked_ms

    def close(self) -> None:
        """Unlink the file; the parameters stay where they are. Safe to repeat."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            disown(self._path)
        self._path = None

    def _move_in(self, named_tensors: Mapping[str, torch.Tensor]) -> WeightsManifest:
        """Make the place and let every parameter be a view of it."""
        manifest = make_manifest(named_tensors, "model", self._config.bucket_bytes)
        left_out = [name for name in named_tensors if name not in {entry.name for entry in manifest.entries}]
        if left_out:
            raise BroadcastError(f"{left_out[0]} shares its memory with another parameter object; {KIND} cannot move both")
        remove_leftover_segments(self._run_folder)
        device, num_bytes = device_of(named_tensors), manifest.total_bytes
        on_gpu = device.type == "cuda"
        self._path, segment = make_segment(self._run_folder, HEADER_BYTES + (TICKET_BYTES if on_gpu else num_bytes))
        self._header = np.frombuffer(segment, np.int64, count=HEADER_BYTES // 8)
        self._header[[_NUM_BYTES, _VERSION, _MAGIC]] = num_bytes, -1, MAGIC
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
    """A generator's end: opens the learner's parameters, once for each learner."""

    def __init__(self, run_folder: Path, device: str) -> None:
        """Note where: `device` is the engine's."""
        self._run_folder = run_folder
        self._device = torch.device(device)
        self._open: tuple[str, NDArray[np.int64], torch.Tensor] | None = None

    async def fetch(self, available: WeightsAvailable) -> SharedTensors:
        """Return the learner's own parameters, verified to be this version.

        Raises:
            BroadcastError: They are another version by now, or of another learner.
        """
        return await asyncio.to_thread(self._fetch, available)

    def close(self) -> None:
        """Let go; tensors that were handed out stay valid."""
        self._open = None

    def _fetch(self, available: WeightsAvailable) -> SharedTensors:
        check_manifest(available.manifest)
        if self._open is None or self._open[0] != available.location:
            segment, num_bytes = Segment(self._run_folder, available.location, MAGIC), available.manifest.total_bytes
            if segment.header[_NUM_BYTES] != num_bytes:
                raise VersionUnavailableError(f"{available.location} does not hold {num_bytes} bytes of parameters")
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
    """Return the buckets' fingerprints where they lie."""
    if flat.device.type == "cuda":
        return device_fingerprints(flat, bucket_ends(manifest), flat.device)
    return fingerprints_of(flat.numpy().data, bucket_ends(manifest))
