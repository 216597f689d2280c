"""Copies that are fingerprinted on the way: the learner's snapshot into a slot, and a generator's load out of one.

Buckets side by side, each by one thread; bytes are hashed as they are copied (models/copy_hash.py), what is cast piece after
piece while it is in that core's cache: memory is gone through once and not twice. Tensors divided over ranks are gathered one at
a time, in order, by the caller's thread; those are hashed behind the copy (`fingerprints_behind`), as is what is checked on a
device.

Called by publisher.py, on the learner's thread, and by subscriber.py, on the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from asyncrl.broadcast.fingerprint import CopyProgress
from asyncrl.models.copy_hash import CopyHasher, copy_hasher, digest_of
from asyncrl.models.copying import COPY_THREADS, are_same_bytes, bytes_of, copy_tensor
from asyncrl.models.layout import bucket_ends, copy_out, is_divided, pieces
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
    if not hashed or any(map(is_divided, tensors.values())):
        copy_out(tensors, manifest, views, progress.advance)
        progress.finish(manifest.total_bytes, b"")
        return

    progress.finish(manifest.total_bytes, copy_with_fingerprints(manifest, tensors, views, of_source=False))


def copy_with_fingerprints(
    manifest: WeightsManifest,
    sources: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    *,
    of_source: bool,
    check: Callable[[], None] = lambda: None,
) -> bytes:
    """Copy every tensor of the layout from `sources` to `targets`, casting on the way, and hash the side that is laid out by it.

    Args:
        manifest: The layout; its gaps count as the zeros they are made of.
        sources: By name, with the shapes of the layout.
        targets: The same.
        of_source: Which side that is.
        check: Called before every bucket; raises to stop.

    Returns:
        The buckets' fingerprints.
    """
    ends = bucket_ends(manifest)
    buckets = _entries_by_bucket(manifest, ends)

    def digest(number: int) -> bytes:
        check()
        position = buckets[number][0].offset
        hasher = copy_hasher(ends[number] - position)
        for entry in buckets[number]:
            hasher.update(_GAP[: entry.offset - position])
            _copy_and_hash(sources[entry.name], targets[entry.name], hasher, of_source=of_source)
            position = entry.offset + entry.num_bytes
        hasher.update(_GAP[: ends[number] - position])
        return digest_of(hasher)

    with ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="asyncrl-copy") as pool:
        return b"".join(pool.map(digest, range(len(ends))))


def _copy_and_hash(source: torch.Tensor, target: torch.Tensor, hasher: CopyHasher, *, of_source: bool) -> None:
    """Copy and hash; what is cast in turns, the side that is laid out."""
    if are_same_bytes(source, target):
        hasher.update(bytes_of(source), bytes_of(target))
        return
    for from_piece, to_piece, _ in pieces(source, target, 0):
        copy_tensor(from_piece, to_piece)
        hasher.update(bytes_of(from_piece if of_source else to_piece).data)


def _entries_by_bucket(manifest: WeightsManifest, ends: Sequence[int]) -> list[list[TensorEntry]]:
    buckets: list[list[TensorEntry]] = [[] for _ in ends]
    number = 0
    for entry in manifest.entries:
        while entry.offset >= ends[number] and number < len(ends) - 1:
            number += 1
        buckets[number].append(entry)
    return buckets
