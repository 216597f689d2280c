"""What the learner begins with: the newest checkpoint, the run's initial model, or nothing yet.

Invariant: what is made here once (random weights, warm start) is made once a run. `RUN/model` is written whole or not at all, and
a restart before the first checkpoint starts from it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import torch

from asyncrl.algorithms.advantages import load_advantage
from asyncrl.algorithms.corrections import load_correction
from asyncrl.algorithms.losses import load_loss
from asyncrl.config.algorithm import AlgorithmConfig, PythonCorrection
from asyncrl.config.learner import LearnerConfig, PretrainedModel
from asyncrl.config.run import RunConfig
from asyncrl.learner.checkpoint import load_trainer
from asyncrl.learner.checkpoint_folder import TrainerState, newest_checkpoint, rename_newer, write_folder
from asyncrl.learner.model.critic import Critic, build_critic_optimizer
from asyncrl.learner.model.policy import (
    Reference,
    build_scratch,
    link_folder,
    made_ready,
    open_model,
    open_policy,
    open_tokenizer,
    save_model,
)
from asyncrl.learner.model.sft_warmup import tokenise, warm_start
from asyncrl.learner.optim.optimizer import PolicyOptimizer
from asyncrl.learner.ranks.fsdp import Divider
from asyncrl.learner.ranks.group import Begin, RankLauncher, Ranks
from asyncrl.learner.train_state import TrainState
from asyncrl.models.causal import check_folder

log = logging.getLogger(__name__)

Examples = Callable[[], Sequence[tuple[str, str]]]
"""Makes the task's worked examples, (prompt, completion) each; called only where there is a warm start to do."""


@dataclass(slots=True)
class InitialState:
    """A policy ready to train."""

    train_state: TrainState
    tokenizer: Any
    version: int
    model_folder: Path
    """`RUN/model`."""
    checkpoint: Path | None = None
    """The checkpoint it comes from; None at version 0."""
    saved: TrainerState = field(default_factory=lambda: TrainerState(version=0))
    """What that checkpoint's `state.json` says."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the warm start, where there was one just now."""


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
        run_folder: The run; `model/` is written into it the first time.
        examples: For the warm start of a scratch model.
        alphabet: For the tokenizer of a scratch model.
        launcher: The other ranks, which wait for the model on disk; None: there are none.
        stopped: Asked now and then during the warm start.

    Raises:
        ConfigError: A name or path of the algorithm leads to no function, the model's folder is not usable, or the warm start
            has no examples.
        LearnerError: No checkpoint of the run is whole.
        StartAbandoned: `stopped` returned true.
    """
    resolve_functions(config.algorithm)
    folder, metrics = run_folder / "model", {}
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
    return InitialState(train_state, tokenizer, saved.version, folder, checkpoint, saved, metrics)


def resolve_functions(algorithm: AlgorithmConfig) -> None:
    """Import what the algorithm names, before anything slow is begun for it.

    Raises:
        ConfigError: A name or path leads to no function.
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
    """Open the policy, and what the algorithm needs beside it, divided over the ranks where there are several.

    Args:
        config: `algorithm`, `learner`, `model` and `num_steps` are read.
        model_folder: `RUN/model`, the policy at version 0.
        checkpoint: Where the policy's weights come from; None: from `model_folder`.
        ranks: All call; None: there is one.

    Raises:
        ConfigError: A folder cannot be opened.
    """
    ranks = ranks or Ranks()
    algorithm, learner = config.algorithm, config.learner
    divider = Divider(learner.device, ranks.size)
    # Divided models are opened in host memory; a unit at a time then goes to the device.
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
        check_folder(source)
        write_folder(folder, lambda partial: link_folder(source.resolve(), partial))
        return {}
    model, tokenizer = build_scratch(config.model, alphabet, config.seed)
    metrics: dict[str, float] = {}
    if config.model.warm_start is not None:
        made_ready(model, LearnerConfig(device=config.learner.device))
        worked, started_s, num_threads = tokenise(examples(), tokenizer), time.perf_counter(), torch.get_num_threads()
        # All cores: before version 0 every other process only waits.
        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        try:
            metrics = warm_start(model, worked, config.model.warm_start, config.learner, config.seed, stopped)
        finally:
            torch.set_num_threads(num_threads)
        metrics["warm_start/seconds"] = time.perf_counter() - started_s
    write_folder(folder, lambda partial: save_model(model.cpu(), tokenizer, partial))
    return metrics
