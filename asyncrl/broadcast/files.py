"""Medium `files`: one safetensors file a version, in a folder that learner and generators both see.

Owns `FOLDER/version-00000012.safetensors` (anyone can open them) and `FOLDER/.writing-*`.

Invariants:
- A file appears under its name whole and on disk (written beside, fsync, atomic rename, fsync of the folder) or not at all.
- At most `keep_last` versions lie in the folder, none of them above the newest committed one (such are of a line of checkpoints
  that was left); a file being read when it is removed stays readable until it is closed.
- Written tensor by tensor from the slot, read tensor by tensor into the staging buffer: no further copy of the model in memory.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch

from asyncrl.broadcast.fingerprint import CHUNK_BYTES, BucketHasher
from asyncrl.broadcast.medium import NUM_SLOTS, VersionUnavailableError
from asyncrl.config.stages import FilesMedium
from asyncrl.errors import BroadcastError
from asyncrl.models.layout import bucket_ends
from asyncrl.schema.weights import WeightsAvailable, WeightsManifest

MAX_HEADER_BYTES = 64 << 20


class _HeaderEntry(msgspec.Struct, frozen=True):
    """One tensor in a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class FilesWriter:
    """The learner's end; owns the folder."""

    keeps_slots = False

    def __init__(self, config: FilesMedium, run_folder: Path) -> None:
        self._folder = weights_folder(config, run_folder)
        self._keep_last = config.keep_last
        self._manifest: WeightsManifest | None = None
        self._slots: tuple[memoryview, ...] = ()

    def open(self, manifest: WeightsManifest) -> tuple[torch.Tensor, ...]:
        """Make the folder and remove half-written files; see MediumWriter."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in self._folder.glob(".writing-*"):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise BroadcastError(f"cannot use {self._folder} for weights: {error.strerror}") from error
        slots = tuple(torch.zeros(manifest.total_bytes, dtype=torch.uint8) for _ in range(NUM_SLOTS))
        self._manifest = manifest
        self._slots = tuple(slot.numpy().data for slot in slots)
        return slots

    def busy_slots(self) -> frozenset[int]:
        """Return none: subscribers read files."""
        return frozenset()

    def overwrite(self, slot: int, version: int) -> None:
        """Do nothing: a slot is nobody's once its file is written."""

    def commit(self, slot: int, version: int, fingerprint: str) -> str:
        """Write the file; see MediumWriter."""
        assert self._manifest is not None
        target = self._folder / file_name(version)
        writing = self._folder / f".writing-{version}-{os.getpid()}"
        try:
            with writing.open("wb") as file:
                _write_safetensors(file, self._manifest, self._slots[slot], version, fingerprint)
            writing.replace(target)
            _fsync_folder(self._folder)
            self._remove_old(version)
        except OSError as error:
            with contextlib.suppress(OSError):
                writing.unlink(missing_ok=True)
            raise BroadcastError(f"version {version} could not be written to {self._folder}: {error.strerror}") from error
        return str(target)

    def put_blob(self, name: str, blob: bytes) -> None:
        """Write the delta beside the versions; see MediumWriter."""
        target, writing = self._folder / blob_file_name(name), self._folder / f".writing-{name}-{os.getpid()}"
        try:
            writing.write_bytes(blob)
            writing.replace(target)
        except OSError as error:
            raise BroadcastError(f"delta {name} could not be written to {self._folder}: {error.strerror}") from error

    def drop_blob(self, name: str) -> None:
        """Remove the delta's file."""
        (self._folder / blob_file_name(name)).unlink(missing_ok=True)

    def close(self) -> None:
        """Release the slots; the newest versions stay in the folder."""
        self._slots = ()

    def _remove_old(self, newest: int) -> None:
        versions = sorted(version_of(path) for path in self._folder.glob("version-*.safetensors") if version_of(path) >= 0)
        kept = [version for version in versions if version <= newest][-self._keep_last :]
        for version in versions:
            if version not in kept:
                (self._folder / file_name(version)).unlink(missing_ok=True)


