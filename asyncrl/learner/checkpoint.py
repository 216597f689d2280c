"""Checkpoints of the learner: a Hugging Face folder, with what training needs to go on beside it.

    checkpoints/step-000050/          AutoModelForCausalLM.from_pretrained opens it
        config.json model.safetensors tokenizer.json ...
        trainer/optimizer.safetensors moments, update counts, master weights
        trainer/critic.safetensors    the critic's parameters, and critic_optimizer.safetensors, where there is one
        trainer/rng.safetensors       torch's random state, one tensor a device
        trainer/state.json            version, what steps remember, the controller's own part
        trainer/manifest.json         size and xxh3 of every other file; written last

Invariants: a folder of the final name is complete (it is written, and removed, under another name); what is half written
or was found damaged is ignored and, once a newer one is complete, removed; nothing is loaded that its manifest does not confirm;
no pickle.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from asyncrl.errors import LearnerError
from asyncrl.learner.model.critic import load_critic, save_critic
from asyncrl.learner.model.lora import has_adapters, publishable_tensors, save_policy
from asyncrl.learner.ranks.fsdp import whole_tensors
from asyncrl.learner.train_state import StepMemory, TrainState

log = logging.getLogger(__name__)

PREFIX = "step-"
PARTIAL, DAMAGED = ".partial-", "damaged-"
STATE_FORMAT = 2
SHARD_BYTES = 4 << 30
STATE, MANIFEST = Path("trainer/state.json"), Path("trainer/manifest.json")
OPTIMIZER, CRITIC, CRITIC_OPTIMIZER = "optimizer.safetensors", "critic.safetensors", "critic_optimizer.safetensors"


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


def save_checkpoint(
    folder: Path,
    train_state: TrainState,
    tokenizer: Any,  # noqa: ANN401 - transformers has no one class
    state: TrainerState,
    keep_last: int,
) -> Path:
    """Write a checkpoint and remove what it makes superfluous.

    Args:
        folder: `RUN/checkpoints`; made where it is missing.
        train_state: The policy at `state.version`, and what is trained with it.
        tokenizer: The policy's.
        state: Everything else.
        keep_last: How many complete checkpoints stay.

    Returns:
        The checkpoint's own folder. One that is there already for this version is replaced.
    """

    def fill(partial: Path) -> None:
        _save_policy(train_state.model, tokenizer, partial)
        trainer = partial / "trainer"
        trainer.mkdir()
        train_state.optimizer.save(trainer / OPTIMIZER)
        if train_state.critic is not None and train_state.critic_optimizer is not None:
            save_critic(train_state.critic, trainer / CRITIC)
            train_state.critic_optimizer.save(trainer / CRITIC_OPTIMIZER)
        rng = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            rng |= {f"cuda:{index}": of_device for index, of_device in enumerate(torch.cuda.get_rng_state_all())}
        save_file(rng, trainer / "rng.safetensors")
        (partial / STATE).write_bytes(msgspec.json.encode(state))
        seals = {str(path.relative_to(partial)): _seal(path) for path in sorted(partial.rglob("*")) if path.is_file()}
        (partial / MANIFEST).write_bytes(msgspec.json.encode(seals))

    target = write_folder(folder / f"{PREFIX}{state.version:06d}", fill)
    for path in [*folder.glob(f"{PARTIAL}*"), *folder.glob(f"{DAMAGED}{PREFIX}*")]:
        shutil.rmtree(path)
    for path in _complete(folder)[:-keep_last]:
        _remove(path)
    return target


def contribute_checkpoint(state: TrainState) -> None:
    """Help rank 0 to gather what it saves: every tensor that `save_checkpoint` makes whole, in the same order."""
    parts: list[Iterable[tuple[str, torch.Tensor]]] = [
        publishable_tensors(state.model).items(),
        state.optimizer.named_state(),
    ]
    if state.critic is not None and state.critic_optimizer is not None:
        parts += [state.critic.named_parameters(), state.critic_optimizer.named_state()]
    for _ in whole_tensors(itertools.chain.from_iterable(parts)):
        pass


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint under `RUN/checkpoints` that is as it was written, or None where there is none at all.

    Raises:
        LearnerError: All are damaged, or the newest is of another format.
    """
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
    try:
        found = json.loads((checkpoint / STATE).read_bytes()).get("format")
        if type(found) is int and found != STATE_FORMAT and not (checkpoint / MANIFEST).exists():
            raise LearnerError(f"{checkpoint} has format {found}, this version of asyncrl reads {STATE_FORMAT}")
        seals = msgspec.json.decode((checkpoint / MANIFEST).read_bytes(), type=dict[str, FileSeal])
    except (OSError, ValueError, AttributeError, msgspec.MsgspecError) as error:
        return f"checkpoint {checkpoint} is damaged: {STATE.parent} cannot be read: {error}"
    if str(STATE) not in seals:
        return f"checkpoint {checkpoint} is damaged: {MANIFEST} does not name {STATE}"
    for name, written in seals.items():
        try:
            is_same = _seal(checkpoint / name) == written
        except OSError as error:
            return f"checkpoint {checkpoint} is damaged: {name}: {error.strerror}"
        if not is_same:
            return f"checkpoint {checkpoint} is damaged: {name} is not what was written"
    return ""


