"""The learner's ranks: sums, gathers and divided tensors over all of them, commands from rank 0, and the processes of the others.

For the controller all ranks are one process, `learner`: they start, die and restart together. Rank 0 is connected to the
controller and starts the other ranks as its own processes; they get commands only from rank 0. A command is a task for all ranks
together, as msgpack by broadcast; a step's command is its `StepBatch`. The other ranks' standard input is a pipe that only rank 0
holds open, so they end when rank 0 ends. One thread per rank waits for the rank's end. If a rank ends unexpectedly, rank 0 ends
too, after a short time in which an error common to all ranks can still be reported. Unfinished work is sent again after the
restart.

Every rank calls the same methods of `Ranks` in the same order with the same shapes (except `gather`: first axes may differ).
There are two groups: one for computing, whose collectives fail if the ranks do not reach them within `timeout_s` of each other,
and one for commands, in which the other ranks may wait while there is nothing to train.

Invariants: nothing is pickled; all sockets listen on the loopback interface, except NCCL if the user's environment names another
interface or NCCL also sends weights to other machines (`keeps_nccl_on_loopback`); a rank that dies closes its connections, so its
peers' collectives fail at once; a rank that hangs fails them after `timeout_s`; with one rank there is no extra process and no
group, and nothing is sent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import msgspec
import psutil
import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor, distribute_tensor

from asyncrl.config.broadcast import NCCLMedium
from asyncrl.config.places import is_loopback
from asyncrl.config.run import RunConfig
from asyncrl.schema.control import Phase
from asyncrl.schema.samples import StepBatch
from asyncrl.weights.media.collective_group import open_store

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
UNBOUNDED = timedelta(days=365)
"""Timeout while rank 0 makes a model or has no commands; its death is detected by closed connections."""
JOINED_KEY = "rank-0-joined"
"""Key of the store that rank 0 sets when it joins."""
LAST_ERROR_S = 3.0
"""Time between the death of a rank and the exit of rank 0, which may have the same error to report."""
STOP_TIMEOUT_S = 5.0
"""Time limit for the other ranks to end when told to stop."""
DEAD_RANK_EXIT_CODE = 4


@dataclass(frozen=True, slots=True)
class Ranks:
    """The group of learner ranks, seen from one of them; by default a group of one, which needs no torch process group.

    Args:
        rank: This rank; rank 0 is connected to the controller.
        size: Number of ranks; several ranks compute over the default process group.
        _commands: A gloo group of the same ranks, over which rank 0 sends commands.

    Example:
        >>> with joined_ranks(0, 2, store, "cpu", timeout_s=60.0) as ranks:  # doctest: +SKIP
        ...     total = ranks.sum(torch.tensor(3.0))
    """

    rank: int = 0
    size: int = 1
    _commands: dist.ProcessGroup | None = None

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's `values` (any shape, no gradient)."""
        if self.size == 1:
            return values
        total = values.detach().clone()
        dist.all_reduce(total, dist.ReduceOp.SUM)
        return total

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return all ranks' `values` [N_r, ...] concatenated in the order of ranks, no gradient."""
        if self.size == 1:
            return values
        own = values.detach().contiguous()
        counts_R = self._all_of(torch.tensor([len(own)], device=own.device))
        most = int(max(count.item() for count in counts_R))
        padded = own.new_zeros(most, *own.shape[1:])
        padded[: len(own)] = own
        parts = self._all_of(padded)
        return torch.cat([part[: int(count.item())] for part, count in zip(parts, counts_R, strict=True)])

    def tell(self, command: bytes) -> None:
        """Send the other ranks a command of at least one byte; rank 0 only."""
        assert self.rank == 0, "commands come from rank 0"
        dist.broadcast(torch.tensor([len(command)]), 0, group=self._commands)
        dist.broadcast(torch.frombuffer(bytearray(command), dtype=torch.uint8), 0, group=self._commands)

    def hear(self) -> bytes:
        """Wait for rank 0's next command."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, group=self._commands)
        command = torch.empty(int(size.item()), dtype=torch.uint8)
        dist.broadcast(command, 0, group=self._commands)
        return command.numpy().tobytes()

    def _all_of(self, values: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values)
        return parts


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the complete tensor, detached, on its device; the tensor itself if it is not divided."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def part_here(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that may be divided."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def divided_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, complete and equal on every rank, on the device of `other` and divided like `other`."""
    moved = tensor.to(other.device)
    if not isinstance(other, DTensor) or tensor.shape != other.shape:
        return moved
    return distribute_tensor(moved, other.device_mesh, other.placements, src_data_rank=None)


