"""Medium `files`: one folder of safetensors per version, in a folder that the learner and the generators can both read.

That folder belongs to the run: its `weights/`, or a folder named after the run in `broadcast.medium.folder`, which several runs
may share. The medium owns `FOLDER/version-00000012/` (a Hugging Face folder without config: transformers, vLLM and safetensors
open its weights directly), `FOLDER/*.delta`, and `FOLDER/.writing-*` and `FOLDER/.removing-*`, which are never read.

The format has no gaps: the files omit the alignment of the flat layout (models/layout.py), and the reader restores it as zeros.

Invariants:
- A version appears under its name complete and on disk (temporary folder, fsync, atomic rename, fsync), or not at all.
- The folder holds at most `keep_last` versions: always the newest committed one, and none with a higher number (left over from
  before the run went back to a checkpoint). A version is renamed before it is removed: a reader with open files can finish, and
  any other reader finds the version gone.
- Deltas are removed when they are dropped, or by the next learner of the run: never by age.
- Tensors are written from the slot to the file, and read from the file into the staging buffer, several at once: there is no
  further copy of the model in memory. A file's header gives the position of each tensor; the fingerprint verifies its bytes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from msgspec import Meta

from asyncrl.config.broadcast import FilesMedium
from asyncrl.errors import BroadcastError
from asyncrl.folders import sync, write_whole
from asyncrl.models.layout import DTYPE_OF_NAME, bucket_ends
from asyncrl.schema.weights import TensorEntry, WeightsAvailable, WeightsManifest
from asyncrl.weights.buckets import fingerprints_of
from asyncrl.weights.media.base import NUM_SLOTS, MediumReader, MediumWriter, VersionUnavailableError, read_blob
from asyncrl.weights.shm_segments import path_hash

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 64 << 20
READ_BYTES = 1 << 20
_WRITING, _REMOVING, _BLOB_SUFFIX = ".writing-", ".removing-", ".delta"

_Offset = Annotated[int, Meta(ge=0, le=1 << 62)]


class _HeaderEntry(msgspec.Struct, frozen=True):
    """One tensor in a safetensors header, or the header's metadata of the file."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[_Offset, _Offset] = (0, 0)


class FilesWriter(MediumWriter):
    """The learner's end; owns the folder."""

    def __init__(self, config: FilesMedium, run_folder: Path) -> None:
        named = f"{run_folder.resolve().name}-{path_hash(run_folder)}"
        self._folder = Path(config.folder) / named if config.folder else run_folder / "weights"
        self._config = config
        self._shards: dict[str, tuple[TensorEntry, ...]] = {}
        self._slots: tuple[memoryview, ...] = ()

    def open(self, manifest: WeightsManifest) -> tuple[torch.Tensor, ...]:
        """Make the folder and remove the incomplete files of a killed learner; see MediumWriter."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for folder in (*self._folder.glob(f"{_WRITING}*"), *self._folder.glob(f"{_REMOVING}*")):
                shutil.rmtree(folder, ignore_errors=True)  # as in `commit`
            for blob in self._folder.glob(f"*{_BLOB_SUFFIX}*"):
                blob.unlink()
        except OSError as error:
            raise BroadcastError(f"cannot use {self._folder} for weights: {error.strerror}; make it writable") from error
        slots = tuple(torch.zeros(manifest.total_bytes, dtype=torch.uint8) for _ in range(NUM_SLOTS))
        # Divided and named as Hugging Face does; a tensor larger than a shard has its own shard.
        entries = {entry.name: entry for entry in manifest.entries}
        shapes = {
            name: torch.empty(entry.shape, dtype=DTYPE_OF_NAME[entry.dtype], device="meta") for name, entry in entries.items()
        }
        split = split_torch_state_dict_into_shards(shapes, max_shard_size=self._config.shard_bytes)
        self._shards = {file: tuple(entries[name] for name in names) for file, names in split.filename_to_tensors.items()}
        self._slots = tuple(slot.numpy().data for slot in slots)
        return slots

    def commit(self, slot: int, version: int, fingerprint: str) -> str:
        """Write the version's folder; see MediumWriter."""
        target, writing = self._folder / folder_name(version), self._folder / f"{_WRITING}{version}-{os.getpid()}"
        try:
            writing.mkdir()
            self._write_shards(writing, self._slots[slot], version, fingerprint)
            sync(writing)
            self._set_aside(version)
            writing.rename(target)
            sync(self._folder)
            names = [path.name.removeprefix("version-") for path in self._folder.glob("version-*")]
            versions = sorted(int(name) for name in names if name.isdecimal())
            kept = [number for number in versions if number <= version][-self._config.keep_last :]
            for number in {*versions} - {*kept}:
                self._set_aside(number)
            for path in self._folder.glob(f"{_REMOVING}*"):
                # Some network file systems keep files that a reader has open: removal is tried again after the next version.
                shutil.rmtree(path, ignore_errors=True)
        except OSError as error:
            shutil.rmtree(writing, ignore_errors=True)
            raise BroadcastError(f"version {version} could not be written to {self._folder}: {error.strerror}") from error
        return str(target)

    def _write_shards(self, folder: Path, flat: memoryview, version: int, fingerprint: str) -> None:
        """Write a version's files, several at once; all are on disk when this returns."""
        metadata = {"format": "pt", "asyncrl_version": str(version), "fingerprint": fingerprint}

        def write_shard(name: str) -> None:
            entries, header, position = self._shards[name], dict[str, object](), 0
            for entry in entries:
                header[entry.name] = _HeaderEntry(entry.dtype, entry.shape, (position, position + entry.num_bytes))
                position += entry.num_bytes
            encoded = msgspec.json.encode({"__metadata__": metadata, **header})
            encoded += b" " * (-len(encoded) % 8)
            tensors = [flat[entry.offset : entry.offset + entry.num_bytes] for entry in entries]
            with (folder / name).open("wb") as file:
                file.writelines([len(encoded).to_bytes(8, "little"), encoded, *tensors])
                file.flush()
                os.fsync(file.fileno())

        with ThreadPoolExecutor(self._config.num_threads, thread_name_prefix="asyncrl-shards") as pool:
            for _ in pool.map(write_shard, self._shards):
                pass
        if len(self._shards) > 1:
            total_size = sum(entry.num_bytes for entries in self._shards.values() for entry in entries)
            weight_map = {entry.name: name for name, entries in self._shards.items() for entry in entries}
            index = msgspec.json.encode({"metadata": {"total_size": total_size, **metadata}, "weight_map": weight_map})
            write_whole(folder / INDEX_NAME, msgspec.json.format(index))

    def blob_path(self, name: str) -> Path:
        """Return a path beside the versions; see MediumWriter."""
        return self._folder / f"{name}{_BLOB_SUFFIX}"

    def close(self) -> None:
        """Release the slots; the newest versions stay in the folder."""
        self._slots = ()

    def _set_aside(self, version: int) -> None:
        """Rename a version before its files are removed, so that no reader opens an incomplete version."""
        with contextlib.suppress(FileNotFoundError):
            (self._folder / folder_name(version)).rename(self._folder / f"{_REMOVING}{version}-{secrets.token_hex(4)}")


