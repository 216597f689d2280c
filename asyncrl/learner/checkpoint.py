"""What the learner writes of its weights: checkpoints, and of a recorded run the fingerprint of every version.

A checkpoint is a Hugging Face folder, with what training needs to go on beside it:

    checkpoints/step-000050/          AutoModelForCausalLM.from_pretrained opens it
        config.json model.safetensors tokenizer.json ...
        trainer/optimizer.safetensors moments, update counts, master weights
        trainer/critic.safetensors    the critic's parameters, and critic_optimizer.safetensors, where there is one
        trainer/rng.safetensors       torch's random state, one tensor a device
        trainer/state.json            version, what steps remember, the controller's own part
        trainer/manifest.json         size and xxh3 of every other file; written last

checkpoint_folder.py writes, finds and removes them. RUN/record/versions.jsonl has the fingerprints. Invariant: no pickle.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from asyncrl.learner.checkpoint_folder import TrainerState, read_state, write_checkpoint
from asyncrl.learner.model.critic import load_critic, save_critic
from asyncrl.learner.model.policy import has_adapters, publishable_tensors, save_adapters
from asyncrl.learner.ranks.fsdp import whole_tensors
from asyncrl.learner.train_state import TrainState
from asyncrl.models.layout import bytes_of

SHARD_BYTES = 4 << 30
VERSIONS_FILE = "versions.jsonl"
OPTIMIZER, CRITIC, CRITIC_OPTIMIZER = "optimizer.safetensors", "critic.safetensors", "critic_optimizer.safetensors"


def save_checkpoint(
    folder: Path,
    train_state: TrainState,
    tokenizer: Any,  # noqa: ANN401 - transformers has no one class
    state: TrainerState,
    keep_last: int,
) -> Path:
    """Write a checkpoint of `train_state`, the policy at `state.version`; otherwise as `write_checkpoint`."""

    def fill(partial: Path) -> None:
        model, tensors = train_state.model, publishable_tensors(train_state.model)
        if has_adapters(model):
            save_adapters(model, partial)
        elif not any(isinstance(tensor, DTensor) for tensor in tensors.values()):
            model.save_pretrained(partial)
        else:  # divided over ranks: gathered tensor by tensor and written shard by shard; every rank has whole buffers
            kept = model.state_dict().keys()
            tensors |= {name: buffer for name, buffer in model.named_buffers() if name in kept}
            save_shards(whole_tensors(tensors.items()), tensors, partial)
            model.config.save_pretrained(partial)
            if model.can_generate():
                model.generation_config.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        trainer = partial / "trainer"
        train_state.optimizer.save(trainer / OPTIMIZER)
        if train_state.critic is not None and train_state.critic_optimizer is not None:
            save_critic(train_state.critic, trainer / CRITIC)
            train_state.critic_optimizer.save(trainer / CRITIC_OPTIMIZER)
        rng = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            rng |= {f"cuda:{index}": of_device for index, of_device in enumerate(torch.cuda.get_rng_state_all())}
        save_file(rng, trainer / "rng.safetensors")

    return write_checkpoint(folder, state, fill, keep_last)


def contribute_checkpoint(state: TrainState) -> None:
    """Help rank 0 to gather what it saves: every tensor that `save_checkpoint` makes whole, in the same order."""
    parts: list[Iterable[tuple[str, torch.Tensor]]] = [publishable_tensors(state.model).items(), state.optimizer.named_state()]
    if state.critic is not None and state.critic_optimizer is not None:
        parts += [state.critic.named_parameters(), state.critic_optimizer.named_state()]
    for _ in whole_tensors(itertools.chain.from_iterable(parts)):
        pass


def load_trainer(checkpoint: Path, train_state: TrainState) -> TrainerState:
    """Take over optimizer, critic, memory and random state of a whole checkpoint whose model is loaded already.

    Raises:
        LearnerError: The checkpoint is of another model, or has no critic and the state has one.
    """
    trainer, state = checkpoint / "trainer", read_state(checkpoint)
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


class VersionRecord(msgspec.Struct, frozen=True):
    """One version; a learner that repeats a step makes another line of it."""

    version: int
    fingerprint: str


def record_of(version: int, model: PreTrainedModel) -> VersionRecord:
    """Return a version's record: xxh3-128 over names and bytes of everything that is trained."""
    whole = xxhash.xxh3_128()
    with torch.no_grad():
        for name, tensor in publishable_tensors(model).items():
            whole.update(name.encode())
            whole.update(bytes_of(tensor.cpu().contiguous()).data)
    return VersionRecord(version, whole.hexdigest())
