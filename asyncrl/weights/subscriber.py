"""A generator's end of weight sync: it receives a version and verifies it before anything reads it.

A `Subscriber` owns the medium's reader, one staging buffer as large as a version, and one fetching thread.
`open_source` also opens the generator's end of media without one.

Invariants:
- Tensors are returned only after all bytes have arrived and match the announced fingerprints; until then users of the old version
  are not disturbed. If the medium lends the learner's own slot, its lease proves the version (`MappedTensors.check`), and
  fingerprints are compared only if the announcement has any.
- The tensors are views of the staging buffer or of the learner's slot. They are valid until released, or until the next `fetch`:
  that call means that the engine no longer uses them.
- The staging buffer counts as holding a version from the moment its fingerprints were compared until the first byte of another
  version is written.
- With deltas the tensors are always in the staging buffer: the next version is made from them, so nothing else may write to them.
  A delta is applied only if its own fingerprint is right, and only to exactly the bytes it was made from. After any error with
  deltas the complete version is fetched, once.
- On systems with memory files (Linux) the buffer is one: another process of the same user can map it by its path, it is in no
  folder, and nothing is left when this process ends.
- A failed fetch is not repeated here: the only retry loop is the generator's.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from asyncrl.config.broadcast import BroadcastConfig, SharedStorageMedium
from asyncrl.config.run import RunConfig
from asyncrl.errors import BroadcastError
from asyncrl.models.layout import bucket_ends, check_manifest
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.weights.buckets import fingerprints_of, refuse_damaged
from asyncrl.weights.delta import FetchPlan, apply_delta, blob_fingerprint, plan_fetch, plan_whole
from asyncrl.weights.media.base import MediumReader, VersionUnavailableError
from asyncrl.weights.media.learner_memory import HybridSubscriber
from asyncrl.weights.media.registry import open_reader, receiver_of
from asyncrl.weights.media.shared_memory import SharedMemoryReader
from asyncrl.weights.tensors import DeferredTensors, MappedTensors

_LOG = logging.getLogger(__name__)


class Subscriber:
    """Fetches versions for one engine.

    Args:
        config: The medium; the same as the publisher's.
        run_folder: The run's folder; its keys (RUN/keys) are used, if there are any.

    Example:
        >>> tensors = await subscriber.fetch(available)  # doctest: +SKIP
        >>> await engine.load_weights(available.version, tensors, "keep")  # doctest: +SKIP
        >>> tensors.release()  # doctest: +SKIP
    """

    def __init__(self, config: BroadcastConfig, run_folder: Path) -> None:
        self._medium = config.medium.kind
        self._reader = open_reader(config.medium, run_folder)
        self._staging = Staging(self._reader)
        self._lender = self._reader if isinstance(self._reader, SharedMemoryReader) and config.delta is None else None
        self._handed_out: MappedTensors | None = None
        self._cancelled = threading.Event()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="asyncrl-subscriber")

    async def fetch(self, available: WeightsAvailable) -> MappedTensors:
        """Fetch and verify this version; cancelling it stops the fetch, and the next one queues behind it.

        Call it only when the engine no longer uses the tensors returned before.

        Returns:
            CPU tensors by name, as views of the received bytes; tied tensors under one name.

        Raises:
            VersionUnavailableError: The version is gone: wait for another announcement.
            BroadcastError: It arrived damaged, could not be read, is from another medium, or its manifest contradicts itself.
        """
        if available.medium != self._medium:
            raise BroadcastError(f"version {available.version} is on {available.medium!r}; this run uses {self._medium!r}")
        check_manifest(available.manifest)
        if self._handed_out is not None:
            self._handed_out.release()
        cancelled = self._cancelled = threading.Event()
        received = self._executor.submit(self._receive, available, cancelled)
        try:
            self._handed_out = await asyncio.wrap_future(received)
        except asyncio.CancelledError:
            cancelled.set()
            received.add_done_callback(_release_unused)
            raise
        return self._handed_out

    def close(self) -> None:
        """Stop a running fetch and release everything; tensors returned before can still be read, but may be overwritten."""
        self._cancelled.set()
        self._executor.shutdown(wait=True)
        if self._handed_out is not None:
            self._handed_out.release()
        self._staging.close()
        self._reader.close()

    def _receive(self, available: WeightsAvailable, cancelled: threading.Event) -> MappedTensors:
        """Return the tensors in the learner's slot, if the medium lends it, or else in the staging buffer."""
        if self._lender is None:
            return self._staging.receive(available, cancelled)
        lease = self._lender.lease(available)
        if available.bucket_fingerprints:
            try:
                found = fingerprints_of(lease.flat.numpy().data, bucket_ends(available.manifest))
                lease.check()
                refuse_damaged(available, found)
            except BroadcastError:
                lease.release()
                raise
        return lease


