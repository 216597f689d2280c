"""Deltas: the changed bytes from one version to the next, which deltas are kept, and which of them a subscriber fetches.

A blob is a sequence of sections, one for each chunk with changes. A section gives the positions of changed elements (as gaps
from one to the next) and their new values. They are values, not differences: applying a delta twice does no harm, and NaN and
signed zeros need no special treatment.

`plan_fetch` decides what a subscriber fetches; it is pure. `DeltaOffers` is the learner's side: it owns the chain and a copy of
the newest version that can be fetched (as many bytes as a version, in host memory), makes the next delta from it and then updates
it in place.

The learner's chain is a sequence of deltas, each based on the version before; the last leads to the newest version. One version
in the chain can be fetched complete (the newest one, on media that always keep it complete).

    v7 ─delta─▶ v8 ─delta─▶ v9 (whole) ─delta─▶ v10 ─delta─▶ v11, announced

Invariants of a blob:
- Lossless: `apply_delta(encode_delta(base, current), base)` makes `base` equal to `current`, bit for bit.
- Elements are compared as unsigned integers of their size; the gaps of the layout are zero in every version.
- A few chunks are processed at a time, each on its own thread: memory besides the two versions is the blob and a few times
  CHUNK_BYTES per thread.
- Gaps and values are divided into byte planes, each compressed separately, because bytes of one plane are similar. A gap uses as
  many bytes as the longest gap of its chunk; the high bytes are then nearly all zero and compress to almost nothing.

Invariants of the chain:
- Every delta after the complete version is kept, so that a new subscriber can get the newest version: complete, then deltas.
- At most `full_every` deltas are kept, with fewer bytes together than a version; the oldest are removed first.
- Versions that were superseded or failed do not change the chain.
- A base is the same only if version and fingerprint are the same: after a restart, other bytes may have the same version number.
- The copy, the chain and what subscribers can fetch belong to one version: they change together, after everything that can fail.
- A delta that is too large, or that the medium refuses, is not an error: the complete version is sent.

Source: sending only the elements whose bf16 bytes changed is the idea of sparse weight patches for RL, e.g. PULSE
(arXiv 2602.03839); gap coding and byte planes as in inverted indices and Blosc's shuffle.
"""

from __future__ import annotations

import logging
import struct
from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from asyncrl.config.broadcast import DeltaConfig
from asyncrl.errors import BroadcastError
from asyncrl.models.layout import COPY_THREADS, DTYPE_OF_NAME, bucket_ends
from asyncrl.schema.weights import Delta, WeightsAvailable, WeightsManifest
from asyncrl.weights.media.base import MediumWriter

_LOG = logging.getLogger(__name__)

Elements = NDArray[np.unsignedinteger[Any]]

CHUNK_BYTES = 4 << 20
MAGIC = b"ADL2"
_SECTION = struct.Struct("<QIBB")
"""First byte of the chunk, changed elements, bytes of a gap, bytes of an element."""
_FRAME = struct.Struct("<I")
_UNSIGNED: dict[int, np.dtype[np.unsignedinteger[Any]]] = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}


def encode_delta(manifest: WeightsManifest, base: memoryview, current: memoryview, max_bytes: int | None = None) -> bytes | None:
    """Return the delta that turns `base` into `current`.

    Args:
        manifest: The layout of both.
        base: `manifest.total_bytes` bytes.
        current: As many.
        max_bytes: Maximum size of the blob; None: no limit.

    Returns:
        The blob; None if it would have more than `max_bytes`.
    """
    sections = [MAGIC]
    num_bytes = len(MAGIC)
    pool = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="asyncrl-delta")
    try:
        for section in pool.map(partial(_encode_section, base, current), _chunks(manifest)):
            sections.append(section)
            num_bytes += len(section)
            if max_bytes is not None and num_bytes > max_bytes:
                return None
    finally:
        pool.shutdown(cancel_futures=True)
    return b"".join(sections)


def apply_delta(manifest: WeightsManifest, blob: bytes, flat: memoryview) -> set[int]:
    """Turn the base version's bytes into the next version's, in place.

    Args:
        manifest: The layout.
        blob: The result of `encode_delta`, with its fingerprint checked.
        flat: `manifest.total_bytes` writable bytes; their content is undefined if this raises.

    Returns:
        The numbers of the buckets that may have changed.

    Raises:
        BroadcastError: The blob is damaged, or has another layout.
    """
    ends = bucket_ends(manifest)
    touched: set[int] = set()
    try:
        for start, positions, values in _sections(memoryview(blob)):
            elements = np.frombuffer(flat[start : start + CHUNK_BYTES], values.dtype)
            elements[positions] = values
            first, last = (start + int(positions[index]) * values.itemsize for index in (0, -1))
            touched.update(range(bisect_right(ends, first), bisect_right(ends, last) + 1))
    except (struct.error, zstandard.ZstdError, IndexError, ValueError, KeyError) as error:
        raise BroadcastError(f"the delta of {len(blob)} bytes is damaged or of another layout: {error}") from error
    return touched


