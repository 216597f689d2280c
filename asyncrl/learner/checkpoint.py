"""Checkpoints of the learner, and its initial state.

The learner writes checkpoints and, if the run is recorded, the fingerprint of every version. It starts from the newest
checkpoint, from the run's initial model, or makes that model. The model (random weights, warm start) is made once per run:
`RUN/model` is written atomically, and a restart before the first checkpoint starts from it.

A checkpoint is a Hugging Face folder that also has the state needed to continue training:

    checkpoints/step-000050/          AutoModelForCausalLM.from_pretrained opens it
        config.json model.safetensors tokenizer.json ...
        trainer/optimizer.safetensors moments, update counts, master weights
        trainer/critic.safetensors    the critic's parameters, and critic_optimizer.safetensors, if there is a critic
        trainer/rng.safetensors       torch's random state, one tensor per device
        trainer/state.json            version, state that steps pass on, the controller's own state
        trainer/manifest.json         size and xxh3 of every other file; written last

checkpoint_folder.py writes, finds and removes them. RUN/record/versions.jsonl has the fingerprints. Invariant: no pickle.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.algorithms.advantages import load_advantage
from asyncrl.algorithms.corrections import load_correction
from asyncrl.algorithms.losses import load_loss
from asyncrl.config.algorithm import AlgorithmConfig, PythonCorrection
from asyncrl.config.learner import LearnerConfig, PretrainedModel
from asyncrl.config.run import RunConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.checkpoint_folder import (
    TrainerState,
    newest_checkpoint,
    read_state,
    rename_newer,
    write_checkpoint,
    write_folder,
)
from asyncrl.learner.model.policy import (
    Critic,
    Reference,
    build_critic_optimizer,
    build_scratch,
    has_adapters,
    link_folder,
    made_ready,
    open_model,
    open_policy,
    open_tokenizer,
    publishable_tensors,
    save_adapters,
    save_model,
)
from asyncrl.learner.model.sft_warmup import StartAbandoned, tokenise, warm_start
from asyncrl.learner.optim.optimizer import PolicyOptimizer
from asyncrl.learner.ranks.fsdp import Divider, save_whole, whole_tensors
from asyncrl.learner.ranks.group import Begin, RankLauncher, Ranks, divided_like
from asyncrl.learner.train_state import TrainState
from asyncrl.models.causal import check_folder, refuse_adapters
from asyncrl.models.layout import bytes_of

log = logging.getLogger(__name__)

Examples = Callable[[], Sequence[tuple[str, str]]]
"""Makes the task's worked examples, (prompt, completion) each; called only for a warm start."""
_LOADING = threading.Lock()
"""Held while a model is made or opened: transformers then replaces functions of its own classes, and torch's seed is global."""
LOOK_S = 1.0
"""Time between two looks whether a start that waits for _LOADING was given up."""
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
            save_shards(model, whole_tensors(tensors.items()), tensors, partial)
            model.config.save_pretrained(partial)
            if model.can_generate():
                model.generation_config.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        trainer = partial / "trainer"
        save_whole(train_state.optimizer.named_state(), trainer / OPTIMIZER)
        if train_state.critic is not None and train_state.critic_optimizer is not None:
            save_whole(train_state.critic.named_parameters(), trainer / CRITIC)
            save_whole(train_state.critic_optimizer.named_state(), trainer / CRITIC_OPTIMIZER)
        rng = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            rng |= {f"cuda:{index}": of_device for index, of_device in enumerate(torch.cuda.get_rng_state_all())}
        save_file(rng, trainer / "rng.safetensors")

    return write_checkpoint(folder, state, fill, keep_last)


def contribute_checkpoint(state: TrainState) -> None:
    """Do another rank's part of `save_checkpoint`: gather the same tensors in the same order as rank 0."""
    parts: list[Iterable[tuple[str, torch.Tensor]]] = [publishable_tensors(state.model).items(), state.optimizer.named_state()]
    if state.critic is not None and state.critic_optimizer is not None:
        parts += [state.critic.named_parameters(), state.critic_optimizer.named_state()]
    for _ in whole_tensors(itertools.chain.from_iterable(parts)):
        pass


