"""Rank 0's side of several ranks: it starts the others as its own processes, tells them what to do, and ends with them.

To the controller all ranks are one process, `learner`: they start, die and restart together. The others' standard input is
a pipe that only rank 0 holds open, so they end when it does; a thread for each waits for its end, and when one ends unbidden
this process ends too, after a moment in which an error that all ranks share can still be told. What was under way is sent
again after the restart.

Invariant: one rank has no process and no group, and is told nothing. Called by learner/worker.py and learner/start.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable

from asyncrl.config.run import RunConfig
from asyncrl.learner.orders import Order, Stop, encode_order
from asyncrl.learner.rank_group import TorchRanks, host_store, joined_ranks
from asyncrl.learner.ranks import OneRank, Ranks

log = logging.getLogger(__name__)

StartRank = Callable[[int, str], "subprocess.Popen[bytes]"]
"""(rank, address) -> its process, with a pipe as standard input."""

LAST_WORDS_S = 3.0
"""Between the death of a rank and that of rank 0, which may have the same error to tell."""
GOODBYE_S = 5.0
"""For the others to end when told to."""
DEAD_RANK_EXIT_CODE = 4


class Crew:
    """All ranks of a learner, seen from rank 0.

    Example:
        >>> crew = Crew(config, start_rank)  # doctest: +SKIP
        >>> ranks = crew.muster()  # doctest: +SKIP
        >>> crew.tell(Begin(checkpoint=""))  # doctest: +SKIP
        >>> crew.close()  # doctest: +SKIP
    """

    def __init__(self, config: RunConfig, start_rank: StartRank | None) -> None:
        """Start the other ranks' processes; they load their libraries while rank 0 makes the model."""
        self._config = config
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: TorchRanks | None = None
        self._leaving = contextlib.ExitStack()
        self._is_closing = False
        size = config.learner.ranks
        if size > 1:
            assert start_rank is not None, "several ranks need a way to start the others"
            self._store, address = host_store(size, config.supervision.start_timeout_s)
            try:
                for rank in range(1, size):
                    self._processes.append(start_rank(rank, address))
            except BaseException:
                self.close(all_well=False)
                raise
            for rank, process in enumerate(self._processes, start=1):
                threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}-watch", daemon=True).start()

    def muster(self) -> Ranks:
        """Wait until all ranks are there, and return them.

        Raises:
            torch.distributed.DistError: Not all came within `supervision.start_timeout_s`.
        """
        if not self._processes:
            return OneRank()
        size, device = self._config.learner.ranks, rank_device(self._config, 0)
        joining = joined_ranks(0, size, self._store, device, self._config.supervision.start_timeout_s)
        self._ranks = self._leaving.enter_context(joining)
        log.info("%d ranks on %s", size, self._config.learner.device)
        return self._ranks

    def tell(self, order: Order) -> None:
        """Have the others do their part of what rank 0 does next."""
        if self._ranks is not None:
            self._ranks.tell(encode_order(order))

    def close(self, *, all_well: bool) -> None:
        """End the others, and wait for it; safe to repeat.

        Args:
            all_well: They wait for an order. Otherwise they may be stuck in a collective, and are killed.
        """
        self._is_closing = True
        all_well = all_well and self._say_stop()
        self._ranks = None
        deadline_s = time.monotonic() + (GOODBYE_S if all_well else 0.0)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline_s - time.monotonic()))
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self._leaving.close()

    def _say_stop(self) -> bool:
        """Return whether all of them could be told: one that is gone, just now, fails the collective."""
        try:
            self.tell(Stop())
        except RuntimeError as error:
            log.warning("the learner's other ranks could not be told to stop, and are killed: %s", error)
            return False
        return True

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._is_closing:
            return
        log.error("rank %d of the learner is gone (exit code %d); all of them start again", rank, code)
        time.sleep(LAST_WORDS_S)
        # The learner's thread may stand in a collective, which nothing else can end.
        os._exit(DEAD_RANK_EXIT_CODE)


def rank_device(config: RunConfig, rank: int) -> str:
    """Return the device of a rank: `learner.device`, numbered by rank where that is `cuda`."""
    device = config.learner.device
    return f"cuda:{rank}" if device == "cuda" and config.learner.ranks > 1 else device
