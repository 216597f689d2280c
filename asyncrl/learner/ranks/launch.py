"""Rank 0's side of several ranks: it starts the others as its own processes, sends them commands, and ends with them.

To the controller all ranks are one process, `learner`: they start, die and restart together. The others' standard input is a
pipe that only rank 0 holds open, so they end when it does. A thread for each waits for its end. When one ends unexpectedly this
process ends too, after a moment in which an error that all ranks share can still be reported. What was under way is sent again
after the restart.

A command is everything that all ranks must do together. A step's command is its `StepBatch`. Commands travel as msgpack.

Invariant: with one rank there is no process and no group, and nothing is sent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from asyncrl.config.run import RunConfig
from asyncrl.learner.ranks.group import LOOPBACK, Ranks, joined_ranks
from asyncrl.schema.batches import StepBatch
from asyncrl.schema.control import Phase
from asyncrl.weights.media.collective_group import open_store

log = logging.getLogger(__name__)

StartRank = Callable[[int, str], "subprocess.Popen[bytes]"]
"""(rank, address) -> its process, with a pipe as standard input."""

LAST_ERROR_S = 3.0
"""Between the death of a rank and that of rank 0, which may have the same error to report."""
STOP_TIMEOUT_S = 5.0
"""For the others to end when told to."""
DEAD_RANK_EXIT_CODE = 4


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Open the policy; rank 0 has made or found it on disk."""

    checkpoint: str
    """Folder to go on from; empty: from the run's initial model."""


class ReachPhase(msgspec.Struct, frozen=True, tag="reach_phase"):
    """Bring about a phase of a shared device."""

    phase: Phase
    number: int
    """Of the controller's switch."""


class Help(msgspec.Struct, frozen=True, tag="help"):
    """Do the others' part of what rank 0 does."""

    at: Literal["publish", "offload", "prefetch", "save", "stop"]
    """Gather the weights that generators are to have; put what is on the device under a residency manager; bring what training
    needs nearer; gather a checkpoint; end."""


Command = Begin | StepBatch | ReachPhase | Help
command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


class RankLauncher:
    """All ranks of a learner, seen from rank 0.

    Example:
        >>> launcher = RankLauncher(config, start_rank)  # doctest: +SKIP
        >>> ranks = launcher.join()  # doctest: +SKIP
        >>> launcher.tell(Begin(checkpoint=""))  # doctest: +SKIP
        >>> launcher.close(all_well=True)  # doctest: +SKIP
    """

    def __init__(self, config: RunConfig, start_rank: StartRank | None) -> None:
        """Start the other ranks' processes; they load their libraries while rank 0 makes the model."""
        self._config = config
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks = Ranks()
        self._leaving = contextlib.ExitStack()
        self._is_closing = False
        size = config.learner.ranks
        if size > 1:
            assert start_rank is not None, "several ranks need a way to start the others"
            self._store, address = open_store(LOOPBACK, config.supervision.start_timeout_s)
            try:
                for rank in range(1, size):
                    self._processes.append(start_rank(rank, address))
            except BaseException:
                self.close(all_well=False)
                raise
            for rank, process in enumerate(self._processes, start=1):
                threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}-watch", daemon=True).start()

    def join(self) -> Ranks:
        """Wait until all ranks are there, and return them.

        Raises:
            torch.distributed.DistError: Not all came within `supervision.start_timeout_s`.
        """
        if not self._processes:
            return self._ranks
        size, device = self._config.learner.ranks, rank_device(self._config, 0)
        joining = joined_ranks(0, size, self._store, device, self._config.supervision.start_timeout_s)
        self._ranks = self._leaving.enter_context(joining)
        log.info("%d ranks on %s", size, self._config.learner.device)
        return self._ranks

    def tell(self, command: Command) -> None:
        """Have the others do their part of what rank 0 does next."""
        if self._ranks.size > 1:
            self._ranks.tell(msgspec.msgpack.encode(command))

    def close(self, *, all_well: bool) -> None:
        """End the others, and wait for it; safe to repeat.

        Args:
            all_well: They wait for a command. Otherwise they may be stuck in a collective, and are killed.
        """
        self._is_closing = True
        if all_well:
            try:
                self.tell(Help("stop"))
            except RuntimeError as error:  # one that has just died fails the collective
                log.warning("the learner's other ranks could not be told to stop, and are killed: %s", error)
                all_well = False
        self._ranks = Ranks()
        deadline_s = time.monotonic() + (STOP_TIMEOUT_S if all_well else 0.0)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline_s - time.monotonic()))
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self._leaving.close()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._is_closing:
            return
        log.error("rank %d of the learner is gone (exit code %d); all of them start again", rank, code)
        time.sleep(LAST_ERROR_S)
        # The learner's thread may wait in a collective, which nothing else can end.
        os._exit(DEAD_RANK_EXIT_CODE)


def rank_device(config: RunConfig, rank: int) -> str:
    """Return the device of a rank: `learner.device`, numbered by rank where that is `cuda`."""
    device = config.learner.device
    return f"cuda:{rank}" if device == "cuda" and config.learner.ranks > 1 else device
