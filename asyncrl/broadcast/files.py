"""Medium `files`: a folder of safetensors a version, under one that learner and generators both see.

That one is the run's own: its `weights/`, or one named after it in `broadcast.medium.folder`, which runs may share.
Owns `FOLDER/version-00000012/` (shards.py; a Hugging Face folder but for its config: transformers, vLLM and safetensors open its
weights as they are), `FOLDER/*.delta`, and `FOLDER/.writing-*` and `FOLDER/.removing-*`, which nobody reads.

Invariants:
- A version appears under its name whole and on disk (written beside, fsync, atomic rename of its folder, fsync) or not at all.
- At most `keep_last` versions lie in the folder, the newest committed one always, none above it (such are of a line of
  checkpoints that was left). A version loses its name before it is removed: a reader that has its files open reads on, any other
  finds it gone.
- Deltas are removed when they are dropped, or by the next learner of the run: never by age.
- Written from the slot, read into the staging buffer, shards side by side: no further copy of the model in memory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
from pathlib import Path

import torch

from asyncrl.broadcast.medium import NUM_SLOTS, VersionUnavailableError
from asyncrl.broadcast.segments import path_hash
from asyncrl.broadcast.shards import plan_shards, read_shards, write_shards
from asyncrl.config.broadcast import FilesMedium
from asyncrl.errors import BroadcastError
from asyncrl.schema.weights import WeightsAvailable, WeightsManifest

_WRITING, _REMOVING, _BLOB_SUFFIX = ".writing-", ".removing-", ".delta"


class FilesWriter:
    """The learner's end; owns the folder."""

    keeps_slots = False

    def __init__(self, config: FilesMedium, run_folder: Path) -> None:
        self._folder = Path(config.folder) / own_name(run_folder) if config.folder else run_folder / "weights"
        self._config = config
        self._manifest: WeightsManifest | None = None
        self._slots: tuple[memoryview, ...] = ()

    def open(self, manifest: WeightsManifest) -> tuple[torch.Tensor, ...]:
        """Make the folder and remove what a killed learner left half-written; see MediumWriter."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for pattern in (f"{_WRITING}*", f"{_REMOVING}*", f"*{_BLOB_SUFFIX}"):
                for path in self._folder.glob(pattern):
                    _remove(path)
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
        """Do nothing: a slot is nobody's once its files are written."""

    def commit(self, slot: int, version: int, fingerprint: str) -> str:
        """Write the version's folder; see MediumWriter."""
        assert self._manifest is not None
        target, writing = self._folder / folder_name(version), self._folder / f"{_WRITING}{version}-{os.getpid()}"
        shards = plan_shards(self._manifest, self._config.shard_bytes)
        try:
            writing.mkdir()
            write_shards(writing, shards, self._slots[slot], version, fingerprint, self._config.num_threads)
            _fsync_folder(writing)
            self._set_aside(version)
            writing.rename(target)
            _fsync_folder(self._folder)
            self._remove_old(version)
        except OSError as error:
            with contextlib.suppress(OSError):
                _remove(writing)
            raise BroadcastError(f"version {version} could not be written to {self._folder}: {error.strerror}") from error
        return str(target)

    def put_blob(self, name: str, blob: bytes) -> None:
        """Write the delta beside the versions; see MediumWriter."""
        target, writing = self._folder / blob_file_name(name), self._folder / f"{_WRITING}{name}-{os.getpid()}"
        try:
            writing.write_bytes(blob)
            writing.replace(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                _remove(writing)
            raise BroadcastError(f"delta {name} could not be written to {self._folder}: {error.strerror}") from error

    def drop_blob(self, name: str) -> None:
        """Remove the delta's file."""
        (self._folder / blob_file_name(name)).unlink(missing_ok=True)

    def close(self) -> None:
        """Release the slots; the newest versions stay in the folder."""
        self._slots = ()

    def _remove_old(self, newest: int) -> None:
        versions = sorted(version_of(path) for path in self._folder.glob("version-*") if version_of(path) >= 0)
        kept = [version for version in versions if version <= newest][-self._config.keep_last :]
        for version in versions:
            if version not in kept:
                self._set_aside(version)
        for path in self._folder.glob(f"{_REMOVING}*"):
            # Some network file systems keep what a reader has open: such is tried again after the next version.
            shutil.rmtree(path, ignore_errors=True)

    def _set_aside(self, version: int) -> None:
        """Take a version's name away before its files, so that nobody opens half of it."""
        with contextlib.suppress(FileNotFoundError):
            (self._folder / folder_name(version)).rename(self._folder / f"{_REMOVING}{version}-{secrets.token_hex(4)}")


class FilesReader:
    """A generator's end."""

    def __init__(self, config: FilesMedium, run_folder: Path) -> None:
        self._run_folder = run_folder
        self._config = config

    def lease(self, available: WeightsAvailable) -> None:
        """Return none: files have gaps left out and may be far away."""

    def fetch(self, available: WeightsAvailable, into: memoryview, cancelled: threading.Event) -> bytes:
        """Read the version's folder; see MediumReader."""
        folder = self._folder_of(available) / folder_name(available.version)
        if Path(available.location).name != folder.name:
            raise BroadcastError(f"{available.location} is not where version {available.version} of this run lies")
        shards = plan_shards(available.manifest, self._config.shard_bytes)
        try:
            return read_shards(folder, shards, available, into, cancelled, self._config.num_threads)
        except FileNotFoundError as error:
            if folder.is_dir():
                raise BroadcastError(
                    f"{error.filename} is missing: version {available.version} has {len(shards)} shards"
                ) from error
            raise VersionUnavailableError(
                f"version {available.version} is gone from {folder.parent}; fetch the newest"
            ) from error
        except OSError as error:
            raise BroadcastError(f"{error.filename or folder} cannot be read: {error.strerror}") from error

    def fetch_blob(self, available: WeightsAvailable, name: str, num_bytes: int, cancelled: threading.Event) -> bytes:  # noqa: ARG002 - small
        """Read the delta's file; see MediumReader."""
        path = self._folder_of(available) / blob_file_name(name)
        try:
            blob = path.read_bytes()
        except OSError as error:
            raise VersionUnavailableError(f"delta {name} is gone from {path.parent}: {error.strerror}") from error
        if len(blob) != num_bytes:
            raise BroadcastError(f"delta {name} has {len(blob)} bytes, announced were {num_bytes}")
        return blob

    def close(self) -> None:
        """Do nothing: no file stays open between fetches."""

    def _folder_of(self, available: WeightsAvailable) -> Path:
        """Return where the run's versions lie; a shared folder has the learner's name for it, whose paths may be others."""
        if not self._config.folder:
            return self._run_folder / "weights"
        name = Path(available.location).parent.name
        if name in {"", ".."}:
            raise BroadcastError(f"{available.location} is in no folder of a run")
        return Path(self._config.folder) / name


def own_name(run_folder: Path) -> str:
    """Return the name of a run's own folder among others: its own, told apart from that of another run of the same name."""
    return f"{run_folder.resolve().name}-{path_hash(run_folder)}"


def folder_name(version: int) -> str:
    """Return the name of a version's folder."""
    return f"version-{version:08d}"


def blob_file_name(name: str) -> str:
    """Return the name of a delta's file."""
    return f"{name}{_BLOB_SUFFIX}"


def version_of(path: Path) -> int:
    """Return the version a folder holds, by its name; -1 where the name is not one of ours."""
    number = path.name.removeprefix("version-")
    return int(number) if number.isascii() and number.isdigit() else -1


def _remove(path: Path) -> None:
    """Remove a folder or a file, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
