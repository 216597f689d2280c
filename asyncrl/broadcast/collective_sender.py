"""The learner's part in the broadcasts of a collective medium: one thread that sends a version, bucket by bucket, when told to.

Invariants:
- One order at a time; its end is reported exactly once, as `Sent`, and never later than the group's timeout.
- Told to stop it stops at once, whatever the others do; the group is then left to end by itself.
- Two buckets are under way at most. Towards a device they pass through two buffers there, so that the copy of one overlaps the
  broadcast of the other.

Called by collective_writer.py.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from asyncrl.broadcast.collective_group import Backend, Group, GroupBrokenError, Place, wait_done
from asyncrl.broadcast.collective_membership import Progress, Sent
from asyncrl.broadcast.device import NUM_BUFFERS, BucketBuffers
from asyncrl.errors import BroadcastError

_JOIN_S = 10.0


@dataclass(frozen=True, slots=True)
class SendOrder:
    """Send what is in `slot` to everyone in the group."""

    place: Place
    slot: torch.Tensor
    store: TCPStore | None
    """Of a new epoch; None: the group that is open."""
    stop: threading.Event = field(default_factory=threading.Event)


class Sender:
    """Rank 0 of every epoch.

    Args:
        backend: Of torch.distributed.
        host: Address of this machine that the members reach.
        timeout_s: Of every operation.
        ends: Of the buckets.
        through: Device whose buffers the buckets pass through; None: they are sent from the slot.
        report: Called on this thread with `Progress` and `Sent`.
    """

    def __init__(
        self,
        backend: Backend,
        host: str,
        timeout_s: float,
        ends: Sequence[int],
        through: torch.device | None,
        report: Callable[[Progress | Sent], None],
    ) -> None:
        self._backend = backend
        self._host = host
        self._timeout_s = timeout_s
        self._ends = tuple(ends)
        self._through = through
        self._report = report
        self._buffers = None if through is None else BucketBuffers(ends, through)
        self._group: Group | None = None
        self._orders: queue.SimpleQueue[SendOrder | None] = queue.SimpleQueue()
        self._current: SendOrder | None = None
        self._thread = threading.Thread(target=self._run, name="asyncrl-weights-sender", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Return whether orders are carried out; False after `close`, or where the thread broke."""
        return self._thread.is_alive()

    def send(self, order: SendOrder) -> None:
        """Begin; returns at once."""
        self._current = order
        self._orders.put(order)

    def stop(self) -> None:
        """End the order under way, if there is one, and leave the group; returns at once."""
        if self._current is not None:
            self._current.stop.set()

    def close(self) -> None:
        """Stop and end the thread. Safe to repeat."""
        self.stop()
        self._orders.put(None)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        with self._on_device():
            while (order := self._orders.get()) is not None:
                self._report(self._carry_out(order))
        self._leave()

    def _carry_out(self, order: SendOrder) -> Sent:
        try:
            self._send(order)
        except (GroupBrokenError, BroadcastError, RuntimeError) as error:
            self._leave()
            return Sent(order.place.epoch, str(error) or repr(error))
        return Sent(order.place.epoch)

    def _send(self, order: SendOrder) -> None:
        group = self._group_for(order)
        group.wait_open(order.stop.is_set)
        under_way: deque[Any] = deque()
        for index in range(len(self._ends)):
            if len(under_way) == NUM_BUFFERS:
                self._finish(under_way, order)
            under_way.append(group.broadcast(self._bucket(order.slot, index)))
        while under_way:
            self._finish(under_way, order)

    def _finish(self, under_way: deque[Any], order: SendOrder) -> None:
        wait_done(under_way.popleft(), order.stop.is_set)
        self._report(Progress(order.place.epoch))

    def _bucket(self, slot: torch.Tensor, index: int) -> torch.Tensor:
        start = self._ends[index - 1] if index else 0
        bucket = slot[start : self._ends[index]]
        return bucket if self._buffers is None else self._buffers[index].copy_(bucket, non_blocking=True)

    def _group_for(self, order: SendOrder) -> Group:
        if order.store is not None:
            self._leave()
            self._group = Group(self._backend, order.place, self._host, self._timeout_s, order.store, self._through)
        if self._group is None or self._group.place.epoch != order.place.epoch:
            raise GroupBrokenError(f"the group of epoch {order.place.epoch} was left")
        return self._group

    def _leave(self) -> None:
        if self._group is not None:
            self._group.leave()
            self._group = None

    @contextlib.contextmanager
    def _on_device(self):  # type: ignore[no-untyped-def]  # noqa: ANN202
        """Work on a stream of its own, so that nothing here waits for the learner's step or holds it up."""
        if self._through is None or self._through.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(self._through)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._through), torch.cuda.stream(stream):
            yield
