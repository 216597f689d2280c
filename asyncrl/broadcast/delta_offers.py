"""The learner's side of deltas: what one version becomes, the bytes of the version before, and the blobs that can be fetched.

Owns a copy of the newest version that can be fetched (as many bytes as a version, in host memory), from which the next delta is
made and which is then brought up to date in place.

Invariants:
- The copy, the chain and what subscribers can fetch are of one version: they change together, after everything that can fail.
- A delta that is too large, or that the medium refuses, is no failure: the version goes whole.

Called by publisher.py, on its thread.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.broadcast.delta import apply_delta, blob_fingerprint, encode_delta
from asyncrl.broadcast.delta_chain import DeltaChain, WholeVersion
from asyncrl.errors import BroadcastError
from asyncrl.schema.weights import Delta, WeightsManifest

if TYPE_CHECKING:
    from asyncrl.broadcast.medium import MediumWriter
    from asyncrl.broadcast.state import Commit
    from asyncrl.config.broadcast import DeltaConfig

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Offer:
    """How a version can be fetched."""

    whole: WholeVersion
    deltas: tuple[Delta, ...] = ()


def offer_whole(writer: MediumWriter, commit: Commit, fingerprint: str, bucket_fingerprints: bytes) -> Offer:
    """Make the version fetchable whole; raises as `MediumWriter.commit`."""
    location = writer.commit(commit.slot, commit.version, fingerprint)
    return Offer(WholeVersion(commit.version, location, bucket_fingerprints))


class DeltaOffers:
    """Makes each version fetchable as a delta, whole, or both.

    Args:
        config: How deltas are made.
        writer: Of the medium, open.
        manifest: The layout.
    """

    def __init__(self, config: DeltaConfig, writer: MediumWriter, manifest: WeightsManifest) -> None:
        self._config = config
        self._writer = writer
        self._manifest = manifest
        self._chain = DeltaChain(manifest.total_bytes, config.full_every)
        self._warned = False
        self._newest = np.empty(manifest.total_bytes, np.uint8)

    def offer(self, commit: Commit, flat: memoryview, fingerprint: str, bucket_fingerprints: bytes) -> Offer:
        """Make the version fetchable.

        Args:
            commit: Its number and slot.
            flat: Its bytes; nobody changes them meanwhile.
            fingerprint: Of the version.
            bucket_fingerprints: Of its buckets.

        Raises:
            BroadcastError: It could not be; everything is as before.
        """
        blob = self._encode(flat)
        whole: WholeVersion | None = None
        if self._writer.keeps_slots or self._chain.is_whole_due(None if blob is None else len(blob)):
            whole = offer_whole(self._writer, commit, fingerprint, bucket_fingerprints).whole
        delta = self._put(commit.version, blob)
        if delta is None and whole is None:
            whole = offer_whole(self._writer, commit, fingerprint, bucket_fingerprints).whole
        self._keep(flat, blob if delta else None)
        for dropped in self._chain.advance(fingerprint, whole, delta):
            self._writer.drop_blob(dropped.name)
        assert self._chain.whole is not None
        return Offer(self._chain.whole, self._chain.deltas)

    def _encode(self, flat: memoryview) -> bytes | None:
        """Return the delta from the newest version; None where there is none, or a large one."""
        if self._chain.head is None:
            return None
        max_bytes = int(self._config.max_share * self._manifest.total_bytes)
        blob = encode_delta(self._manifest, self._newest.data, flat, self._config.compression_level, max_bytes)
        if blob is None and not self._warned:
            self._warned = True
            _LOG.warning(
                "so much changes from version to version that a delta has more than %d bytes: such versions go whole. "
                'Set broadcast.dtype = "bfloat16", or leave broadcast.delta out',
                max_bytes,
            )
        return blob

    def _put(self, version: int, blob: bytes | None) -> Delta | None:
        """Make the delta fetchable; None where there is none or the medium refuses it."""
        if blob is None or self._chain.head is None:
            return None
        base_version, base_fingerprint = self._chain.head
        fingerprint = blob_fingerprint(blob)
        name = f"delta-{version:08d}-{fingerprint[:16]}"
        try:
            self._writer.put_blob(name, blob)
        except BroadcastError as error:
            _LOG.warning("the delta to version %d is not offered, the version goes whole: %s", version, error)
            return None
        return Delta(version, base_version, base_fingerprint, name, len(blob), fingerprint)

    def _keep(self, flat: memoryview, blob: bytes | None) -> None:
        """Bring the copy up to the version."""
        if blob is None:
            np.copyto(self._newest, np.frombuffer(flat, np.uint8))
        else:
            apply_delta(self._manifest, blob, self._newest.data)
