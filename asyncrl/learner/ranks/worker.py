"""A learner rank other than 0: does its share of each command of rank 0, and has no connection of its own.

Invariant: what it calls, and in which order, follows from commands, config and batches alone. So it meets rank 0 in every
collective.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import torch

from asyncrl.clock import SystemClock
from asyncrl.config.live import with_settings
from asyncrl.config.run import RunConfig
from asyncrl.learner.checkpoint import contribute_checkpoint, load_trainer
from asyncrl.learner.model.policy import make_probe, publishable_tensors
from asyncrl.learner.ranks.fsdp import whole
from asyncrl.learner.ranks.group import (
    Begin,
    Help,
    ReachPhase,
    command_decoder,
    joined_ranks,
    keeps_nccl_on_loopback,
    rank_device,
)
from asyncrl.learner.resume import build_train_state
from asyncrl.learner.step.train_step import train_step
from asyncrl.learner.train_state import TrainState, open_offload
from asyncrl.schema.batches import StepBatch
from asyncrl.weights.media.collective_group import join_store

log = logging.getLogger(__name__)


def run_rank_worker(config: RunConfig, run_folder: Path, rank: int, address: str) -> None:
    """Join rank 0 at `address` and follow its commands until it says stop.

    Raises:
        ConfigError: The policy cannot be opened.
        LearnerError: A step could not be taken; rank 0 has the same error.
        RuntimeError: Another rank is gone.
    """
    torch.set_num_threads(config.learner.num_threads)
    timeout_s, size = config.supervision.start_timeout_s, config.learner.ranks
    store = join_store(address, timeout_s)
    state: TrainState | None = None
    joining = joined_ranks(
        rank, size, store, rank_device(config, rank), timeout_s, nccl_on_loopback=keeps_nccl_on_loopback(config)
    )
    with joining as ranks, contextlib.ExitStack() as leaving:
        while (command := command_decoder.decode(ranks.hear())) != Help("stop"):
            if isinstance(command, Begin):
                checkpoint = Path(command.checkpoint) if command.checkpoint else None
                state = build_train_state(config, run_folder / "model", checkpoint, ranks)
                if checkpoint is not None:
                    load_trainer(checkpoint, state)
                log.info("rank %d of %d begins from %s", ranks.rank, ranks.size, checkpoint or run_folder / "model")
                continue
            assert state is not None, "rank 0 says Begin first"
            match command:
                case StepBatch():
                    if command.settings:
                        config = with_settings(config, command.settings)
                        state.follow(config)
                    train_step(state, command, config)
                case Help("publish"):
                    make_probe(state.model, config.generate.engine.max_sequence_tokens)
                    for tensor in publishable_tensors(state.model).values():
                        whole(tensor)  # as rank 0 does when it copies them out
                case Help("offload"):
                    leaving.callback(open_offload(state, config, run_folder, SystemClock()).manager.close)
                case Help("save"):
                    with contextlib.nullcontext() if state.offload is None else state.offload.manager.readable():
                        contribute_checkpoint(state)
                case ReachPhase():
                    assert state.offload is not None, "rank 0 has its offload first"
                    state.offload.reach(command.phase, command.number)
