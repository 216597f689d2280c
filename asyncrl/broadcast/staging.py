"""A generator's staging buffer, and how it comes to hold an announced version: fetched whole, or brought there by deltas.

Invariants:
- What the buffer is said to hold has the announced fingerprints; from before the first byte is written until they are compared it
  is said to hold nothing.
- A delta is applied only if its own fingerprint is right, and only on the very bytes it was made from.
- Whatever goes wrong with deltas is answered by fetching the whole, at once; where what went wrong lies between the whole version
  and the announced one (`files`), only that is tried again, from the version before it.
- Where the system has memory files (Linux), the buffer is one: another process of this user can map it by `path`, nothing is in
  any folder, and nothing is left when this process ends.

Called by subscriber.py, on its thread.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Iterable

import torch
import xxhash

from asyncrl.broadcast.delta import apply_delta, blob_fingerprint
from asyncrl.broadcast.delta_chain import FetchPlan, HeldVersion, plan_fetch, plan_whole
from asyncrl.broadcast.fingerprint import damaged_buckets, version_fingerprint
from asyncrl.broadcast.medium import MediumReader, VersionUnavailableError
from asyncrl.errors import BroadcastError
from asyncrl.models.copy_hash import DIGEST_BYTES
from asyncrl.models.layout import bucket_ends
from asyncrl.schema.weights import Delta, WeightsAvailable, WeightsManifest

_LOG = logging.getLogger(__name__)


class Staging:
    """One version's bytes in the memory of this process."""

    def __init__(self, reader: MediumReader) -> None:
        self._reader = reader
        self._flat: torch.Tensor | None = None
        self._file = -1
        self._held: HeldVersion | None = None

    def receive(self, available: WeightsAvailable, cancelled: threading.Event) -> torch.Tensor:
        """Fetch what is missing of the version and verify it; blocking.

        Args:
            available: What was announced.
            cancelled: Set, the fetch gives up.

        Returns:
            uint8 [total_bytes], valid until the next call.

        Raises:
            VersionUnavailableError: The version is gone, or the fetch was cancelled.
            BroadcastError: It arrived damaged or could not be read.
        """
        flat = self._buffer_for(available.manifest.total_bytes)
        plan = plan_fetch(available, self._held)
        try:
            self._carry_out(plan, available, cancelled)
        except BroadcastError as error:
            whole = plan_whole(available)
            if plan.whole is not None or cancelled.is_set() or self._is_at_least(whole):
                raise
            _LOG.warning("version %d is fetched whole, its deltas were of no use: %s", available.version, error)
            self._carry_out(whole, available, cancelled)
        return flat

    @property
    def path(self) -> str:
        """Where other processes of this machine can map the buffer, until the next call or `close`; empty: nowhere."""
        return f"/proc/{os.getpid()}/fd/{self._file}" if self._file >= 0 else ""

    def close(self) -> None:
        """Let go of the memory; tensors in it stay valid, `path` does not. Safe to repeat."""
        if self._file >= 0:
            os.close(self._file)
        self._flat, self._file, self._held = None, -1, None

    def _carry_out(self, plan: FetchPlan, available: WeightsAvailable, cancelled: threading.Event) -> None:
        """Fetch, apply, compare."""
        if plan.whole is not None:
            self._fetch_whole(plan.whole, cancelled)
        assert self._held is not None
        before = self._held.bucket_fingerprints
        touched: set[int] = set()
        for delta in plan.deltas:
            try:
                touched |= self._apply(delta, available, cancelled)
            except BroadcastError:
                self._stay_at_base(delta, before, touched, available.manifest)
                raise
        found = _rehashed(before, touched, available.manifest, self._bytes())
        refuse_damaged(available, found)
        self._held = _held(available)

    def _fetch_whole(self, whole: WeightsAvailable, cancelled: threading.Event) -> None:
        self._held = None
        refuse_damaged(whole, self._reader.fetch(whole, self._bytes(), cancelled))
        self._held = _held(whole)

    def _apply(self, delta: Delta, available: WeightsAvailable, cancelled: threading.Event) -> set[int]:
        """Fetch the delta and apply it; return the buckets it touched."""
        if cancelled.is_set():
            raise VersionUnavailableError(f"the fetch of version {available.version} was cancelled")
        blob = self._reader.fetch_blob(available, delta.name, delta.num_bytes, cancelled)
        if blob_fingerprint(blob) != delta.fingerprint:
            raise BroadcastError(f"the delta to version {delta.version} arrived damaged: its fingerprint differs")
        self._held = None
        return apply_delta(available.manifest, blob, self._bytes())

    def _stay_at_base(self, delta: Delta, before: bytes, touched: set[int], manifest: WeightsManifest) -> None:
        """Hold what was reached before `delta` failed, if that is it: it need not be fetched again."""
        found = _rehashed(before, touched, manifest, self._bytes())
        if version_fingerprint(found) == delta.base_fingerprint:
            self._held = HeldVersion(delta.base_version, delta.base_fingerprint, found, manifest.total_bytes)

    def _is_at_least(self, whole: FetchPlan) -> bool:
        """Return whether what is held is on the way from the whole version already: fetching that would lead here again."""
        assert whole.whole is not None
        return self._held is not None and any(delta.base_fingerprint == self._held.fingerprint for delta in whole.deltas)

    def _bytes(self) -> memoryview:
        assert self._flat is not None
        return memoryview(self._flat.numpy().data)

    def _buffer_for(self, total_bytes: int) -> torch.Tensor:
        if self._flat is None or self._flat.numel() != total_bytes:
            self.close()
            self._flat, self._file = _shareable_memory(total_bytes)
        return self._flat


def _shareable_memory(num_bytes: int) -> tuple[torch.Tensor, int]:
    """Return zeroed memory and the handle of its file; -1: it has none."""
    if not hasattr(os, "memfd_create"):
        return torch.zeros(num_bytes, dtype=torch.uint8), -1
    file = os.memfd_create("asyncrl-staging")
    try:
        os.ftruncate(file, num_bytes)
        return torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8), file
    except BaseException:
        os.close(file)
        raise


def refuse_damaged(available: WeightsAvailable, found: bytes) -> None:
    """Compare bucket fingerprints with the announced ones.

    Raises:
        BroadcastError: Some differ.
    """
    damaged = damaged_buckets(found, available.bucket_fingerprints)
    if damaged:
        raise BroadcastError(
            f"version {available.version} arrived damaged: the fingerprints of {len(damaged)} of its "
            f"{len(bucket_ends(available.manifest))} buckets differ, the first is bucket {damaged[0]}"
        )


def _held(available: WeightsAvailable) -> HeldVersion:
    return HeldVersion(available.version, available.fingerprint, available.bucket_fingerprints, available.manifest.total_bytes)


def _rehashed(bucket_fingerprints: bytes, touched: Iterable[int], manifest: WeightsManifest, flat: memoryview) -> bytes:
    """Return the fingerprints with those of the touched buckets computed anew."""
    found = bytearray(bucket_fingerprints)
    ends = bucket_ends(manifest)
    for bucket in touched:
        start = ends[bucket - 1] if bucket else 0
        digest = xxhash.xxh3_64(flat[start : ends[bucket]]).intdigest()
        found[bucket * DIGEST_BYTES : (bucket + 1) * DIGEST_BYTES] = digest.to_bytes(DIGEST_BYTES, "little")
    return bytes(found)
