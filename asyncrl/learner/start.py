"""Where the learner stands when its process begins: at the newest checkpoint, at the run's initial model, or at nothing yet.

Invariant: what is made here once (random weights, warm start) is made once a run: `RUN/model` is written whole or not at all,
and a restart before the first checkpoint starts from it. Called by learner/worker.py, off the event loop, learner/follower.py
and experiments.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import PreTrainedModel

from asyncrl.algorithms.corrections import load_correction
from asyncrl.config.algorithm import AlgorithmConfig, LearnerConfig
from asyncrl.config.corrections import PythonCorrection
from asyncrl.config.model import PretrainedModel
from asyncrl.config.run import RunConfig
from asyncrl.learner.checkpoint import TrainerState, latest_checkpoint, load_trainer, write_folder
from asyncrl.learner.crew import Crew
from asyncrl.learner.critic import build_critic, build_critic_optimizer
from asyncrl.learner.divided import Divider, divider_of
from asyncrl.learner.lora import adapters_off, open_policy
from asyncrl.learner.micro_batches import load_advantage_once
from asyncrl.learner.model import build_scratch, link_pretrained, made_ready, open_model, open_tokenizer, save_model
from asyncrl.learner.optim import build_optimizer
from asyncrl.learner.orders import Begin
from asyncrl.learner.policy_loss import load_loss_once
from asyncrl.learner.ranks import OneRank, Ranks
from asyncrl.learner.reference import AdapterOffReference, FrozenReference
from asyncrl.learner.trainee import Reference, Trainee
from asyncrl.learner.warm_start import tokenise, warm_start
from asyncrl.models.causal import check_folder

log = logging.getLogger(__name__)

Examples = Callable[[], Sequence[tuple[str, str]]]
"""Makes the task's worked examples, (prompt, completion) each; called only where there is a warm start to do."""