def blob_fingerprint(blob: bytes) -> str:
    """Return xxh3-128 of the blob, hex."""
    return str(xxhash.xxh3_128(blob).hexdigest())


def _chunks(manifest: WeightsManifest) -> Iterator[tuple[int, int, int]]:
    """Yield start, end and bytes of an element: neighbours of the same size together, with the gaps between them."""
    runs: list[tuple[int, int, int]] = []
    following = [entry.offset for entry in manifest.entries[1:]] + [manifest.total_bytes]
    for entry, end in zip(manifest.entries, following, strict=True):
        item_bytes = DTYPE_OF_NAME[entry.dtype].itemsize
        if runs and runs[-1][2] == item_bytes:
            runs[-1] = (runs[-1][0], end, item_bytes)
        elif end > entry.offset:
            runs.append((entry.offset, end, item_bytes))
    for start, end, item_bytes in runs:
        for chunk_start in range(start, end, CHUNK_BYTES):
            yield chunk_start, min(chunk_start + CHUNK_BYTES, end), item_bytes


def _encode_section(base: memoryview, current: memoryview, chunk: tuple[int, int, int]) -> bytes:
    """Return the section of a chunk; empty if nothing changed."""
    start, end, item_bytes = chunk
    old, new = (np.frombuffer(version[start:end], _UNSIGNED[item_bytes]) for version in (base, current))
    positions = np.flatnonzero(old != new)
    if not positions.size:
        return b""
    gaps = np.diff(positions, prepend=-1) - 1
    gap_bytes = np.min_scalar_type(int(gaps.max())).itemsize
    section, compressor = [_SECTION.pack(start, positions.size, gap_bytes, item_bytes)], zstandard.ZstdCompressor(level=1)
    for elements in (gaps.astype(_UNSIGNED[gap_bytes]), new[positions]):
        for plane in elements.view(np.uint8).reshape(-1, elements.itemsize).T:  # the first byte of every element, and so on
            frame = compressor.compress(plane.tobytes())
            section += [_FRAME.pack(len(frame)), frame]
    return b"".join(section)


def _sections(blob: memoryview) -> Iterator[tuple[int, NDArray[np.int64], Elements]]:
    """Yield start of the chunk, positions in it, new values."""
    if blob[: len(MAGIC)] != MAGIC:
        raise ValueError("it does not begin like one")
    decompressor = zstandard.ZstdDecompressor()
    at = len(MAGIC)

    def elements(count: int, item_bytes: int) -> Elements:
        """Return so many elements, out of the planes of their bytes."""
        nonlocal at
        if count > CHUNK_BYTES:
            raise ValueError(f"a chunk does not hold {count} elements")
        dtype, each_byte = _UNSIGNED[item_bytes], np.empty((count, item_bytes), np.uint8)
        for place in range(item_bytes):
            (frame_bytes,) = _FRAME.unpack_from(blob, at)
            at += _FRAME.size + frame_bytes
            compressed = blob[at - frame_bytes : at]
            if zstandard.frame_content_size(compressed) != count:
                raise ValueError(f"a frame does not hold the {count} bytes it is said to")
            each_byte[:, place] = np.frombuffer(decompressor.decompress(compressed), np.uint8)
        return each_byte.reshape(-1).view(dtype)

    while at < len(blob):
        start, count, gap_bytes, item_bytes = _SECTION.unpack_from(blob, at)
        at += _SECTION.size
        gaps, values = elements(count, gap_bytes), elements(count, item_bytes)
        yield start, np.cumsum(gaps.astype(np.int64) + 1) - 1, values


# -- what is fetched, decided purely --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WholeVersion:
    """A version whose bytes can be fetched."""

    version: int
    location: str
    bucket_fingerprints: bytes


class FetchPlan(NamedTuple):
    """How to get from the held version to the announced one."""

    whole: WeightsAvailable | None
    """The complete version to fetch first; None: the held version is the base."""
    deltas: tuple[Delta, ...]
    """The deltas to apply then, in order."""


def plan_fetch(available: WeightsAvailable, held: WeightsAvailable | None) -> FetchPlan:
    """Return the plan with the fewest bytes that leads to the announced version.

    Args:
        available: The announcement.
        held: The verified version that is there already; None: there is none.

    Raises:
        BroadcastError: The announcement contradicts itself: no deltas lead from its complete version to the announced one.
    """
    from_whole = plan_whole(available)
    if held is None:
        return from_whole
    if held.fingerprint == available.fingerprint:
        return FetchPlan(None, ())
    changes = deltas_from(available.deltas, held.version, held.fingerprint)
    whole_bytes = available.manifest.total_bytes + bytes_of(from_whole.deltas)
    if not changes or changes[-1].version != available.version or bytes_of(changes) >= whole_bytes:
        return from_whole
    return FetchPlan(None, changes)