class FilesReader(MediumReader):
    """A generator's end."""

    def __init__(self, config: FilesMedium, run_folder: Path) -> None:
        self._run_folder, self._config = run_folder, config

    def fetch(self, available: WeightsAvailable, into: memoryview, cancelled: threading.Event) -> bytes:
        """Read the version's folder, several tensors at once; see MediumReader."""
        folder = self._folder_of(available) / folder_name(available.version)
        if Path(available.location).name != folder.name:
            raise BroadcastError(f"{available.location} is not the folder of version {available.version} of this run")
        if not folder.is_dir():
            raise VersionUnavailableError(f"version {available.version} is gone from {folder.parent}; fetch the newest")

        def read(tensor: tuple[Path, int, int, TensorEntry]) -> None:
            path, handle, position, entry = tensor
            target = into[entry.offset :][: entry.num_bytes]
            while len(target):
                if cancelled.is_set():
                    raise VersionUnavailableError(f"the fetch was cancelled with {len(target)} bytes of {path} to go")
                num_bytes = os.preadv(handle, [target[:READ_BYTES]], position)
                if not num_bytes:
                    raise BroadcastError(f"{path} is too short: it was cut off or overwritten")
                target, position = target[num_bytes:], position + num_bytes

        try:
            with ExitStack() as opened:
                located = _locate(folder, available, opened)
                with ThreadPoolExecutor(self._config.num_threads, thread_name_prefix="asyncrl-shards") as pool:
                    for _ in pool.map(read, located):
                        pass
        except OSError as error:
            if not folder.is_dir():
                raise VersionUnavailableError(f"version {available.version} is gone from {folder.parent}") from error
            raise BroadcastError(f"{error.filename or folder} cannot be read: {error.strerror}") from error
        following = [entry.offset for entry in available.manifest.entries[1:]] + [available.manifest.total_bytes]
        for entry, end in zip(available.manifest.entries, following, strict=True):
            into[entry.offset + entry.num_bytes : end] = bytes(end - entry.offset - entry.num_bytes)
        return fingerprints_of(into, bucket_ends(available.manifest))

    def fetch_blob(self, available: WeightsAvailable, name: str, num_bytes: int, cancelled: threading.Event) -> bytes:  # noqa: ARG002 - small
        """Read the delta's file; see MediumReader."""
        return read_blob(self._folder_of(available) / f"{name}{_BLOB_SUFFIX}", num_bytes)

    def _folder_of(self, available: WeightsAvailable) -> Path:
        """Return the folder of the run's versions; in a shared folder by name only, because the learner's paths may differ."""
        if not self._config.folder:
            return self._run_folder / "weights"
        name = Path(available.location).parent.name
        if name in {"", ".."}:
            raise BroadcastError(f"{available.location} is in no folder of a run")
        return Path(self._config.folder) / name


def _locate(folder: Path, available: WeightsAvailable, opened: ExitStack) -> list[tuple[Path, int, int, TensorEntry]]:
    """Open a version's files; return path, handle and position of each announced tensor.

    Raises:
        OSError: A file cannot be opened.
        BroadcastError: A file is damaged or cut short, or no file contains an announced tensor.
    """
    located: dict[str, tuple[Path, int, int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        handle = os.open(path, os.O_RDONLY)
        opened.callback(os.close, handle)
        header_bytes = min(int.from_bytes(os.pread(handle, 8, 0), "little"), MAX_HEADER_BYTES)
        try:
            header = msgspec.json.decode(os.pread(handle, header_bytes, 8), type=dict[str, _HeaderEntry])
        except msgspec.DecodeError as error:
            raise BroadcastError(f"{path} is not a safetensors file, or was cut short: {error}") from error
        located |= {name: (path, handle, 8 + header_bytes + inside.data_offsets[0]) for name, inside in header.items()}
    if missing := [entry.name for entry in available.manifest.entries if entry.name not in located]:
        raise BroadcastError(f"{folder} is missing {len(missing)} tensors, the first is {missing[0]}")
    return [(*located[entry.name], entry) for entry in available.manifest.entries]


def folder_name(version: int) -> str:
    """Return the name of a version's folder."""
    return f"version-{version:08d}"
