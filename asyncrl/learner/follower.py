"""A learner rank other than 0: does its share of what rank 0 says, and has no connection of its own.

Invariant: what it calls, and in which order, follows from orders, config and batches alone, so that it meets rank 0 in every
collective. Called by control/learner_rank.py.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import torch

from asyncrl.clock import SystemClock
from asyncrl.config.run import RunConfig
from asyncrl.learner.checkpoint import contribute_checkpoint, load_trainer
from asyncrl.learner.crew import rank_device
from asyncrl.learner.lora import publishable_tensors
from asyncrl.learner.orders import Begin, Move, Prefetch, Publish, Save, Settle, Stop, decode_order
from asyncrl.learner.probe import make_probe
from asyncrl.learner.rank_group import TorchRanks, guest_store, joined_ranks
from asyncrl.learner.residents import Residents, open_residents
from asyncrl.learner.rows import prepare
from asyncrl.learner.start import build_trainee
from asyncrl.learner.step import division_of, train_step
from asyncrl.learner.trainee import Trainee
from asyncrl.models.layout import help_copy_out
from asyncrl.schema.batches import StepBatch

log = logging.getLogger(__name__)


def run_follower(config: RunConfig, run_folder: Path, rank: int, address: str) -> None:
    """Join rank 0 at `address` and follow it until it says stop.

    Raises:
        ConfigError: The policy cannot be opened.
        LearnerError: A step could not be taken; rank 0 has the same error.
        RuntimeError: Another rank is gone.
    """
    torch.set_num_threads(config.learner.num_threads)
    timeout_s, size = config.supervision.start_timeout_s, config.learner.ranks
    store = guest_store(address, size, timeout_s)
    with joined_ranks(rank, size, store, rank_device(config, rank), timeout_s) as ranks, contextlib.ExitStack() as leaving:
        _follow(config, run_folder, ranks, leaving)


def _follow(config: RunConfig, run_folder: Path, ranks: TorchRanks, leaving: contextlib.ExitStack) -> None:
    trainee, residents = None, None
    while not isinstance(order := decode_order(ranks.hear()), Stop):
        if isinstance(order, Begin):
            trainee = _begin(config, run_folder, ranks, order)
            continue
        assert trainee is not None, "rank 0 says Begin first"
        match order:
            case StepBatch():
                train_step(trainee, prepare(order, division_of(trainee, config)), config)
            case Publish():
                _contribute_weights(trainee, config)
            case Settle(model_folder=folder):
                residents = open_residents(trainee, config, run_folder, Path(folder), SystemClock())
                leaving.callback(residents.close)
            case Move() | Prefetch():
                assert residents is not None, "rank 0 says Settle first"
                _move(residents, order)
            case Save():
                with contextlib.nullcontext() if residents is None else residents.readable():
                    contribute_checkpoint(trainee)


def _move(residents: Residents, order: Move | Prefetch) -> None:
    if isinstance(order, Move):
        residents.reach(order.phase, order.number)
    else:
        residents.prefetch()


def _contribute_weights(trainee: Trainee, config: RunConfig) -> None:
    """Help rank 0 with the probe of a version and to gather its tensors."""
    make_probe(trainee.model, config.generate.engine.max_sequence_tokens)
    help_copy_out(publishable_tensors(trainee.model))


def _begin(config: RunConfig, run_folder: Path, ranks: TorchRanks, order: Begin) -> Trainee:
    checkpoint = Path(order.checkpoint) if order.checkpoint else None
    trainee = build_trainee(config, run_folder / "model", checkpoint, ranks)
    if checkpoint is not None:
        load_trainer(checkpoint, trainee)
    log.info("rank %d of %d stands at %s", ranks.rank, ranks.size, checkpoint or run_folder / "model")
    return trainee