class FilesReader:
    """A generator's end."""

    def __init__(self, config: FilesMedium, run_folder: Path) -> None:
        self._folder = weights_folder(config, run_folder)

    def lease(self, available: WeightsAvailable) -> None:
        """Return none: a file has gaps left out and may be far away."""

    def fetch(self, available: WeightsAvailable, into: memoryview, cancelled: threading.Event) -> bytes:
        """Read the file; see MediumReader."""
        path = self._folder / file_name(available.version)
        if Path(available.location).name != path.name:
            raise BroadcastError(f"{available.location} is not where version {available.version} of this run lies")
        try:
            with path.open("rb", buffering=0) as file:
                data_start = _check_header(file, available.manifest)
                return _read_tensors(file, data_start, available, into, cancelled)
        except FileNotFoundError as error:
            raise VersionUnavailableError(f"version {available.version} is gone from {self._folder}; fetch the newest") from error
        except OSError as error:
            raise BroadcastError(f"{path} cannot be read: {error.strerror}") from error

    def fetch_blob(self, available: WeightsAvailable, name: str, num_bytes: int, cancelled: threading.Event) -> bytes:  # noqa: ARG002 - small
        """Read the delta's file; see MediumReader."""
        try:
            blob = (self._folder / blob_file_name(name)).read_bytes()
        except OSError as error:
            raise VersionUnavailableError(f"delta {name} is gone from {self._folder}: {error.strerror}") from error
        if len(blob) != num_bytes:
            raise BroadcastError(f"delta {name} has {len(blob)} bytes, announced were {num_bytes}")
        return blob

    def close(self) -> None:
        """Do nothing: no file stays open between fetches."""


def weights_folder(config: FilesMedium, run_folder: Path) -> Path:
    """Return where the versions lie."""
    return Path(config.folder) if config.folder else run_folder / "weights"


def file_name(version: int) -> str:
    """Return the name of a version's file."""
    return f"version-{version:08d}.safetensors"


def blob_file_name(name: str) -> str:
    """Return the name of a delta's file."""
    return f"{name}.delta"


def version_of(path: Path) -> int:
    """Return the version a file holds, by its name; -1 where the name is not one of ours."""
    number = path.stem.removeprefix("version-")
    return int(number) if number.isascii() and number.isdigit() else -1


def _write_safetensors(file: BinaryIO, manifest: WeightsManifest, flat: memoryview, version: int, fingerprint: str) -> None:
    """Write header and tensors. The format knows no gaps, so the alignment of the flat layout is left out."""
    metadata = {"format": "pt", "asyncrl_version": str(version), "fingerprint": fingerprint}
    header: dict[str, _HeaderEntry | dict[str, str]] = {"__metadata__": metadata, **_header_entries(manifest)}
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little"))
    file.write(encoded)
    file.writelines(flat[entry.offset : entry.offset + entry.num_bytes] for entry in manifest.entries)
    file.flush()
    os.fsync(file.fileno())


def _header_entries(manifest: WeightsManifest) -> dict[str, _HeaderEntry]:
    entries: dict[str, _HeaderEntry] = {}
    start = 0
    for entry in manifest.entries:
        entries[entry.name] = _HeaderEntry(entry.dtype, entry.shape, (start, start + entry.num_bytes))
        start += entry.num_bytes
    return entries


def _check_header(file: BinaryIO, manifest: WeightsManifest) -> int:
    """Return where the tensors begin, having seen that they are those of the manifest."""
    header_bytes = int.from_bytes(file.read(8), "little")
    if not 0 < header_bytes <= MAX_HEADER_BYTES:
        raise BroadcastError(f"{file.name} is not a safetensors file: its header would be {header_bytes} bytes long")
    try:
        raw = msgspec.json.decode(file.read(header_bytes), type=dict[str, msgspec.Raw])
        found = {name: msgspec.json.decode(entry, type=_HeaderEntry) for name, entry in raw.items() if name != "__metadata__"}
    except msgspec.DecodeError as error:
        raise BroadcastError(f"{file.name} has a damaged header: {error}") from error
    if found != _header_entries(manifest):
        raise BroadcastError(f"{file.name} holds other tensors than were announced")
    return 8 + header_bytes


def _read_tensors(
    file: BinaryIO, data_start: int, available: WeightsAvailable, into: memoryview, cancelled: threading.Event
) -> bytes:
    """Fill `into` in the order of the layout, gaps with zeros; return its bucket fingerprints."""
    hasher = BucketHasher(bucket_ends(available.manifest))
    file.seek(data_start)
    end = 0
    for entry in available.manifest.entries:
        _zero_gap(into[end : entry.offset], hasher)
        end = entry.offset + entry.num_bytes
        for start in range(entry.offset, end, CHUNK_BYTES):
            chunk = into[start : min(start + CHUNK_BYTES, end)]
            _read_fully(file, chunk)
            hasher.update(chunk)
            if cancelled.is_set():
                raise VersionUnavailableError(f"the fetch of version {available.version} was cancelled")
    _zero_gap(into[end:], hasher)
    return hasher.digests()


def _zero_gap(gap: memoryview, hasher: BucketHasher) -> None:
    gap[:] = bytes(len(gap))
    hasher.update(gap)


def _read_fully(file: BinaryIO, target: memoryview) -> None:
    while len(target):
        num_bytes = file.readinto(target)  # type: ignore[attr-defined]
        if not num_bytes:
            raise BroadcastError(f"{file.name} ends too early")
        target = target[num_bytes:]


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
