"""What changed from one version's bytes to the next's, as one small blob, and back.

A blob is a run of sections, one for each chunk in which something changed. A section names the elements whose bytes differ (as
gaps from one to the next) and gives their new values. Values, not differences: applying a delta twice does no harm, and what is
not a number, or a zero of either sign, is just bytes.

Invariants:
- Lossless: `apply_delta(encode_delta(base, current), base)` makes `base` equal to `current`, bit for bit.
- Elements are compared as unsigned integers of their size; the gaps of the layout are zero in every version.
- A few chunks at a time, each on a thread of its own: what is held besides the two versions is the blob and a few times
  CHUNK_BYTES for each thread.
- Gaps and values are divided into byte planes, each compressed on its own: a plane's bytes are alike.

Source: sending only the elements whose bf16 bytes changed is the idea of sparse weight patches for RL, e.g. PULSE
(arXiv 2602.03839); gap coding and byte planes as in inverted indices and Blosc's shuffle.

"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from asyncrl.errors import BroadcastError
from asyncrl.models.layout import COPY_THREADS, DTYPE_OF_NAME, bucket_ends
from asyncrl.schema.weights import WeightsManifest

Elements = NDArray[np.unsignedinteger[Any]]
Compress = Callable[[bytes], bytes]

CHUNK_BYTES = 4 << 20
MAGIC = b"ADL1"
_SECTION = struct.Struct("<QIIBB")
"""First byte of the chunk, changed elements, wide gaps, bytes of an element, bytes of a gap."""
_FRAME = struct.Struct("<I")
_WIDE_GAP_BYTES = 4
_UNSIGNED: dict[int, np.dtype[np.unsignedinteger[Any]]] = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
_NARROW_BELOW = 64
"""Mean gap up to which gaps take one byte each, and beyond which two."""


def encode_delta(manifest: WeightsManifest, base: memoryview, current: memoryview, max_bytes: int | None = None) -> bytes | None:
    """Return what turns `base` into `current`.

    Args:
        manifest: The layout of both.
        base: `manifest.total_bytes` bytes.
        current: As many.
        max_bytes: Most that the blob may have; None: any number.

    Returns:
        The blob; None where it would have more than `max_bytes`.
    """

    def encode(chunk: tuple[int, int, int]) -> bytes:
        start, end, item_bytes = chunk
        kind = _UNSIGNED[item_bytes]
        old, new = np.frombuffer(base[start:end], kind), np.frombuffer(current[start:end], kind)
        return _encode_section(start, old, new, zstandard.ZstdCompressor(level=1).compress)

    sections = [MAGIC]
    num_bytes = len(MAGIC)
    pool = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="asyncrl-delta")
    try:
        for section in pool.map(encode, _chunks(manifest)):
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
        blob: What `encode_delta` returned, its fingerprint compared.
        flat: `manifest.total_bytes` writable bytes; worthless when this raises.

    Returns:
        The numbers of the buckets that may have changed.

    Raises:
        BroadcastError: The blob is none, or of another layout.
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


def _encode_section(start: int, old: Elements, new: Elements, compress: Compress) -> bytes:
    """Return the section of a chunk; nothing where nothing changed."""
    positions = np.flatnonzero(old != new)
    if not positions.size:
        return b""
    gaps = np.diff(positions, prepend=-1) - 1
    gap_bytes = 1 if new.size < _NARROW_BELOW * positions.size else 2
    escape = 256**gap_bytes - 1
    is_wide = gaps >= escape
    wide = gaps[is_wide].astype("<u4")
    gaps[is_wide] = escape
    planes = [*_planes(gaps.astype(_UNSIGNED[gap_bytes])), wide.tobytes(), *_planes(new[positions])]
    section = [_SECTION.pack(start, positions.size, wide.size, new.itemsize, gap_bytes)]
    for plane in planes:
        frame = compress(plane)
        section += [_FRAME.pack(len(frame)), frame]
    return b"".join(section)


def _planes(elements: Elements) -> list[bytes]:
    """Return the first byte of every element, the second of every element, and so on."""
    each_byte = elements.view(np.uint8).reshape(-1, elements.itemsize)
    return [each_byte[:, place].tobytes() for place in range(elements.itemsize)]


def _sections(blob: memoryview) -> Iterator[tuple[int, NDArray[np.int64], Elements]]:
    """Yield start of the chunk, positions in it, new values."""
    if blob[: len(MAGIC)] != MAGIC:
        raise ValueError("it does not begin like one")
    decompressor = zstandard.ZstdDecompressor()
    at = len(MAGIC)

    def frame(num_bytes: int) -> NDArray[np.uint8]:
        nonlocal at
        (frame_bytes,) = _FRAME.unpack_from(blob, at)
        at += _FRAME.size + frame_bytes
        compressed = blob[at - frame_bytes : at]
        if num_bytes > CHUNK_BYTES or zstandard.frame_content_size(compressed) != num_bytes:
            raise ValueError(f"a frame does not hold the {num_bytes} bytes it is said to")
        return np.frombuffer(decompressor.decompress(compressed), np.uint8)

    while at < len(blob):
        start, count, num_wide, item_bytes, gap_bytes = _SECTION.unpack_from(blob, at)
        at += _SECTION.size
        gaps = _joined([frame(count) for _ in range(gap_bytes)], gap_bytes).astype(np.int64)
        wide = frame(num_wide * _WIDE_GAP_BYTES).view("<u4")
        gaps[gaps == 256**gap_bytes - 1] = wide
        values = _joined([frame(count) for _ in range(item_bytes)], item_bytes)
        yield start, np.cumsum(gaps + 1) - 1, values


def _joined(planes: Sequence[NDArray[np.uint8]], item_bytes: int) -> Elements:
    """Undo `_planes`."""
    each_byte = np.empty((len(planes[0]), item_bytes), np.uint8)
    for place, plane in enumerate(planes):
        each_byte[:, place] = plane
    elements: Elements = each_byte.reshape(-1).view(_UNSIGNED[item_bytes])
    return elements
