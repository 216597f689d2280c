"""Folders of a learner's checkpoints: written atomically, with checksums; found and removed. checkpoint.py writes their contents.

Invariants: a folder with the final name is complete (it is written, and removed, under another name); incomplete and damaged
folders are ignored, and removed once a newer one is complete; a folder that is being replaced stays complete, under its own or
another name, until the new one is on disk; only files that match their manifest are loaded.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import xxhash
from safetensors import SafetensorError

from asyncrl.errors import LearnerError
from asyncrl.folders import sync

log = logging.getLogger(__name__)

PREFIX = "step-"
PARTIAL, DAMAGED = ".partial-", "damaged-"
REPLACED = f"{PARTIAL}replaced-"
"""Name prefix of a folder that is being replaced: it is complete, and removed once the new one exists."""
STATE_FORMAT = 2
STATE, MANIFEST = Path("trainer/state.json"), Path("trainer/manifest.json")


class StepMemory(msgspec.Struct):
    """State that steps pass on to later steps; saved in checkpoints, so that a repeated step gives the same result."""

    kl_coefficient: float = -1.0
    """The present adaptive coefficient; negative: not adapted yet, the config's is used."""
    recipe: str = ""
    """The last recipe of `kind = "auto"`; empty: none yet."""
    measured: dict[str, float] = {}
    """Metrics from which `auto` chooses the next recipe."""


class FileSeal(msgspec.Struct, frozen=True):
    """Size and checksum of a checkpoint's file when it was written."""

    bytes: int
    xxh3: str


class TrainerState(msgspec.Struct, frozen=True):
    """`trainer/state.json`."""

    version: int
    format: int = STATE_FORMAT
    memory: StepMemory = msgspec.field(default_factory=StepMemory)
    """State that steps pass on to later steps."""
    group_ids: tuple[int, ...] = ()
    """Groups of the step that made this version, in a session: its run may end before it learns of that step."""
    metrics: dict[str, float] = {}
    """Metrics of that step."""
    next_prompt: int = -1
    """Index of the task's next prompt after the last trained one; -1: no session, or an older checkpoint without this field."""


def write_checkpoint(folder: Path, state: TrainerState, fill: Callable[[Path], None], keep_last: int) -> Path:
    """Write a checkpoint and remove folders that are no longer needed.

    Args:
        folder: `RUN/checkpoints`; made if missing.
        state: Content of `trainer/state.json`.
        fill: Writes all other files into the given folder, which already contains `trainer/`.
        keep_last: Number of complete checkpoints to keep.

    Returns:
        The checkpoint's folder. An existing one for this version is replaced.
    """

    def fill_and_seal(partial: Path) -> None:
        (partial / STATE).parent.mkdir()
        fill(partial)
        (partial / STATE).write_bytes(msgspec.json.encode(state))
        seals = {str(path.relative_to(partial)): _seal(path) for path in sorted(partial.rglob("*")) if path.is_file()}
        (partial / MANIFEST).write_bytes(msgspec.json.encode(seals))

    target = write_folder(folder / f"{PREFIX}{state.version:06d}", fill_and_seal)
    for path in [*folder.glob(f"{PARTIAL}*"), *folder.glob(f"{DAMAGED}{PREFIX}*")]:
        shutil.rmtree(path, ignore_errors=True)  # over NFS a file that is read stays; the next checkpoint tries again
    for path in _complete(folder)[:-keep_last]:
        # Renamed first: a reader finds the complete folder or none.
        aside = path.with_name(f"{PARTIAL}removed-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(OSError):  # as above
            shutil.rmtree(path.rename(aside))
    return target


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest undamaged checkpoint under `RUN/checkpoints`, or None if there is no checkpoint.

    If a replacement was interrupted before the new folder was in place, the old folder gets its name back.

    Raises:
        LearnerError: All are damaged, or one has another format.
    """
    for aside in folder.glob(f"{REPLACED}{PREFIX}*"):
        if not (replaced := folder / aside.name.removeprefix(REPLACED)).exists():
            aside.rename(replaced)
    faults: list[str] = []
    for checkpoint in reversed(_complete(folder)):
        fault = damage_of(checkpoint)
        if not fault:
            for damaged in faults:
                log.error("%s; training goes on from %s", damaged, checkpoint)
            return checkpoint
        faults.append(fault)
    if faults:
        raise LearnerError(f"no checkpoint is whole: {'; '.join(faults)}; restore one of these folders, or start a new run")
    return None


def rename_newer(checkpoint: Path) -> None:
    """Rename damaged checkpoints that are newer than this one, so that they do not count for `keep_last`."""
    passed_over = _complete(checkpoint.parent)
    for path in passed_over[passed_over.index(checkpoint) + 1 :]:
        aside = path.with_name(f"{DAMAGED}{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)


def damage_of(checkpoint: Path) -> str:
    """Return the first damaged file of a checkpoint and what is wrong with it; empty if all files are intact.

    Raises:
        LearnerError: The checkpoint has another format.
    """
    name = str(STATE.parent)
    try:
        found = json.loads((checkpoint / STATE).read_bytes()).get("format")
        if type(found) is int and found != STATE_FORMAT and not (checkpoint / MANIFEST).exists():
            raise LearnerError(f"{checkpoint} has format {found}, this version of asyncrl reads {STATE_FORMAT}")
        seals = msgspec.json.decode((checkpoint / MANIFEST).read_bytes(), type=dict[str, FileSeal])
        for name, written in seals.items():
            if _seal(checkpoint / name) != written:
                return f"checkpoint {checkpoint} is damaged: {name} is not what was written"
    except (OSError, ValueError, AttributeError, msgspec.MsgspecError) as error:
        return f"checkpoint {checkpoint} is damaged: {name} cannot be read: {error}"
    return ""


def read_state(checkpoint: Path) -> TrainerState:
    """Return the content of an undamaged checkpoint's `trainer/state.json`."""
    return msgspec.json.decode((checkpoint / STATE).read_bytes(), type=TrainerState)


def write_folder(target: Path, fill: Callable[[Path], None]) -> Path:
    """Make a folder atomically: fill a folder with another name, sync its files, rename it.

    Args:
        target: The final name; an existing folder is replaced, and kept under another name until the new one is in place.
        fill: Writes into the given folder.

    Returns:
        `target`.

    Raises:
        LearnerError: The folder cannot be written (disk full); its incomplete files are removed, and an existing folder stays.
    """
    partial = target.parent / f"{PARTIAL}{target.name}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        fill(partial)
        for path in [*partial.rglob("*"), partial]:
            if not path.is_symlink():
                sync(path)
    except Exception as error:
        if not isinstance(error, OSError | SafetensorError) and "(os error " not in str(error):  # a tokenizer's form
            raise
        shutil.rmtree(partial, ignore_errors=True)
        raise LearnerError(f"{target} cannot be written: {error}; make room on its disk, then `asyncrl resume`") from error
    replaced = target.with_name(f"{REPLACED}{target.name}")
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    partial.rename(target)
    sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return target


def _seal(path: Path) -> FileSeal:
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            size += len(chunk)
    return FileSeal(size, digest.hexdigest())


def _complete(folder: Path) -> list[Path]:
    named = re.compile(rf"{PREFIX}[0-9]+")
    found = [path for path in folder.glob(f"{PREFIX}*") if named.fullmatch(path.name) and (path / STATE).is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)))
