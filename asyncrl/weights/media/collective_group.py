"""One process group of learner and members, separate from torch's default group. Opening and leaving never block its owner.

Opening waits for the other members, and an operation whose peer is lost ends only at its timeout. Both happen on the group's own
thread. `leave` returns at once; the thread ends after the timeout at the latest. The exception is the creation of an NCCL
communicator, which has no timeout: if a member dies during it, that thread may stay in the other processes until they end. So all
members meet in the store first.

Invariants:
- A tensor passed to `broadcast` must not be used elsewhere until the work is completed or, after `leave`, never again.
- The default group (of a learner with several ranks) is not used or changed, and a timeout of this NCCL group ends no process.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from asyncrl.errors import BroadcastError, first_line

Backend = Literal["gloo", "nccl"]
_POLL_S = 0.001
_REAP_S = 0.05
_OWNER_CHECK_S = 0.5
_NCCL_ENVIRONMENT = {
    # This module handles a lost member; NCCL's own watchdog would end the learner.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
_FROM_RANK_0 = dist.BroadcastOptions()
_FROM_RANK_0.rootRank, _FROM_RANK_0.rootTensor, _FROM_RANK_0.asyncOp = 0, 0, True


class GroupBrokenError(Exception):
    """The group could not be opened, or an operation in it failed: leave the group."""


class Group:
    """A process group in which rank 0 broadcasts.

    Example:
        >>> group = Group("gloo", 1, 2, "10.0.0.2", 30.0, "10.0.0.1:4567")  # doctest: +SKIP
        >>> group.wait_open(look)  # doctest: +SKIP
        >>> wait_done(group.broadcast(bucket), look)  # doctest: +SKIP
        >>> group.leave()  # doctest: +SKIP
    """

    def __init__(
        self, backend: Backend, rank: int, size: int, host: str, timeout_s: float, store: TCPStore | str,
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        """Start to open the group.

        Args:
            backend: `nccl` needs a separate GPU for every member.
            rank: Rank of this process; the learner has 0.
            size: Number of processes.
            host: Address of this machine that the others can reach.
            timeout_s: Time limit of opening and of every operation.
            store: The store where the members meet (on rank 0), or its host:port (on the others).
            device: Device of the buckets; a GPU without a number: this thread's current GPU; None: host memory.
        """
        if device is not None and device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._backend = backend
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        self._works: list[Any] = []
        self._failure = ""
        self._opened, self._left = threading.Event(), threading.Event()
        # A daemon thread would stop at exit during gloo's work, which torch reports as a crash; NCCL's thread may never end.
        where = rank, size, host, store, device
        threading.Thread(target=self._live, args=where, name="asyncrl-group", daemon=backend == "nccl").start()

    def wait_open(self, look: Callable[[], None]) -> None:
        """Wait until all members have joined; `look` is called meanwhile, and raises to stop the wait.

        Raises:
            GroupBrokenError: Not all members joined in time.
        """
        while not self._opened.wait(10 * _POLL_S):
            look()
        if self._failure:
            raise GroupBrokenError(f"the group was not opened: {self._failure}")

    def broadcast(self, bucket: torch.Tensor) -> Any:  # noqa: ANN401 - torch's Work is untyped
        """Start to send (rank 0) or to receive `bucket`; return the work for `wait_done`.

        Raises:
            GroupBrokenError: The operation could not start.
        """
        try:
            work = self._group.broadcast([bucket], _FROM_RANK_0)
        except RuntimeError as error:
            raise GroupBrokenError(first_line(error)) from error
        self._works = [*(work for work in self._works if not work.is_completed()), work]
        return work

    def leave(self) -> None:
        """Leave the group without waiting; tensors passed to `broadcast` must not be read any more. Safe to repeat."""
        self._left.set()

    def _live(self, rank: int, size: int, host: str, store: TCPStore | str, device: torch.device | None) -> None:
        """Open, wait for `leave`, and release the group once no work is left: torch's own destructor would block."""
        try:
            self._group = self._opened_group(rank, size, host, store, device)
        except (RuntimeError, ValueError) as error:
            self._failure = first_line(error)
        self._opened.set()
        while not self._left.wait(_OWNER_CHECK_S) and threading.main_thread().is_alive():
            pass
        if self._group is not None and self._backend == "nccl":
            self._group.abort()
        give_up_s = time.monotonic() + 2 * self._timeout.total_seconds()
        while any(not work.is_completed() for work in self._works) and time.monotonic() < give_up_s:
            time.sleep(_REAP_S)
        del self._group, self._works

    def _opened_group(self, rank: int, size: int, host: str, store: TCPStore | str, device: torch.device | None) -> Any:  # noqa: ANN401
        """Return torch's group after all members have joined; raises RuntimeError as torch does."""
        if isinstance(store, str):
            store = join_store(store, self._timeout.total_seconds())
        if self._backend == "gloo":
            # torch has no public way to choose the interface.
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
            options._timeout = self._timeout  # noqa: SLF001
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
            return dist.ProcessGroupGloo(store, rank, size, options)
        store.set(f"member {rank}", "")
        store.wait([f"member {member}" for member in range(size)], self._timeout)
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout  # noqa: SLF001
        before = {name: os.environ.get(name) for name in _NCCL_ENVIRONMENT}
        os.environ.update(_NCCL_ENVIRONMENT)  # read when the group is made, so other groups are not changed
        try:
            group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        # The first operation makes the communicator, without a time limit.
        first = group.broadcast([torch.zeros(1, device=device)], _FROM_RANK_0)
        give_up_s = time.monotonic() + self._timeout.total_seconds()
        while not first.is_completed():
            if time.monotonic() > give_up_s:
                group.abort()
                raise RuntimeError(f"not all members joined within {self._timeout.total_seconds():g} s")
            time.sleep(_POLL_S)
        return group


def wait_done(work: Any, look: Callable[[], None]) -> None:  # noqa: ANN401 - torch's Work is untyped
    """Wait until an operation is complete; `look` is called meanwhile, and raises to stop the wait.

    Raises:
        GroupBrokenError: The operation failed.
    """
    while not work.is_completed():
        look()
        time.sleep(_POLL_S)
    try:
        work.wait()
    except RuntimeError as error:
        raise GroupBrokenError(first_line(error)) from error


def open_store(host: str, timeout_s: float) -> tuple[TCPStore, str]:
    """Open the store where the members of a group meet, on this interface only; return the store and its host:port."""
    listening = socket.create_server((host, 0))
    port, timeout = listening.getsockname()[1], timedelta(seconds=timeout_s)
    handle = listening.detach()
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=handle)
    return store, f"{host}:{port}"


def join_store(address: str, timeout_s: float) -> TCPStore:
    """Open the store that another process opened at `address`."""
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def own_address(towards: str) -> str:
    """Return the address of this machine from which `host:port` can be reached.

    Raises:
        BroadcastError: The address cannot be reached.
    """
    host, _, port = towards.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except OSError as error:
        instead = "set broadcast.medium.host to an address of the learner's machine that every generator can reach"
        raise BroadcastError(f"the learner's address {host} cannot be reached from here ({error}); {instead}") from error
