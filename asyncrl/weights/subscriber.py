"""A generator's end of weight sync: where a version arrives, and the check before anybody reads it.

Owns the medium's reader, one staging buffer as large as a version, and one fetching thread.

Invariants:
- Tensors are handed out only once all bytes are here and have the announced fingerprints; until then whoever holds the old
  version is not disturbed. Where the medium lends the learner's own slot, its lease proves the version (`MappedTensors.check`),
  and fingerprints are compared only where the announcement has any.
- The tensors are views of the staging buffer or of the learner's slot: valid until released, or until the next `fetch`, which
  says that the engine is done with them.
- The staging buffer is said to hold a version from when its fingerprints were compared until the first byte of another is
  written.
- With deltas the tensors always lie in the staging buffer: the next version is made from them, so nobody may write to them. A
  delta is applied only if its own fingerprint is right, and only to the very bytes it was made from. Whatever goes wrong with
  deltas is answered by fetching the whole at once, once.
- Where the system has memory files (Linux), the buffer is one: another process of this user can map it by its path, nothing is in
  any folder, and nothing is left when this process ends.
- A fetch that failed is repeated by the caller, or not: there is one retry loop, the generator's.
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

from asyncrl.config.broadcast import BroadcastConfig
from asyncrl.errors import BroadcastError
from asyncrl.models.layout import bucket_ends, check_manifest
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.weights.buckets import fingerprints_of, refuse_damaged
from asyncrl.weights.delta import FetchPlan, apply_delta, blob_fingerprint, plan_fetch, plan_whole
from asyncrl.weights.media.base import MediumReader, VersionUnavailableError
from asyncrl.weights.media.registry import open_reader
from asyncrl.weights.media.shared_memory import SharedMemoryReader
from asyncrl.weights.tensors import MappedTensors

_LOG = logging.getLogger(__name__)


class Subscriber:
    """Fetches versions for one engine.

    Args:
        config: The medium; the same as the publisher's.
        run_folder: Of this run; its keys (RUN/keys) are used, if it has any.

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

        Calling it says that the engine is done with the tensors handed out before.

        Returns:
            Name to CPU tensor, views of where the bytes lie; tied tensors under one name.

        Raises:
            VersionUnavailableError: The version is gone: only another announcement helps.
            BroadcastError: It arrived damaged or could not be read, is of another medium, or its manifest contradicts itself.
        """
        if available.medium != self._medium:
            raise BroadcastError(f"version {available.version} lies in {available.medium!r}, this run uses {self._medium!r}")
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
        """Stop a fetch under way and release everything; tensors handed out can still be read, but are no longer spared."""
        self._cancelled.set()
        self._executor.shutdown(wait=True)
        if self._handed_out is not None:
            self._handed_out.release()
        self._staging.close()
        self._reader.close()

    def _receive(self, available: WeightsAvailable, cancelled: threading.Event) -> MappedTensors:
        """Return the bytes where they lie, if they are lent, or else in the staging buffer."""
        if self._lender is None:
            return self._staging.receive(available, cancelled)
        lease = self._lender.lease(available)
        try:
            announced = available.bucket_fingerprints
            found = fingerprints_of(lease.flat.numpy().data, bucket_ends(available.manifest)) if announced else b""
            lease.check()
            refuse_damaged(available, found)
        except BroadcastError:
            lease.release()
            raise
        return lease


def _release_unused(received: Future[MappedTensors]) -> None:
    """Let go of a version that arrived although nobody waits for it any more: a lease would be held for good."""
    if not received.cancelled() and received.exception() is None:
        received.result().release()


class Staging:
    """One version's bytes in the memory of this process, fetched whole or brought there by deltas."""

    def __init__(self, reader: MediumReader) -> None:
        self._reader = reader
        self._flat: torch.Tensor | None = None
        self._file = -1
        self._held: WeightsAvailable | None = None
        """As it was announced; verified."""

    def receive(self, available: WeightsAvailable, cancelled: threading.Event) -> MappedTensors:
        """Fetch what is missing of the version and verify it; blocking.

        Args:
            available: What was announced.
            cancelled: Set, the fetch gives up.

        Returns:
            Its tensors, valid until the next call; their `path`, where there is one, until the next call or `close`.

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
            _LOG.warning("version %d is fetched whole, its deltas were of no use: %s", available.version, error)
            self._carry_out(plan_whole(available), available, flat, cancelled)
        return MappedTensors(available.manifest, self._flat, f"/proc/{os.getpid()}/fd/{self._file}" if self._file >= 0 else "")

    def close(self) -> None:
        """Let go of the memory; tensors in it stay valid. Safe to repeat."""
        if self._file >= 0:
            os.close(self._file)
        self._flat, self._file, self._held = None, -1, None

    def _carry_out(self, plan: FetchPlan, available: WeightsAvailable, flat: memoryview, cancelled: threading.Event) -> None:
        """Fetch, apply, compare."""
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
