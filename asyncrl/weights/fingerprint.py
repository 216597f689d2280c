"""Fingerprints of a version: xxh3-64 of each bucket, and xxh3-128 of those as the version's name.

The learner makes them on the publisher's thread, never on its own. A generator makes its own of what arrived and compares: what
is verified is what goes live. Media that end on a device have other fingerprints (media/device.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from asyncrl.errors import BroadcastError
from asyncrl.models.layout import COPY_THREADS, bucket_ends
from asyncrl.schema.weights import WeightsAvailable

DIGEST_BYTES = 8


def fingerprints_of(
    flat: memoryview, ends: Sequence[int], check: Callable[[], None] = lambda: None, buckets: Iterable[int] | None = None
) -> bytes:
    """Hash bytes where they lie, several buckets at once.

    Args:
        flat: The version's bytes.
        ends: Of the buckets.
        check: Called before every bucket; raises to stop.
        buckets: Numbers of those to hash; None: all.
    """

    def digest(number: int) -> bytes:
        check()
        start = ends[number - 1] if number else 0
        return xxhash.xxh3_64_intdigest(flat[start : ends[number]]).to_bytes(DIGEST_BYTES, "little")

    with ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="asyncrl-hash") as pool:
        return b"".join(pool.map(digest, range(len(ends)) if buckets is None else buckets))


def version_fingerprint(bucket_fingerprints: bytes) -> str:
    """Return the version's name: xxh3-128 of its buckets' fingerprints, hex; empty where there are none."""
    return str(xxhash.xxh3_128_hexdigest(bucket_fingerprints)) if bucket_fingerprints else ""


def refuse_damaged(available: WeightsAvailable, found: bytes) -> None:
    """Compare bucket fingerprints with the announced ones.

    Raises:
        BroadcastError: Some differ, or there are not as many as announced.
    """
    announced = available.bucket_fingerprints
    if len(found) != len(announced):
        raise BroadcastError(f"{len(found) // DIGEST_BYTES} buckets arrived, {len(announced) // DIGEST_BYTES} were announced")
    starts = range(0, len(found), DIGEST_BYTES)
    if damaged := [i // DIGEST_BYTES for i in starts if found[i : i + DIGEST_BYTES] != announced[i : i + DIGEST_BYTES]]:
        told = f"{len(damaged)} of its {len(bucket_ends(available.manifest))} buckets differ, the first is bucket {damaged[0]}"
        raise BroadcastError(f"version {available.version} arrived damaged: the fingerprints of {told}")
