"""The folders of a learner's checkpoints as files: whole or not there, sealed, found, removed. checkpoint.py fills them.

Invariants: a folder of the final name is complete (it is written, and removed, under another name); what is half written or was
found damaged is ignored and, once a newer one is complete, removed; one that is replaced is whole, under its own name or aside,
until the new one has its place on the disk; nothing is loaded that its manifest does not confirm.
"""

from __future__ import annotations

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
"""Before the name of a folder that makes room for a new one: complete, and removed once that is there."""
STATE_FORMAT = 2
STATE, MANIFEST = Path("trainer/state.json"), Path("trainer/manifest.json")


class StepMemory(msgspec.Struct):
    """What a step remembers of those before it; saved in checkpoints, so that a replayed step is the same step."""

    kl_coefficient: float = -1.0
    """The adaptive coefficient in force; negative: the config's own, not adapted yet."""
    recipe: str = ""
    """What `kind = "auto"` picked last; empty: nothing yet."""
    measured: dict[str, float] = {}
    """What it picks the next from."""


class FileSeal(msgspec.Struct, frozen=True):
    """What a file of a checkpoint was when it was written."""

    bytes: int
    xxh3: str


class TrainerState(msgspec.Struct, frozen=True):
    """`trainer/state.json`."""

    version: int
    controller_json: str = ""
    """The controller's own part, as it gave it."""
    format: int = STATE_FORMAT
    memory: StepMemory = msgspec.field(default_factory=StepMemory)
    """What steps remember of those before them."""
    group_ids: tuple[int, ...] = ()
    """Of the step that made this version, where a session trains: its run may end before it hears of that step."""
    metrics: dict[str, float] = {}
    """Of that step."""
    next_prompt: int = -1
    """Of its task's prompts, the one behind the last that was trained; -1: no session, or one of before this was kept."""


def write_checkpoint(folder: Path, state: TrainerState, fill: Callable[[Path], None], keep_last: int) -> Path:
    """Write a checkpoint and remove what it makes superfluous.

    Args:
        folder: `RUN/checkpoints`; made where it is missing.
        state: What `trainer/state.json` says.
        fill: Writes everything else into the folder that it is given, whose `trainer/` is there.
        keep_last: How many complete checkpoints stay.

    Returns:
        The checkpoint's own folder. One that is there already for this version is replaced.
    """

    def fill_and_seal(partial: Path) -> None:
        (partial / STATE).parent.mkdir()
        fill(partial)
        (partial / STATE).write_bytes(msgspec.json.encode(state))
        seals = {str(path.relative_to(partial)): _seal(path) for path in sorted(partial.rglob("*")) if path.is_file()}
        (partial / MANIFEST).write_bytes(msgspec.json.encode(seals))

    target = write_folder(folder / f"{PREFIX}{state.version:06d}", fill_and_seal)
    for path in [*folder.glob(f"{PARTIAL}*"), *folder.glob(f"{DAMAGED}{PREFIX}*")]:
        shutil.rmtree(path)
    for path in _complete(folder)[:-keep_last]:
        # Under another name: whoever reads it meanwhile finds all of it, or nothing.
        aside = path.with_name(f"{PARTIAL}removed-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(path.rename(aside))
    return target


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint under `RUN/checkpoints` that is as it was written, or None where there is none at all.

    One whose replacement was killed before the new one had its place gets its name back.

    Raises:
        LearnerError: All are damaged, or the newest is of another format.
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
        raise LearnerError(f"no checkpoint is whole: {'; '.join(faults)}; restore one of these folders, or begin a new run")
    return None


def rename_newer(checkpoint: Path) -> None:
    """Rename the checkpoints that were passed over for this one, so that none counts among those that are kept."""
    passed_over = _complete(checkpoint.parent)
    for path in passed_over[passed_over.index(checkpoint) + 1 :]:
        aside = path.with_name(f"{DAMAGED}{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)


def damage_of(checkpoint: Path) -> str:
    """Return the first file of a checkpoint that is not as it was written and what is wrong with it; empty where all are.

    Raises:
        LearnerError: It is of another format.
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
    """Return what a whole checkpoint's `trainer/state.json` says."""
    return msgspec.json.decode((checkpoint / STATE).read_bytes(), type=TrainerState)


def write_folder(target: Path, fill: Callable[[Path], None]) -> Path:
    """Make a folder whole or not at all: fill one of another name, sync its files, rename it.

    Args:
        target: The final name; a folder already there is replaced, and is kept aside until the new one has its place.
        fill: Writes into the folder it is given.

    Returns:
        `target`.

    Raises:
        LearnerError: The disk takes no more; what was written of it is removed, and a folder already there stays.
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
        if not isinstance(error, OSError | SafetensorError) and "(os error " not in str(error):  # which a tokenizer raises so
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
