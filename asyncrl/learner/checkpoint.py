"""Checkpoints of the learner: a Hugging Face folder, with what training needs to go on beside it.

    checkpoints/step-000050/          AutoModelForCausalLM.from_pretrained opens it
        config.json model.safetensors tokenizer.json ...
        trainer/optimizer.safetensors moments, update counts, master weights
        trainer/critic.safetensors    the critic's parameters, and critic_optimizer.safetensors, where there is one
        trainer/rng.safetensors       torch's random state, one tensor a device
        trainer/state.json            version, what steps remember, the controller's own part; written last

Invariants: a folder of the final name is complete (it is written under another name, synced and renamed); whatever else lies
there is ignored and, once a newer one is complete, removed; no pickle. Called by learner/worker.py, learner/start.py and
learner/follower.py.
"""

from __future__ import annotations

import copy
import itertools
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from asyncrl.errors import LearnerError
from asyncrl.learner.critic import load_critic, save_critic
from asyncrl.learner.divided import is_divided, whole_tensors
from asyncrl.learner.lora import has_adapters, publishable_tensors, save_policy
from asyncrl.learner.shards import save_tensors
from asyncrl.learner.trainee import StepMemory, Trainee

PREFIX = "step-"
PARTIAL = ".partial-"
STATE_FORMAT = 1
OPTIMIZER, CRITIC, CRITIC_OPTIMIZER = "optimizer.safetensors", "critic.safetensors", "critic_optimizer.safetensors"


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
    trainee: Trainee,
    tokenizer: Any,  # noqa: ANN401 - transformers has no one class
    state: TrainerState,
    keep_last: int,
) -> Path:
    """Write a checkpoint and remove what it makes superfluous.

    Args:
        folder: `RUN/checkpoints`; made where it is missing.
        trainee: The policy at `state.version`, and what is trained with it.
        tokenizer: The policy's.
        state: Everything else.
        keep_last: How many complete checkpoints stay.

    Returns:
        The checkpoint's own folder. One that is there already for this version is replaced.
    """

    def fill(partial: Path) -> None:
        _save_policy(trainee.model, tokenizer, partial)
        trainer = partial / "trainer"
        trainer.mkdir()
        trainee.optimizer.save(trainer / OPTIMIZER)
        if trainee.critic is not None and trainee.critic_optimizer is not None:
            save_critic(trainee.critic, trainer / CRITIC)
            trainee.critic_optimizer.save(trainer / CRITIC_OPTIMIZER)
        save_file(_rng_state(), trainer / "rng.safetensors")
        (trainer / "state.json").write_bytes(msgspec.json.encode(state))

    target = write_folder(folder / f"{PREFIX}{state.version:06d}", fill)
    _remove_old(folder, keep_last)
    return target


def contribute_checkpoint(trainee: Trainee) -> None:
    """Help rank 0 to gather what it saves: every tensor that `save_checkpoint` makes whole, in the same order."""
    parts: list[Iterable[tuple[str, torch.Tensor]]] = [
        publishable_tensors(trainee.model).items(),
        trainee.optimizer.named_state(),
    ]
    if trainee.critic is not None and trainee.critic_optimizer is not None:
        parts += [trainee.critic.named_parameters(), trainee.critic_optimizer.named_state()]
    for _ in whole_tensors(itertools.chain.from_iterable(parts)):
        pass


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint under `RUN/checkpoints`, or None."""
    complete = _complete(folder)
    return complete[-1] if complete else None


def load_trainer(checkpoint: Path, trainee: Trainee) -> TrainerState:
    """Take over optimizer, critic, memory and random state of a checkpoint whose model is loaded already.

    Raises:
        LearnerError: The checkpoint is of another format, of another model, or has no critic and the trainee has one.
    """
    trainer = checkpoint / "trainer"
    state = msgspec.json.decode((trainer / "state.json").read_bytes(), type=TrainerState)
    if state.format != STATE_FORMAT:
        raise LearnerError(f"{checkpoint} has format {state.format}, this version of asyncrl reads {STATE_FORMAT}")
    trainee.optimizer.load(trainer / OPTIMIZER)
    if trainee.critic is not None and trainee.critic_optimizer is not None:
        load_critic(trainee.critic, trainer / CRITIC)
        trainee.critic_optimizer.load(trainer / CRITIC_OPTIMIZER)
    trainee.memory = copy.deepcopy(state.memory)
    _restore_rng(load_file(trainer / "rng.safetensors"))
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
        shutil.rmtree(target)
    partial.rename(target)
    _sync(target.parent)
    return target


def _save_policy(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:  # noqa: ANN401
    """Write the policy; of one that is divided over ranks, at most one shard is whole in memory at a time."""
    tensors = publishable_tensors(model)
    if not is_divided(tensors.values()):
        save_policy(model, tokenizer, folder)
    elif has_adapters(model):
        save_policy(model, tokenizer, folder, whole=dict(whole_tensors(tensors.items())))
    else:
        save_tensors(whole_tensors(tensors.items()), model.config, folder, None, "the policy")
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _complete(folder: Path) -> list[Path]:
    found = [path for path in folder.glob(f"{PREFIX}*") if (path / "trainer" / "state.json").is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)))


def _remove_old(folder: Path, keep_last: int) -> None:
    for path in [*_complete(folder)[:-keep_last], *folder.glob(f"{PARTIAL}*")]:
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    if path.is_symlink():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rng_state() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _restore_rng(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    for index in range(torch.cuda.device_count()):
        if f"cuda:{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda:{index}"], index)
