"""A version as safetensors shards, laid out as Hugging Face lays out a model: written and read side by side.

One shard is `model.safetensors`; several are `model-00001-of-00003.safetensors` and so on, with `model.safetensors.index.json`
that says which tensor is where, so that transformers, vLLM and safetensors open the folder as it is. The format knows no gaps:
the alignment of the flat layout (models/layout.py) is left out of the files and made again, as zeros, by the reader.

Invariants: tensors go straight from the slot to the file and from the file into the staging buffer; a shard is read only once its
header, its length and the version it names have been seen to be those announced; every bucket is hashed as it arrives.
Called by broadcast/files.py.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncrl.broadcast.fingerprint import CHUNK_BYTES, BucketHasher, version_fingerprint
from asyncrl.broadcast.medium import VersionUnavailableError
from asyncrl.errors import BroadcastError
from asyncrl.models.layout import bucket_ends
from asyncrl.schema.weights import TensorEntry, WeightsAvailable, WeightsManifest

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 64 << 20


class _HeaderEntry(msgspec.Struct, frozen=True):
    """One tensor in a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file of a version."""

    file_name: str
    entries: tuple[TensorEntry, ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its tensors."""
        return sum(entry.num_bytes for entry in self.entries)


def plan_shards(manifest: WeightsManifest, shard_bytes: int) -> tuple[Shard, ...]:
    """Divide a version's tensors, in their order, into files.

    Args:
        manifest: Their layout.
        shard_bytes: Most tensor bytes of one file; a larger tensor has one of its own.
    """
    groups: list[list[TensorEntry]] = [[]]
    filled_bytes = 0
    for entry in manifest.entries:
        if filled_bytes and filled_bytes + entry.num_bytes > shard_bytes:
            groups.append([])
            filled_bytes = 0
        groups[-1].append(entry)
        filled_bytes += entry.num_bytes
    return tuple(Shard(_file_name(number, len(groups)), tuple(group)) for number, group in enumerate(groups, start=1))


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


# -- writing ---------------------------------------------------------------------------------------------------------------


def write_shards(
    folder: Path, shards: Sequence[Shard], flat: memoryview, version: int, fingerprint: str, num_threads: int
) -> None:
    """Write a version's files into `folder`, several at once, each on the disk when this returns.

    Raises:
        OSError: One could not be written.
    """
    metadata = {"format": "pt", "asyncrl_version": str(version), "fingerprint": fingerprint}
    with ThreadPoolExecutor(num_threads, thread_name_prefix="asyncrl-shards") as pool:
        for _ in pool.map(lambda shard: _write_shard(folder / shard.file_name, shard, flat, metadata), shards):
            pass
    if len(shards) > 1:
        _write_index(folder / INDEX_NAME, shards, metadata)


def _write_shard(path: Path, shard: Shard, flat: memoryview, metadata: dict[str, str]) -> None:
    encoded = msgspec.json.encode({"__metadata__": metadata, **_header_entries(shard)})
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        file.writelines(flat[entry.offset : entry.offset + entry.num_bytes] for entry in shard.entries)
        file.flush()
        os.fsync(file.fileno())


def _write_index(path: Path, shards: Sequence[Shard], metadata: dict[str, str]) -> None:
    """Write what says which tensor is in which file."""
    index = {
        "metadata": {"total_size": sum(shard.num_bytes for shard in shards), **metadata},
        "weight_map": {entry.name: shard.file_name for shard in shards for entry in shard.entries},
    }
    with path.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(index)))
        file.flush()
        os.fsync(file.fileno())


def _header_entries(shard: Shard) -> dict[str, _HeaderEntry]:
    entries: dict[str, _HeaderEntry] = {}
    start = 0
    for entry in shard.entries:
        entries[entry.name] = _HeaderEntry(entry.dtype, entry.shape, (start, start + entry.num_bytes))
        start += entry.num_bytes
    return entries


# -- reading ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Located:
    """A tensor's bytes: where they lie, and where they go."""

    path: Path
    handle: int
    position: int
    entry: TensorEntry


