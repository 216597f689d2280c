"""One process group of learner and members, apart from torch's default group, opened and left without ever holding its owner up.

Opening waits for the others, and an operation that a lost peer never answers only ends with its timeout. Both happen on a thread
of the group's own, which outlives the owner's interest by the timeout at most: `leave` returns at once.

Invariants:
- A tensor handed to `broadcast` is touched by nobody else until the work is completed or, once left, never again.
- The default group (a divided learner's) is neither used nor disturbed, and an NCCL timeout of ours ends no process.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from asyncrl.errors import BroadcastError, ConfigError

Backend = Literal["gloo", "nccl"]
_POLL_S = 0.001
_REAP_S = 0.05
_OWNER_CHECK_S = 0.5
_NCCL_ENVIRONMENT = {
    # A lost member is ours to deal with: NCCL's own watchdog would end the learner.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
_environment_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Place:
    """A process's place in one epoch's group."""

    epoch: int
    rank: int
    size: int
    store: str
    """host:port."""


class GroupBrokenError(Exception):
    """The group cannot be opened or an operation in it failed: leave it."""


class Group:
    """A process group in which rank 0 broadcasts.

    Example:
        >>> group = Group("gloo", place, "127.0.0.1", timeout_s=30.0)  # doctest: +SKIP
        >>> group.wait_open(should_stop)  # doctest: +SKIP
        >>> wait_done(group.broadcast(bucket), should_stop)  # doctest: +SKIP
        >>> group.leave()  # doctest: +SKIP
    """

    def __init__(
        self,
        backend: Backend,
        place: Place,
        host: str,
        timeout_s: float,
        store: TCPStore | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Begin to open it.

        Args:
            backend: `nccl` needs every member on a GPU of its own.
            place: Of this process.
            host: Address of this machine that the others reach.
            timeout_s: Of opening, and of every operation.
            store: Rank 0's own, which is the one at `place.store`.
            device: Where buckets are; None: in host memory.
        """
        self.place = place
        self._backend = backend
        self._host = host
        self._timeout_s = timeout_s
        self._store = store
        self._device = device
        self._group: Any = None
        self._works: list[Any] = []
        self._failure = ""
        self._opened = threading.Event()
        self._left = threading.Event()
        # A daemon would be frozen at exit in the middle of gloo's own work, which torch takes for a crash; NCCL's may never end.
        is_daemon = backend == "nccl"
        threading.Thread(target=self._live, name=f"asyncrl-group-{place.epoch}", daemon=is_daemon).start()

    def wait_open(self, should_stop: Callable[[], bool]) -> None:
        """Wait until all are in.

        Raises:
            GroupBrokenError: Not all came in time, or `should_stop` said so.
        """
        while not self._opened.wait(10 * _POLL_S):
            if should_stop():
                raise GroupBrokenError("told to stop while the group was opened")
        if self._failure:
            raise GroupBrokenError(f"the group of epoch {self.place.epoch} was not opened: {self._failure}")

    def broadcast(self, bucket: torch.Tensor) -> Any:  # noqa: ANN401 - torch's Work is untyped
        """Begin to send (rank 0) or to receive `bucket`.

        Returns:
            What `wait_done` takes.

        Raises:
            GroupBrokenError: It cannot begin.
        """
        try:
            work = self._group.broadcast([bucket], _from_rank_0())
        except RuntimeError as error:
            raise GroupBrokenError(_first_line(error)) from error
        self._works = [*(work for work in self._works if not work.is_completed()), work]
        return work

    def leave(self) -> None:
        """Be done with it, at once; nothing handed to `broadcast` may be read any more. Safe to repeat."""
        self._left.set()

    def _live(self) -> None:
        """Open, wait until left, and let go once nothing is under way: torch's own end of a group waits without asking."""
        try:
            if self._backend == "nccl":
                self._group = _open_nccl(self.place, self._timeout_s, self._store, self._device or torch.device("cuda"))
            else:
                self._group = _open_gloo(self.place, self._host, self._timeout_s, self._store)
        except (RuntimeError, ValueError) as error:
            self._failure = _first_line(error)
        self._opened.set()
        while not self._left.wait(_OWNER_CHECK_S) and threading.main_thread().is_alive():
            pass
        if self._group is not None and self._backend == "nccl":
            self._group.abort()
        give_up_s = time.monotonic() + 2 * self._timeout_s
        while any(not work.is_completed() for work in self._works) and time.monotonic() < give_up_s:
            time.sleep(_REAP_S)
        self._works = []
        self._group = None
        self._store = None