def plan_whole(available: WeightsAvailable) -> FetchPlan:
    """Return the plan that needs no held version: the complete version, then the deltas after it. Raises as `plan_fetch`."""
    if available.full_version in {-1, available.version}:
        return FetchPlan(msgspec.structs.replace(available, deltas=()), ())
    deltas = deltas_from(available.deltas, available.full_version)
    if not deltas or deltas[-1].version != available.version:
        raise BroadcastError(
            f"version {available.version} is announced on top of version {available.full_version}, and no deltas lead from there"
        )
    whole = msgspec.structs.replace(
        available,
        version=available.full_version,
        fingerprint=deltas[0].base_fingerprint,
        bucket_fingerprints=available.full_bucket_fingerprints,
        deltas=(),
    )
    return FetchPlan(whole, deltas)


def deltas_from(deltas: tuple[Delta, ...], version: int, fingerprint: str | None = None) -> tuple[Delta, ...]:
    """Return the deltas that follow each other from `version` on; empty if there are none."""
    for index, delta in enumerate(deltas):
        if delta.base_version == version and fingerprint in {None, delta.base_fingerprint}:
            is_unbroken = all(after.base_version == before.version for before, after in pairwise(deltas[index:]))
            return deltas[index:] if is_unbroken else ()
    return ()


def bytes_of(deltas: tuple[Delta, ...]) -> int:
    """Return how many bytes the deltas have together."""
    return sum(delta.num_bytes for delta in deltas)


# -- the learner's side --------------------------------------------------------------------------------------------------------


class DeltaOffers:
    """Publishes each version as a delta, complete, or both; keeps the chain.

    Args:
        config: How deltas are made, and how many are kept.
        writer: The medium's writer, already open.
        manifest: The layout.
    """

    def __init__(self, config: DeltaConfig, writer: MediumWriter, manifest: WeightsManifest) -> None:
        self._config, self._writer, self._manifest = config, writer, manifest
        self._whole: WholeVersion | None = None
        self._deltas: tuple[Delta, ...] = ()
        self._head: tuple[int, str] | None = None
        """Newest version and its fingerprint, on which the next delta is based."""
        self._newest = np.empty(manifest.total_bytes, np.uint8)
        """Its bytes."""
        self._warned = False

    def offer(
        self, slot: int, version: int, flat: memoryview, fingerprint: str, bucket_fingerprints: bytes
    ) -> tuple[WholeVersion, tuple[Delta, ...]]:
        """Make the version available to fetch; return the complete version and the deltas that lead from it to this one.

        Args:
            slot: The slot of the version.
            version: Its number.
            flat: Its bytes; they must not change meanwhile.
            fingerprint: The version's fingerprint.
            bucket_fingerprints: The fingerprints of its buckets.

        Raises:
            BroadcastError: The version could not be published; everything is as before.
        """
        total_bytes, blob, delta, whole = self._manifest.total_bytes, None, None, None
        if self._head is not None:
            max_bytes = int(self._config.max_share * total_bytes)
            blob = encode_delta(self._manifest, self._newest.data, flat, max_bytes)
            if blob is None and not self._warned:
                self._warned = True
                _LOG.warning(
                    "so much changes from version to version that a delta has more than %d bytes: such versions go whole. "
                    'Set broadcast.dtype = "bfloat16", or leave broadcast.delta out',
                    max_bytes,
                )
        since = deltas_from(self._deltas, self._whole.version) if self._whole is not None else ()
        is_long = len(since) + 1 >= self._config.full_every
        if self._writer.keeps_slots or blob is None or is_long or bytes_of(since) + len(blob) > total_bytes:
            whole = WholeVersion(version, self._writer.commit(slot, version, fingerprint), bucket_fingerprints)
        if blob is not None and self._head is not None:
            of_blob = blob_fingerprint(blob)
            name = f"delta-{version:08d}-{of_blob[:16]}"
            try:
                self._writer.put_blob(name, blob)
                delta = Delta(version, *self._head, name, len(blob), of_blob)
            except BroadcastError as error:
                _LOG.warning("the delta to version %d is not offered; the complete version is sent: %s", version, error)
        if delta is None and whole is None:
            whole = WholeVersion(version, self._writer.commit(slot, version, fingerprint), bucket_fingerprints)
        if delta is None or blob is None:
            np.copyto(self._newest, np.frombuffer(flat, np.uint8))
        else:
            apply_delta(self._manifest, blob, self._newest.data)
        self._whole, self._head = whole or self._whole, (version, fingerprint)
        assert self._whole is not None, "nothing leads to the version"
        offered = self._deltas if delta is None else (*self._deltas, delta)
        self._deltas = () if delta is None else offered
        while len(self._deltas) > self._config.full_every or bytes_of(self._deltas) > total_bytes:
            if self._deltas[0].version > self._whole.version:
                break
            self._deltas = self._deltas[1:]
        for old in offered:
            if old not in self._deltas:
                self._writer.drop_blob(old.name)
        return self._whole, self._deltas