def load_trainer(checkpoint: Path, train_state: TrainState) -> TrainerState:
    """Load optimizer, critic, memory and random state of an undamaged checkpoint whose model is already loaded.

    Raises:
        LearnerError: The checkpoint belongs to another model, or it has no critic but the state does.
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


def load_critic(critic: Critic, path: Path) -> None:
    """Load the critic's parameters from a safetensors file.

    Raises:
        LearnerError: The file is missing or belongs to another critic.
    """
    if not path.is_file():
        raise LearnerError(f"{path.parent.parent} was written without a critic: remove [algorithm.critic], or start a new run")
    stored, own = load_file(path), dict(critic.named_parameters())
    if {name: tensor.shape for name, tensor in stored.items()} != {name: parameter.shape for name, parameter in own.items()}:
        raise LearnerError(f"{path} is of another critic: algorithm.critic.kind and path must stay those of the run")
    with torch.no_grad():
        for name, tensor in stored.items():
            own[name].copy_(divided_like(tensor, own[name]))


def save_shards(
    model: PreTrainedModel,
    named: Iterable[tuple[str, torch.Tensor]],
    like: Mapping[str, torch.Tensor],
    folder: Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write safetensors shards in Hugging Face's layout; each is in memory only until its last tensor has arrived.

    They have the names and forms that `save_pretrained` writes, unless it makes one tensor of several: then the model's own.

    Args:
        model: The model of these tensors.
        named: Tensors in the order in which they are gathered.
        like: Shape and dtype of each tensor.
        folder: A folder without weights.
        shard_bytes: Maximum bytes of a shard, unless one tensor is larger.
    """
    sizes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in like.items()}
    parts = {name: revert_weight_conversion(model, {name: size}) for name, size in sizes.items()}
    written = {part: size for of_one in parts.values() for part, size in of_one.items()}  # views: their storage is the whole's
    whole = revert_weight_conversion(model, dict(sizes))
    if {part: size.shape for part, size in written.items()} == {part: size.shape for part, size in whole.items()}:
        sizes = {part: torch.empty(size.shape, dtype=size.dtype, device="meta") for part, size in written.items()}
        named = (pair for name, tensor in named for pair in revert_weight_conversion(model, {name: tensor}).items())
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
    """The record of one version; a learner that repeats a step writes another line for the version."""

    version: int
    fingerprint: str


def record_of(version: int, model: PreTrainedModel) -> VersionRecord:
    """Return a version's record: xxh3-128 over names and bytes of all published tensors."""
    whole = xxhash.xxh3_128()
    with torch.no_grad():
        for name, tensor in publishable_tensors(model).items():
            whole.update(name.encode())
            whole.update(bytes_of(tensor.cpu().contiguous()).data)
    return VersionRecord(version, whole.hexdigest())


@dataclass(slots=True)
class InitialState:
    """A policy ready to train."""

    train_state: TrainState
    tokenizer: Any
    version: int
    model_folder: Path
    """`RUN/model`."""
    checkpoint: Path | None = None
    """The checkpoint from which it was loaded; None at version 0."""
    saved: TrainerState = field(default_factory=lambda: TrainerState(version=0))
    """Content of that checkpoint's `state.json`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the warm start, if this call did one."""


