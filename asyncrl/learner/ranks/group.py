"""The learner's ranks: who I am, and sums and collections over all of them; and commands from rank 0 to the rest.

Every rank calls the same methods in the same order with the same shapes (except `gather`: first axes may differ).

Rank 0 is connected to the controller; the others hear from it alone what comes next, as msgspec-encoded bytes by broadcast.
There are two groups: one for computing, whose collectives all ranks reach within `timeout_s` of each other or fail, and one for
commands, in which the others may wait for as long as there is nothing to train.

Invariants: nothing is pickled; everything listens on the loopback interface; a rank that dies closes its connections, which
fails its peers' collectives at once, and one that hangs fails them after `timeout_s`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"
UNBOUNDED = timedelta(days=365)
"""For a rank 0 that makes a model or has no commands; one that is gone is noticed by its closed connections."""
JOINED_KEY = "rank-0-joined"
"""Key of the store that rank 0 sets when it joins."""


class Ranks:
    """The group of learner ranks, seen from one of them; without arguments a group of one, which needs no torch process group.

    Example:
        >>> with joined_ranks(0, 2, store, "cpu", timeout_s=60.0) as ranks:  # doctest: +SKIP
        ...     total = ranks.sum(torch.tensor(3.0))
    """

    def __init__(self, rank: int = 0, size: int = 1, commands: dist.ProcessGroup | None = None) -> None:
        """Say who this is.

        Args:
            rank: This one; 0 is the one that is connected to the controller.
            size: How many there are; with more than one, they compute over the default process group.
            commands: A gloo group of the same ranks, by which rank 0 tells the others what comes next.
        """
        self.rank, self.size, self._commands = rank, size, commands

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's `values` (any shape, no gradient)."""
        if self.size == 1:
            return values
        total = values.detach().clone()
        dist.all_reduce(total, dist.ReduceOp.SUM)
        return total

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return every rank's `values` [N_r, ...] end to end, in the order of ranks, no gradient."""
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
        """Send the others a command; rank 0 only."""
        assert self.rank == 0, "commands come from rank 0"
        dist.broadcast(torch.tensor([len(command)]), 0, group=self._commands)
        if command:
            dist.broadcast(torch.frombuffer(bytearray(command), dtype=torch.uint8), 0, group=self._commands)

    def hear(self) -> bytes:
        """Wait for rank 0's next command."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, group=self._commands)
        command = torch.empty(int(size.item()), dtype=torch.uint8)
        if len(command):
            dist.broadcast(command, 0, group=self._commands)
        return command.numpy().tobytes()

    def _all_of(self, values: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values)
        return parts


@contextmanager
def joined_ranks(rank: int, size: int, store: Store, device: str, timeout_s: float) -> Iterator[Ranks]:
    """Join the group, and leave it at the end; blocks until all have joined.

    Args:
        rank: Of this process.
        size: How many are expected.
        store: Where they find each other: from `open_store` or `join_store`.
        device: `cpu`, or a CUDA device, which this process then uses by default.
        timeout_s: Most seconds between the first and the last rank's arrival at a collective; rank 0 is waited for.

    Raises:
        torch.distributed.DistError: Not all came within `timeout_s`.
    """
    names = [name for name, found in psutil.net_if_addrs().items() if any(one.address == LOOPBACK for one in found)]
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = names[0] if names else "lo"
    timeout = timedelta(seconds=timeout_s)
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    if rank == 0:
        store.set(JOINED_KEY, "now")
    # Rank 0 may take longer to come here than any collective may take: it makes the model first.
    store.wait([JOINED_KEY], UNBOUNDED)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        yield Ranks(rank, size, dist.new_group(backend="gloo", timeout=UNBOUNDED))
    finally:
        dist.destroy_process_group()