class Deferral:
    """Fetches nothing: the process that holds the model receives the bytes itself."""

    def __init__(self, receiver: str, arguments: bytes) -> None:
        self._receiver, self._arguments = receiver, arguments

    async def fetch(self, available: WeightsAvailable) -> DeferredTensors:
        """Return how the model's process receives the version."""
        return DeferredTensors(available, self._receiver, self._arguments)

    def close(self) -> None:
        """Do nothing."""


def open_source(config: RunConfig, run_folder: Path) -> Subscriber | HybridSubscriber | Deferral:
    """Return a generator's end of the configured medium: each has `fetch` and `close`."""
    medium = config.broadcast.medium
    if isinstance(medium, SharedStorageMedium):
        return HybridSubscriber(run_folder, getattr(config.generate.engine, "device", "cpu"))
    receiver = receiver_of(medium, run_folder)
    return Subscriber(config.broadcast, run_folder) if receiver is None else Deferral(*receiver)


def _release_unused(received: Future[MappedTensors]) -> None:
    """Release a version whose fetch was cancelled meanwhile; otherwise its lease would be held for ever."""
    if not received.cancelled() and received.exception() is None:
        received.result().release()


class Staging:
    """One version's bytes in this process's memory, fetched complete or updated by deltas."""

    def __init__(self, reader: MediumReader) -> None:
        self._reader = reader
        self._flat: torch.Tensor | None = None
        self._file = -1
        self._held: WeightsAvailable | None = None
        """The announcement of the verified version in the buffer."""

    def receive(self, available: WeightsAvailable, cancelled: threading.Event) -> MappedTensors:
        """Fetch the missing parts of the version and verify it; blocking.

        Args:
            available: The announcement.
            cancelled: When set, the fetch stops.

        Returns:
            The version's tensors, valid until the next call; their `path`, if there is one, until the next call or `close`.

        Raises:
            VersionUnavailableError: The version is gone, or the fetch was cancelled.
            BroadcastError: It arrived damaged or could not be read.
        """
        total_bytes = available.manifest.total_bytes
        if self._flat is None or self._flat.numel() != total_bytes:
            self.close()
            if hasattr(os, "memfd_create"):
                self._file = os.memfd_create("asyncrl-staging")
                os.ftruncate(self._file, total_bytes)
                self._flat = torch.frombuffer(mmap.mmap(self._file, total_bytes), dtype=torch.uint8)
            else:
                self._flat = torch.zeros(total_bytes, dtype=torch.uint8)
        flat = memoryview(self._flat.numpy().data)
        plan = plan_fetch(available, self._held)
        try:
            self._carry_out(plan, available, flat, cancelled)
        except BroadcastError as error:
            if plan.whole is not None or cancelled.is_set():
                raise
            _LOG.warning("version %d is fetched complete, because its deltas failed: %s", available.version, error)
            self._carry_out(plan_whole(available), available, flat, cancelled)
        return MappedTensors(available.manifest, self._flat, f"/proc/{os.getpid()}/fd/{self._file}" if self._file >= 0 else "")

    def close(self) -> None:
        """Release the memory; tensors in it stay valid. Safe to repeat."""
        if self._file >= 0:
            os.close(self._file)
        self._flat, self._file, self._held = None, -1, None

    def _carry_out(self, plan: FetchPlan, available: WeightsAvailable, flat: memoryview, cancelled: threading.Event) -> None:
        """Fetch the parts, apply deltas, and compare fingerprints."""
        manifest = available.manifest
        if plan.whole is not None:
            self._held = None
            refuse_damaged(plan.whole, self._reader.fetch(plan.whole, flat, cancelled))
            self._held = plan.whole
        assert self._held is not None
        digests, self._held, touched = np.frombuffer(self._held.bucket_fingerprints, "<u8").copy(), None, set[int]()
        for delta in plan.deltas:
            if cancelled.is_set():
                raise VersionUnavailableError(f"the fetch of version {available.version} was cancelled")
            blob = self._reader.fetch_blob(available, delta.name, delta.num_bytes, cancelled)
            if blob_fingerprint(blob) != delta.fingerprint:
                raise BroadcastError(f"the delta to version {delta.version} arrived damaged: its fingerprint differs")
            touched |= apply_delta(manifest, blob, flat)
        changed = sorted(touched)
        digests[changed] = np.frombuffer(fingerprints_of(flat, bucket_ends(manifest), buckets=changed), "<u8")
        refuse_damaged(available, digests.tobytes())
        self._held = available
