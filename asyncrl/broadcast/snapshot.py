"""The snapshot: the learner's tensors copied into a slot, and fingerprinted on the way where that costs least.

Buckets side by side, each by one thread, piece after piece: a piece is hashed while it is in that core's cache, so that memory is
gone through once and not twice. Tensors divided over ranks are gathered one at a time, in order, by the caller's thread;
those are hashed behind the copy (`fingerprints_behind`), as is what is checked on a device.

Called by publisher.py, on the learner's thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash
from torch.distributed.tensor import DTensor

from asyncrl.broadcast.fingerprint import DIGEST_BYTES, CopyProgress
from asyncrl.models.copying import COPY_THREADS, are_same_bytes, bytes_of, copy_tensor
from asyncrl.models.layout import bucket_ends, copy_out, pieces
from asyncrl.schema.weights import TensorEntry, WeightsManifest

_GAP = bytes(64)


def take_snapshot(
    tensors: Mapping[str, torch.Tensor],
    manifest: WeightsManifest,
    views: Mapping[str, torch.Tensor],
    progress: CopyProgress,
    *,
    hashed: bool = True,
) -> None:
    """Copy every tensor into its view, casting on the way.

    Args:
        tensors: Those that `layout.check_tensors` accepted.
        manifest: The layout.
        views: What `view_tensors` returned for the slot.
        progress: Told what is final, and the fingerprints where they were made here.
        hashed: False where the buckets' fingerprints are not xxh3 of the slot's bytes.
    """
    if not hashed or any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        copy_out(tensors, manifest, views, progress.advance)
        progress.finish(manifest.total_bytes, b"")
        return

    def digest(entries: Sequence[TensorEntry], end: int) -> bytes:
        return _copied_bucket(entries, end, tensors, views)

    ends = bucket_ends(manifest)
    with ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="asyncrl-snapshot") as pool:
        fingerprints = b"".join(pool.map(digest, _entries_by_bucket(manifest, ends), ends))
    progress.finish(manifest.total_bytes, fingerprints)


def _copied_bucket(
    entries: Sequence[TensorEntry], end: int, tensors: Mapping[str, torch.Tensor], views: Mapping[str, torch.Tensor]
) -> bytes:
    """Copy one bucket and return its fingerprint, gaps included."""
    hasher = xxhash.xxh3_64()
    position = entries[0].offset
    for entry in entries:
        hasher.update(_GAP[: entry.offset - position])
        for source, target, position in pieces(tensors[entry.name], views[entry.name], entry.offset):  # noqa: B007 - goes on
            is_hashed_first = are_same_bytes(source, target)
            if is_hashed_first:  # the copy may stream past the cache: what was read is in it then, what was written is not
                hasher.update(bytes_of(source).data)
            copy_tensor(source, target)
            if not is_hashed_first:
                hasher.update(bytes_of(target).data)
    hasher.update(_GAP[: end - position])
    return int(hasher.intdigest()).to_bytes(DIGEST_BYTES, "little")


def _entries_by_bucket(manifest: WeightsManifest, ends: Sequence[int]) -> list[list[TensorEntry]]:
    buckets: list[list[TensorEntry]] = [[] for _ in ends]
    number = 0
    for entry in manifest.entries:
        while entry.offset >= ends[number] and number < len(ends) - 1:
            number += 1
        buckets[number].append(entry)
    return buckets