def keeps_nccl_on_loopback(config: RunConfig) -> bool:
    """Return whether NCCL may use only the loopback interface, because it sends no weights to other machines.

    NCCL chooses its interface once per process, for ranks and weights together.

    Args:
        config: The run's resolved config, without `auto`; `broadcast.medium` is read.
    """
    medium = config.broadcast.medium
    return not isinstance(medium, NCCLMedium) or is_loopback(medium.host)


@contextlib.contextmanager
def joined_ranks(
    rank: int, size: int, store: Store, device: str, timeout_s: float, *, nccl_on_loopback: bool = True
) -> Iterator[Ranks]:
    """Join the group, and leave it at the end; blocks until all have joined.

    Args:
        rank: Rank of this process.
        size: Number of ranks.
        store: Where the ranks meet: from `open_store` or `join_store`.
        device: `cpu`, or a CUDA device, which then becomes this process's default.
        timeout_s: Maximum time between the first and the last rank's arrival at a collective; the wait for rank 0 has no limit.
        nccl_on_loopback: From `keeps_nccl_on_loopback`; NCCL variables in the user's environment have priority.

    Raises:
        torch.distributed.DistError: Not all ranks joined within `timeout_s`.
    """
    names = [name for name, found in psutil.net_if_addrs().items() if any(one.address == LOOPBACK for one in found)]
    os.environ["GLOO_SOCKET_IFNAME"] = names[0] if names else "lo"
    if nccl_on_loopback:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", os.environ["GLOO_SOCKET_IFNAME"])
    timeout = timedelta(seconds=timeout_s)
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    if rank == 0:
        store.set(JOINED_KEY, "now")
    # Rank 0 makes the model first, which may take longer than the time limit of a collective.
    store.wait([JOINED_KEY], UNBOUNDED)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        yield Ranks(rank, size, dist.new_group(backend="gloo", timeout=UNBOUNDED))
    finally:
        dist.destroy_process_group()


def join_run(config: RunConfig, rank: int, store: Store) -> contextlib.AbstractContextManager[Ranks]:
    """Join the ranks of a run, as `joined_ranks`."""
    timeout_s, on_loopback = config.supervision.start_timeout_s, keeps_nccl_on_loopback(config)
    return joined_ranks(rank, config.learner.ranks, store, rank_device(config, rank), timeout_s, nccl_on_loopback=on_loopback)


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Open the policy, which is on disk now."""

    checkpoint: str
    """Folder to continue from; empty: the run's initial model."""


class ReachPhase(msgspec.Struct, frozen=True, tag="reach_phase"):
    """Reach a phase of a shared device."""

    phase: Phase
    number: int
    """Number of the controller's switch."""


class Help(msgspec.Struct, frozen=True, tag="help"):
    """Do the other ranks' part of a task of rank 0."""

    at: Literal["publish", "offload", "save", "stop"]
    """Gather the weights to publish; let a residency manager move the components on the device; gather a checkpoint; or
    stop."""


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

    def __init__(self, config: RunConfig, start_rank: Callable[[int, str], subprocess.Popen[bytes]] | None) -> None:
        """Start the other ranks' processes; they load their libraries while rank 0 makes the model.

        Args:
            config: Config of the run.
            start_rank: Starts a process from (rank, address), with a pipe as standard input; None: there is one rank.
        """
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
        """Wait until all ranks have joined, and return them.

        Raises:
            torch.distributed.DistError: Not all ranks joined within `supervision.start_timeout_s`.
        """
        if not self._processes:
            return self._ranks
        self._ranks = self._leaving.enter_context(join_run(self._config, 0, self._store))
        log.info("%d ranks on %s", self._ranks.size, self._config.learner.device)
        return self._ranks

    def tell(self, command: Command) -> None:
        """Tell the other ranks to do their part of rank 0's next task."""
        if self._ranks.size > 1:
            self._ranks.tell(msgspec.msgpack.encode(command))

    def close(self, *, all_well: bool) -> None:
        """Stop the other ranks, and wait for their end; safe to repeat.

        Args:
            all_well: Whether the ranks wait for a command. If not, they may block in a collective, and are killed.
        """
        self._is_closing = True
        if all_well:
            try:
                self.tell(Help("stop"))
            except RuntimeError as error:  # a rank that has just died fails the collective
                log.warning("the learner's other ranks could not be told to stop and are killed: %s", error)
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
        log.error("rank %d of the learner is gone (exit code %d); all ranks restart", rank, code)
        time.sleep(LAST_ERROR_S)
        # The learner's thread may block in a collective, which only the end of the process can interrupt.
        os._exit(DEAD_RANK_EXIT_CODE)


def rank_device(config: RunConfig, rank: int) -> str:
    """Return the device of a rank: `learner.device`, with the rank as number if that is `cuda`."""
    device = config.learner.device
    return f"cuda:{rank}" if device == "cuda" and config.learner.ranks > 1 else device