def _seal(path: Path) -> FileSeal:
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            size += len(chunk)
    return FileSeal(size, digest.hexdigest())


def load_trainer(checkpoint: Path, train_state: TrainState) -> TrainerState:
    """Take over optimizer, critic, memory and random state of a whole checkpoint whose model is loaded already.

    Raises:
        LearnerError: The checkpoint is of another model, or has no critic and the state has one.
    """
    trainer = checkpoint / "trainer"
    state = msgspec.json.decode((checkpoint / STATE).read_bytes(), type=TrainerState)
    train_state.optimizer.load(trainer / OPTIMIZER)
    if train_state.critic is not None and train_state.critic_optimizer is not None:
        load_critic(train_state.critic, trainer / CRITIC)
        train_state.critic_optimizer.load(trainer / CRITIC_OPTIMIZER)
    train_state.memory = copy.deepcopy(state.memory)
    rng = load_file(trainer / "rng.safetensors")
    torch.set_rng_state(rng["cpu"])
    for index in range(torch.cuda.device_count()):
        if f"cuda:{index}" in rng:
            torch.cuda.set_rng_state(rng[f"cuda:{index}"], index)
    return state


def write_folder(target: Path, fill: Callable[[Path], None]) -> Path:
    """Make a folder whole or not at all: fill one of another name, sync its files, rename it.

    Args:
        target: The final name; a folder already there is replaced.
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
            _sync(path)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise LearnerError(f"{target} cannot be written: {error}; make room on its disk, then `asyncrl resume`") from error
    if target.exists():
        _remove(target)
    partial.rename(target)
    _sync(target.parent)
    return target


def _remove(folder: Path) -> None:
    """Remove a folder under another name: whoever reads it meanwhile finds all of it, or nothing."""
    aside = folder.with_name(f"{PARTIAL}removed-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(folder.rename(aside))


def _save_policy(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:  # noqa: ANN401
    """Write the policy. One that is divided over ranks is gathered tensor by tensor and written shard by shard."""
    tensors = publishable_tensors(model)
    if not any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        save_policy(model, tokenizer, folder)
    elif has_adapters(model):
        save_policy(model, tokenizer, folder, whole=dict(whole_tensors(tensors.items())))
    else:
        save_shards(whole_tensors(tensors.items()), tensors, folder)
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def save_shards(
    named: Iterable[tuple[str, torch.Tensor]], like: Mapping[str, torch.Tensor], folder: Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write safetensors shards as Hugging Face lays them out; each is in memory only until its last tensor has come.

    Args:
        named: Tensors in the order in which they become whole.
        like: Shape and dtype of each of them.
        folder: Has no weights yet.
        shard_bytes: Most bytes of a shard, unless one tensor has more.
    """
    sizes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in like.items()}
    layout = split_torch_state_dict_into_shards(sizes, max_shard_size=shard_bytes)
    file_of = {name: file for file, names in layout.filename_to_tensors.items() for name in names}
    shards: dict[str, dict[str, torch.Tensor]] = {file: {} for file in layout.filename_to_tensors}
    for name, tensor in named:
        file = file_of[name]
        shards[file][name] = tensor.contiguous()
        if len(shards[file]) == len(layout.filename_to_tensors[file]):
            save_file(shards.pop(file), folder / file, metadata={"format": "pt"})
    if layout.is_sharded:
        index = {"metadata": layout.metadata, "weight_map": layout.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _complete(folder: Path) -> list[Path]:
    named = re.compile(rf"{PREFIX}[0-9]+")
    found = [path for path in folder.glob(f"{PREFIX}*") if named.fullmatch(path.name) and (path / STATE).is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)))


def _sync(path: Path) -> None:
    if path.is_symlink():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