def load_or_make(
    config: RunConfig,
    run_folder: Path,
    examples: Examples,
    alphabet: str,
    launcher: RankLauncher | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> InitialState:
    """Load or make the policy.

    Args:
        config: `model`, `learner`, `seed` and `num_steps` are read.
        run_folder: Folder of the run; `model/` is written into it the first time.
        examples: For the warm start of a scratch model.
        alphabet: For the tokenizer of a scratch model.
        launcher: Launcher of the other ranks, which wait for the model on disk; None: there are none.
        stopped: Called before every step of the warm start, and while another model is opened in this process.

    Raises:
        ConfigError: A function of the algorithm cannot be imported, the model's folder is not usable, or the warm start has no
            examples.
        LearnerError: All checkpoints of the run are damaged.
        StartAbandoned: `stopped` returned true.
    """
    resolve_functions(config.algorithm)
    folder, metrics = run_folder / "model", {}
    while not _LOADING.acquire(timeout=LOOK_S):
        if stopped():
            raise StartAbandoned("stopped while another model was opened")
    try:
        if not (folder / "config.json").is_file():
            metrics = _make_model_folder(config, folder, examples, alphabet, stopped)
        checkpoint = newest_checkpoint(run_folder / "checkpoints")
        if checkpoint is not None:
            rename_newer(checkpoint)
        ranks = Ranks()
        if launcher is not None:
            ranks = launcher.join()
            launcher.tell(Begin("" if checkpoint is None else str(checkpoint)))
        train_state = build_train_state(config, folder, checkpoint, ranks)
        saved = load_trainer(checkpoint, train_state) if checkpoint else TrainerState(version=0)
        log.info("at version %d, from %s", saved.version, checkpoint or folder)
        tokenizer = open_tokenizer(folder, trust_remote_code=config.trusts_code)
    finally:
        _LOADING.release()
    return InitialState(train_state, tokenizer, saved.version, folder, checkpoint, saved, metrics)


def resolve_functions(algorithm: AlgorithmConfig) -> None:
    """Import the algorithm's functions, before anything slow starts.

    Raises:
        ConfigError: A function cannot be imported.
    """
    if algorithm.kind == "dpo":
        return
    load_advantage(algorithm.advantage)
    load_loss(algorithm.loss)
    for item in algorithm.corrections:
        if isinstance(item, PythonCorrection):
            load_correction(item.path)


def build_train_state(
    config: RunConfig, model_folder: Path, checkpoint: Path | None = None, ranks: Ranks | None = None
) -> TrainState:
    """Open the policy and the algorithm's other models, divided over the ranks if there are several.

    Args:
        config: `algorithm`, `learner`, `model`, `seed` and `num_steps` are read.
        model_folder: `RUN/model`, the policy at version 0.
        checkpoint: Source of the policy's weights; None: `model_folder`.
        ranks: All ranks, which must all call this; None: there is one.

    Raises:
        ConfigError: A folder cannot be opened.
    """
    ranks = ranks or Ranks()
    algorithm, learner = config.algorithm, config.learner
    divider = Divider(learner.device, ranks.size)
    # Divided models are opened in host memory and moved to the device unit by unit.
    opened = learner if ranks.size == 1 else msgspec.structs.replace(learner, device="cpu")
    model = divider.policy(open_policy(msgspec.structs.replace(config, learner=opened), model_folder, checkpoint))
    state = TrainState(model, PolicyOptimizer(model.named_parameters(), learner, config.num_steps), ranks=ranks)
    path = algorithm.reference.path
    if algorithm.needs_reference and algorithm.reference.where == "learner":
        if learner.lora is not None and not path:
            state.reference = Reference(
                model, learner.logprob_chunk_tokens, lambda: import_module("asyncrl.models.adapters").adapters_off(model)
            )
        else:
            plain = msgspec.structs.replace(opened, gradient_checkpointing=False)
            folder = Path(path or model_folder)
            frozen = open_model(folder, plain, trust_remote_code=config.trusts_code, fp32_head=config.model.fp32_head)
            state.reference = Reference(divider.policy(frozen), learner.logprob_chunk_tokens)
    if algorithm.critic is not None:
        if algorithm.critic.kind == "head":
            critic = Critic(model.config.get_text_config().hidden_size).to(model.device)
        else:
            folder = Path(algorithm.critic.path or model_folder)
            body = open_model(folder, opened, trust_remote_code=config.trusts_code, needs_head=False).base_model
            critic = Critic(body.config.get_text_config().hidden_size, body)
        state.critic = divider.critic(critic)
        state.critic_optimizer = build_critic_optimizer(
            state.critic, algorithm.critic, learner, config.num_steps, state.optimizer
        )
    return state


def _make_model_folder(
    config: RunConfig, folder: Path, examples: Examples, alphabet: str, stopped: Callable[[], bool]
) -> dict[str, float]:
    if isinstance(config.model, PretrainedModel):
        source = Path(config.model.path)
        refuse_adapters(source)
        check_folder(source)
        write_folder(folder, lambda partial: link_folder(source.resolve(), partial))
        return {}
    model, tokenizer = build_scratch(config.model, alphabet, config.seed)
    metrics: dict[str, float] = {}
    if config.model.warm_start is not None:
        made_ready(model, LearnerConfig(device=config.learner.device))
        worked, started_s, num_threads = tokenise(examples(), tokenizer), time.perf_counter(), torch.get_num_threads()
        # Use all cores: before version 0 all other processes wait.
        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        try:
            metrics = warm_start(model, worked, config.model.warm_start, config.learner, config.seed, stopped)
        finally:
            torch.set_num_threads(num_threads)
        metrics["warm_start/seconds"] = time.perf_counter() - started_s
    write_folder(folder, lambda partial: save_model(model.cpu(), tokenizer, partial))
    return metrics