@dataclass(slots=True)
class Standing:
    """A policy ready to train."""

    trainee: Trainee
    tokenizer: Any
    version: int
    model_folder: Path
    """`RUN/model`."""
    checkpoint: Path | None = None
    """The checkpoint it comes from; None at version 0."""
    state: TrainerState = field(default_factory=lambda: TrainerState(version=0))
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the warm start, where there was one just now."""


def prepare_standing(
    config: RunConfig,
    run_folder: Path,
    examples: Examples,
    alphabet: str,
    crew: Crew | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Standing:
    """Load or make the policy.

    Args:
        config: `model`, `learner`, `seed` and `num_steps` are read.
        run_folder: The run; `model/` is written into it the first time.
        examples: For the warm start of a scratch model.
        alphabet: For the tokenizer of a scratch model.
        crew: The other ranks, who wait for the model on disk; None: there are none.
        stopped: Asked now and then during the warm start.

    Raises:
        ConfigError: A name or path of the algorithm leads to no function, the model's folder is not usable, or the warm start
            has no examples.
        StartAbandoned: `stopped` said so.
    """
    resolve_functions(config.algorithm)
    folder, metrics = run_folder / "model", {}
    if not (folder / "config.json").is_file():
        metrics = _make_model_folder(config, folder, examples, alphabet, stopped)
    checkpoint = latest_checkpoint(run_folder / "checkpoints")
    ranks = OneRank() if crew is None else crew.muster()
    if crew is not None:
        crew.tell(Begin("" if checkpoint is None else str(checkpoint)))
    trainee = build_trainee(config, folder, checkpoint, ranks)
    state = load_trainer(checkpoint, trainee) if checkpoint else TrainerState(version=0)
    log.info("standing at version %d, from %s", state.version, checkpoint or folder)
    tokenizer = open_tokenizer(folder, trust_remote_code=_trusted(config))
    return Standing(trainee, tokenizer, state.version, folder, checkpoint, state, metrics)


def resolve_functions(algorithm: AlgorithmConfig) -> None:
    """Import what the algorithm names, before anything slow is begun for it.

    Raises:
        ConfigError: A name or path leads to no function.
    """
    if algorithm.kind == "dpo":
        return
    load_advantage_once(algorithm.advantage)
    load_loss_once(algorithm.loss)
    for item in algorithm.corrections:
        if isinstance(item, PythonCorrection):
            load_correction(item.path)


def build_trainee(config: RunConfig, model_folder: Path, checkpoint: Path | None = None, ranks: Ranks | None = None) -> Trainee:
    """Open the policy, and what the algorithm needs beside it, divided over the ranks where there are several.

    Args:
        config: `algorithm`, `learner`, `model` and `num_steps` are read.
        model_folder: `RUN/model`, the policy at version 0.
        checkpoint: Where the policy's weights come from; None: from `model_folder`.
        ranks: All call; None: there is one.

    Raises:
        ConfigError: A folder cannot be opened.
    """
    ranks = OneRank() if ranks is None else ranks
    divide = divider_of(config.learner.device, ranks.size)
    opened = _opened_whole(config, ranks)
    model = divide.policy(open_policy(opened, model_folder, checkpoint))
    trainee = Trainee(model, build_optimizer(model, config.learner, config.num_steps), ranks=ranks)
    algorithm = config.algorithm
    if algorithm.needs_reference and algorithm.reference.where == "learner":
        trainee.reference = _open_reference(opened, model_folder, model, divide)
    if algorithm.critic is not None:
        critic = build_critic(algorithm.critic, opened.learner, model, model_folder, trust_remote_code=_trusted(config))
        trainee.critic = divide.critic(critic)
        trainee.critic_optimizer = build_critic_optimizer(
            trainee.critic, algorithm.critic, config.learner, config.num_steps, trainee.optimizer
        )
    return trainee


def _open_reference(config: RunConfig, model_folder: Path, policy: PreTrainedModel, divide: Divider) -> Reference:
    """Return the policy without its adapters, where that is the reference, else a second model."""
    path, chunk_tokens = config.algorithm.reference.path, config.learner.logprob_chunk_tokens
    if config.learner.lora is not None and not path:
        return AdapterOffReference(policy, lambda: adapters_off(policy), chunk_tokens)
    plain = msgspec.structs.replace(config.learner, gradient_checkpointing=False)
    model = open_model(Path(path or model_folder), plain, trust_remote_code=_trusted(config), fp32_head=config.model.fp32_head)
    return FrozenReference(divide.policy(model), chunk_tokens)


def _opened_whole(config: RunConfig, ranks: Ranks) -> RunConfig:
    """Return the config to open models with: in host memory where they are then divided, a unit at a time on the device."""
    if ranks.size == 1:
        return config
    return msgspec.structs.replace(config, learner=msgspec.structs.replace(config.learner, device="cpu"))


def _trusted(config: RunConfig) -> bool:
    return isinstance(config.model, PretrainedModel) and config.model.trust_remote_code


def _make_model_folder(
    config: RunConfig, folder: Path, examples: Examples, alphabet: str, stopped: Callable[[], bool]
) -> dict[str, float]:
    if isinstance(config.model, PretrainedModel):
        pretrained = config.model
        check_folder(Path(pretrained.path))
        write_folder(folder, lambda partial: link_pretrained(pretrained, partial))
        return {}
    model, tokenizer = build_scratch(config.model, alphabet, config.seed)
    metrics: dict[str, float] = {}
    if config.model.warm_start is not None:
        made_ready(model, LearnerConfig(device=config.learner.device))
        worked, started_s = tokenise(examples(), tokenizer), time.perf_counter()
        with _threads(num_cores()):
            metrics = warm_start(model, worked, config.model.warm_start, config.learner, config.seed, stopped)
        metrics["warm_start/seconds"] = time.perf_counter() - started_s
    write_folder(folder, lambda partial: save_model(model.cpu(), tokenizer, partial))
    return metrics


def num_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Give torch `count` threads for a while: before version 0 every other process only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