def wait_done(work: Any, should_stop: Callable[[], bool]) -> None:  # noqa: ANN401 - torch's Work is untyped
    """Wait until an operation is over.

    Raises:
        GroupBrokenError: It failed, or `should_stop` said so.
    """
    while not work.is_completed():
        if should_stop():
            raise GroupBrokenError("told to stop")
        time.sleep(_POLL_S)
    try:
        work.wait()
    except RuntimeError as error:
        raise GroupBrokenError(_first_line(error)) from error


def open_store(host: str, timeout_s: float) -> tuple[TCPStore, str]:
    """Open the store where an epoch's members meet; return it with its address.

    Raises:
        BroadcastError: `host` is no address of this machine.
    """
    try:
        listening = socket.create_server((host, 0))
    except OSError as error:
        raise BroadcastError(
            f"cannot listen at {host}: {error.strerror or error}; broadcast.medium.host must be an address of the learner's "
            f"machine"
        ) from error
    port = listening.getsockname()[1]
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listening.detach(),
    )  # fmt: skip
    return store, f"{host}:{port}"


def _open_gloo(place: Place, host: str, timeout_s: float, store: TCPStore | None) -> Any:  # noqa: ANN401 - torch's is untyped
    """Return torch's group; blocks until all are in, for `timeout_s` at most, and then raises RuntimeError as torch does."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 - the way to choose an interface
    options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
    return dist.ProcessGroupGloo(_meeting(place, timeout_s, store), place.rank, place.size, options)


def _open_nccl(place: Place, timeout_s: float, store: TCPStore | None, device: torch.device) -> Any:  # noqa: ANN401
    """Return torch's group with its communicator made: that is put off to the first operation, and nothing ends it there."""
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
    with _environment(_NCCL_ENVIRONMENT):
        group: Any = dist.ProcessGroupNCCL(_meeting(place, timeout_s, store), place.rank, place.size, options)
    first = group.broadcast([torch.zeros(1, device=device)], _from_rank_0())
    give_up_s = time.monotonic() + timeout_s
    while not first.is_completed():
        if time.monotonic() > give_up_s:
            group.abort()
            raise RuntimeError(f"not all members came within {timeout_s:g} s")
        time.sleep(_POLL_S)
    return group


def _meeting(place: Place, timeout_s: float, store: TCPStore | None) -> PrefixStore:
    """Return where the epoch's members meet; rank 0 brings the store."""
    if store is None:
        host, _, port = place.store.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    return PrefixStore(f"epoch-{place.epoch}", store)


def _from_rank_0() -> Any:  # noqa: ANN401
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
    return options


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables that NCCL's groups read when they are made, so that no other group is changed."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name in variables:
                del os.environ[name]
            os.environ.update({name: value for name, value in before.items() if value is not None})


def own_address(towards: str) -> str:
    """Return the address of this machine from which `host:port` is reached.

    Raises:
        BroadcastError: It is not reached at all.
    """
    host, _, port = towards.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise BroadcastError(
            f"the learner's {host} is not reached from here ({error.strerror or error}); set broadcast.medium.host to an address "
            f"of its machine that every generator reaches"
        ) from error


def check_nccl() -> None:
    """Refuse where NCCL cannot be used.

    Raises:
        ConfigError: There is no GPU, or torch was built without NCCL.
    """
    if not torch.cuda.is_available():
        raise ConfigError("broadcast.medium.kind 'nccl' needs a GPU in learner and engine, and there is none here; use 'gloo'")
    if not dist.is_nccl_available():
        raise ConfigError("this torch was built without NCCL; install a CUDA build on Linux, or use medium kind 'gloo'")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [repr(error)])[0][:300]
