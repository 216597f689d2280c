"""Media `gloo` and `nccl`, a generator's end: a reader into host memory, and a receiver in the process that holds the model.

`gloo` fills the subscriber's staging buffer and hashes what arrived, as every medium does. `nccl` ends on the model's own device,
so nothing is staged: each bucket is verified where it arrived and its tensors are yielded at once.

Called by media.py (reader) and, by name, by whoever holds a DeferredTensors (`open_receiver`).
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import torch

from asyncrl.broadcast.collective_group import Backend, check_nccl
from asyncrl.broadcast.collective_member import Member
from asyncrl.broadcast.device import device_fingerprint, refuse_host_memory
from asyncrl.broadcast.fingerprint import BucketHasher
from asyncrl.broadcast.zeromq_keys import CurveKeys, keys_of_run
from asyncrl.config.broadcast import GlooMedium
from asyncrl.errors import BroadcastError
from asyncrl.models.copy_hash import DIGEST_BYTES
from asyncrl.models.layout import DTYPE_OF_NAME, bucket_ends, check_manifest
from asyncrl.schema.weights import WeightsAvailable, WeightsManifest


class CollectiveReader:
    """A generator's end, into host memory."""

    def __init__(self, config: GlooMedium, keys: CurveKeys | None = None) -> None:
        self._member = Member("gloo", config.timeout_s, keys)

    def lease(self, available: WeightsAvailable) -> None:
        """Return none: the bytes are elsewhere."""

    def fetch(self, available: WeightsAvailable, into: memoryview, cancelled: threading.Event) -> bytes:
        """Take part in a broadcast; see MediumReader."""
        ends = bucket_ends(available.manifest)
        hasher = BucketHasher(ends)
        for index, bucket in self._member.buckets(available, torch.device("cpu"), cancelled, lambda _index, _bucket: True):
            start = ends[index - 1] if index else 0
            hasher.update(bucket.numpy().data, into[start : ends[index]])
        return hasher.digests()

    def fetch_blob(self, available: WeightsAvailable, name: str, num_bytes: int, cancelled: threading.Event) -> bytes:
        """Ask the learner for a delta; see MediumReader."""
        return self._member.blob(available.location, name, num_bytes, cancelled)

    def close(self) -> None:
        """Leave; the others go on."""
        self._member.close()


class ReceiverArguments(msgspec.Struct, frozen=True):
    """What `open_receiver` is told, as JSON."""

    run_folder: str
    timeout_s: float
    backend: Backend = "nccl"


class CollectiveReceiver:
    """A Receiver (models/deferred.py): buckets arrive on the model's device and are verified there."""

    def __init__(self, backend: Backend, timeout_s: float, keys: CurveKeys | None = None) -> None:
        self._backend = backend
        self._member = Member(backend, timeout_s, keys)
        self._in_use = threading.Lock()
        """Held while the member is: `close` may be called from another thread."""
        self._closing = threading.Event()

    def fetch(self, available: WeightsAvailable, device: torch.device) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Take part in a broadcast; see Receiver."""
        if self._backend == "nccl":
            refuse_host_memory("nccl", device)
        with closing(self._tensors(available, device)) as tensors:
            while (arrived := self._next_of(tensors)) is not None:
                yield arrived

    def close(self) -> None:
        """Leave; the others go on."""
        self._closing.set()
        with self._in_use:
            self._member.close()

    def _next_of(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> tuple[str, torch.Tensor] | None:
        with self._in_use:
            return next(tensors, None)

    def _tensors(self, available: WeightsAvailable, device: torch.device) -> Generator[tuple[str, torch.Tensor], None, None]:
        check_manifest(available.manifest)
        expected = _digests(available)

        def accept(index: int, bucket: torch.Tensor) -> bool:
            return device_fingerprint(bucket) == expected[index]

        by_bucket = list(tensors_by_bucket(available.manifest))
        for index, bucket in self._member.buckets(available, device, self._closing, accept):
            yield from by_bucket[index].views(bucket)


def open_receiver(arguments: bytes) -> CollectiveReceiver:
    """Make the receiving end of `nccl` in the process that holds the model; see models/deferred.py.

    Raises:
        ConfigError: NCCL cannot be used here.
    """
    told = msgspec.json.decode(arguments, type=ReceiverArguments)
    if told.backend == "nccl":
        check_nccl()
    return CollectiveReceiver(told.backend, told.timeout_s, keys_of_run(Path(told.run_folder)))


class BucketTensors:
    """The tensors of one bucket."""

    def __init__(self, manifest: WeightsManifest, start: int, end: int) -> None:
        self._start = start
        is_last = end == manifest.total_bytes
        self._entries = [entry for entry in manifest.entries if start <= entry.offset < end or (is_last and entry.offset == end)]

    def views(self, bucket: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and view of each, in the order of the layout."""
        for entry in self._entries:
            first = entry.offset - self._start
            flat = bucket[first : first + entry.num_bytes]
            yield entry.name, flat.view(DTYPE_OF_NAME[entry.dtype]).view(entry.shape)


def tensors_by_bucket(manifest: WeightsManifest) -> Iterator[BucketTensors]:
    """Yield what lies in each bucket, every entry in exactly one."""
    ends = bucket_ends(manifest)
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        yield BucketTensors(manifest, start, end)


def _digests(available: WeightsAvailable) -> list[bytes]:
    announced = available.bucket_fingerprints
    digests = [announced[i : i + DIGEST_BYTES] for i in range(0, len(announced), DIGEST_BYTES)]
    if len(digests) != len(bucket_ends(available.manifest)):
        raise BroadcastError(f"version {available.version} was announced with {len(digests)} fingerprints for its buckets")
    return digests