def read_shards(
    folder: Path,
    shards: Sequence[Shard],
    available: WeightsAvailable,
    into: memoryview,
    cancelled: threading.Event,
    num_threads: int,
) -> bytes:
    """Fill `into` from a version's files, gaps with zeros, several buckets at once; return its bucket fingerprints.

    Raises:
        FileNotFoundError: A file is missing.
        OSError: One cannot be read.
        BroadcastError: One is damaged, too short, or not of this version.
        VersionUnavailableError: The fetch was cancelled.
    """
    ends = bucket_ends(available.manifest)
    with ExitStack() as opened:
        located = [tensor for shard in shards for tensor in _open_shard(folder / shard.file_name, shard, available, opened)]
        read_bucket = _BucketReader(located, into, cancelled, available.version).read
        with ThreadPoolExecutor(num_threads, thread_name_prefix="asyncrl-shards") as pool:
            return b"".join(pool.map(read_bucket, [0, *ends[:-1]], ends))


class _BucketReader:
    """Reads one bucket after another, from whichever files it lies in; every thread its own."""

    def __init__(self, located: Sequence[_Located], into: memoryview, cancelled: threading.Event, version: int) -> None:
        self._located = [tensor for tensor in located if tensor.entry.num_bytes]
        self._starts = [tensor.entry.offset for tensor in self._located]
        self._into = into
        self._cancelled = cancelled
        self._version = version

    def read(self, start: int, end: int) -> bytes:
        """Fill `into[start:end]`, whole tensors and gaps; return its fingerprint."""
        hasher = BucketHasher((end - start,))
        first, last = bisect_right(self._starts, start - 1), bisect_right(self._starts, end - 1)
        done = start
        for tensor in self._located[first:last]:
            _zero_gap(self._into[done : tensor.entry.offset], hasher)
            done = tensor.entry.offset + tensor.entry.num_bytes
            self._read_tensor(tensor, hasher)
        _zero_gap(self._into[done:end], hasher)
        return hasher.digests()

    def _read_tensor(self, tensor: _Located, hasher: BucketHasher) -> None:
        target = self._into[tensor.entry.offset : tensor.entry.offset + tensor.entry.num_bytes]
        for start in range(0, len(target), CHUNK_BYTES):
            if self._cancelled.is_set():
                raise VersionUnavailableError(f"the fetch of version {self._version} was cancelled")
            chunk = target[start : start + CHUNK_BYTES]
            _read_fully(tensor, tensor.position + start, chunk)
            hasher.update(chunk)


def _open_shard(path: Path, shard: Shard, available: WeightsAvailable, opened: ExitStack) -> Iterator[_Located]:
    """Open a file, see that it is what was announced, and say where its tensors are."""
    handle = os.open(path, os.O_RDONLY)
    opened.callback(os.close, handle)
    position = _check_header(path, handle, shard, available)
    found, expected = os.fstat(handle).st_size, position + shard.num_bytes
    if found != expected:
        raise BroadcastError(f"{path} has {found} bytes and should have {expected}: it was cut short or written by someone else")
    for entry in shard.entries:
        yield _Located(path, handle, position, entry)
        position += entry.num_bytes


def _check_header(path: Path, handle: int, shard: Shard, available: WeightsAvailable) -> int:
    """Return where the tensors begin, having seen that they are those announced and of that version."""
    header_bytes = int.from_bytes(os.pread(handle, 8, 0), "little")
    if not 0 < header_bytes <= MAX_HEADER_BYTES:
        raise BroadcastError(f"{path} is not a safetensors file: its header would be {header_bytes} bytes long")
    try:
        raw = msgspec.json.decode(os.pread(handle, header_bytes, 8), type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        found = {name: msgspec.json.decode(entry, type=_HeaderEntry) for name, entry in raw.items()}
    except msgspec.DecodeError as error:
        raise BroadcastError(f"{path} has a damaged header: {error}") from error
    if found != _header_entries(shard):
        raise BroadcastError(f"{path} holds other tensors than were announced for version {available.version}")
    announced = version_fingerprint(available.bucket_fingerprints)
    if metadata.get("fingerprint") != announced:
        raise BroadcastError(
            f"{path} is of version {metadata.get('asyncrl_version')} with fingerprint {metadata.get('fingerprint')}; announced "
            f"was version {available.version} with {announced}"
        )
    return 8 + header_bytes


def _read_fully(tensor: _Located, position: int, target: memoryview) -> None:
    while len(target):
        num_bytes = os.preadv(tensor.handle, [target], position)
        if not num_bytes:
            raise BroadcastError(f"{tensor.path} ends too early")
        target = target[num_bytes:]
        position += num_bytes


def _zero_gap(gap: memoryview, hasher: BucketHasher) -> None:
    gap[:] = bytes(len(gap))
    hasher.update(gap)
