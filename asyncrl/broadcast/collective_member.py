"""A member's part in the broadcasts of a collective medium: asks for a version until told to begin, then receives its buckets.

Owns the line to the learner, the group of the present epoch and two bucket buffers. Used from one thread.

Invariants:
- Nothing waits without a bound: a learner that says nothing for `timeout_s` raises, a group in which nothing arrives for so long
  is left, and whoever is told that the epoch is over leaves at once and asks again.
- A bucket is handed on once, in order, whatever happened in between: an attempt that broke off is taken up by the next one, in
  which the buckets that were handed on already are received again and left.
- A new group has new buffers: what a broken one still writes reaches nobody.

Called by collective_reader.py.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from asyncrl.broadcast.collective_group import Backend, Group, GroupBrokenError, Place, own_address, wait_done
from asyncrl.broadcast.collective_socket import Line
from asyncrl.broadcast.collective_wire import (
    Abort,
    Begin,
    BlobHere,
    BlobWanted,
    Done,
    Failed,
    FromLearner,
    Leaving,
    Ready,
    Refused,
    short,
)
from asyncrl.broadcast.device import NUM_BUFFERS, BucketBuffers
from asyncrl.broadcast.medium import VersionUnavailableError
from asyncrl.broadcast.zeromq_keys import CurveKeys
from asyncrl.errors import BroadcastError
from asyncrl.models.layout import bucket_ends
from asyncrl.schema.weights import WeightsAvailable

_ASK_EVERY_S = 1.0
_POLL_S = 0.1

Accept = Callable[[int, torch.Tensor], bool]


class Member:
    """One receiver of the learner's broadcasts.

    Args:
        backend: Of torch.distributed; the learner's.
        timeout_s: As the learner's.
        keys: Of the run; None: the learner asks for none.
    """

    def __init__(self, backend: Backend, timeout_s: float, keys: CurveKeys | None = None) -> None:
        self._backend = backend
        self._timeout_s = timeout_s
        self._keys = keys
        self._line: Line | None = None
        self._group: Group | None = None
        self._buffers: BucketBuffers | None = None
        self._heard: deque[FromLearner] = deque()
        """Said while something else was waited for."""
        self.num_groups = 0
        """Groups entered so far."""

    def buckets(
        self, available: WeightsAvailable, device: torch.device, cancelled: threading.Event, accept: Accept
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Receive a version.

        Args:
            available: What was announced.
            device: Where the buckets are to arrive.
            cancelled: Set, the fetch gives up.
            accept: Whether the bucket is as announced; one that is not is received again, with the rest.

        Yields:
            Number and bytes of each bucket, in order; valid until the next one is asked for.

        Raises:
            VersionUnavailableError: The version is gone, the learner says nothing, or the fetch was cancelled.
            BroadcastError: It could not be sent in several attempts.
        """
        line = self._line_to(available.location)
        ends = bucket_ends(available.manifest)
        next_index = 0
        while next_index < len(ends):
            begin = self._await_begin(line, available, cancelled)
            with self._taking_part(line, begin.epoch):
                arriving = self._attempt(line, begin, ends, device, cancelled)
                for index, bucket in _from(next_index, arriving, accept):
                    yield index, bucket
                    next_index = index + 1

    def blob(self, location: str, name: str, num_bytes: int, cancelled: threading.Event) -> bytes:
        """Ask the learner for a delta.

        Raises:
            VersionUnavailableError: It is gone, the learner says nothing, or the fetch was cancelled.
            BroadcastError: It has another size.
        """
        line = self._line_to(location)
        for message, blob in self._heard_while_asking(line, BlobWanted(name), cancelled, f"delta {name}"):
            match message:
                case BlobHere(here, is_gone) if here == name:
                    if is_gone:
                        raise VersionUnavailableError(f"delta {name} is gone from {location}; fetch the newest")
                    if len(blob) != num_bytes:
                        raise BroadcastError(f"delta {name} has {len(blob)} bytes, announced were {num_bytes}")
                    return blob
                case BlobHere():
                    pass
                case _:
                    self._heard.append(message)
        raise AssertionError("asking ends with an answer or an error")

    def close(self) -> None:
        """Leave; the others go on. Safe to repeat."""
        self._leave_group()
        if self._line is not None:
            self._line.say(Leaving())
            self._line.close()
        self._line = None

    def _line_to(self, address: str) -> Line:
        if self._line is None or self._line.address != address:
            self.close()
            self._line = Line(address, self._keys)
        return self._line

    def _await_begin(self, line: Line, available: WeightsAvailable, cancelled: threading.Event) -> Begin:
        """Ask until told to begin."""
        version = available.version
        ready = Ready(version, available.fingerprint)
        for message, _ in self._heard_while_asking(line, ready, cancelled, f"version {version}"):
            match message:
                case Begin() if message.version == version:
                    return message
                case Begin(epoch):
                    line.say(Failed(epoch, f"wants version {version}"))
                case Abort(epoch):
                    if self._group is not None and self._group.place.epoch == epoch:
                        self._leave_group()
                    line.say(Failed(epoch, "told to stop"))
                case Refused(refused, reason, is_gone) if refused == version:
                    if is_gone:
                        raise VersionUnavailableError(f"version {version} can no longer be fetched: {reason}; fetch the newest")
                    raise BroadcastError(reason)
                case _:
                    pass
        raise AssertionError("asking ends with an answer or an error")

    def _heard_while_asking(
        self, line: Line, question: Ready | BlobWanted, cancelled: threading.Event, what: str
    ) -> Iterator[tuple[FromLearner, bytes]]:
        """Ask again and again, and yield what is heard; raises once the learner has said nothing for `timeout_s`."""
        heard_s = time.monotonic()
        asked_s = -_ASK_EVERY_S
        while True:
            while self._heard and isinstance(question, Ready):
                yield self._heard.popleft(), b""
            now_s = time.monotonic()
            if cancelled.is_set():
                line.say(Leaving())
                raise VersionUnavailableError(f"the fetch of {what} was cancelled")
            if now_s - asked_s >= _ASK_EVERY_S:
                line.say(question)
                asked_s = now_s
            answer = line.hear(_POLL_S)
            if answer is not None:
                heard_s = time.monotonic()
                yield answer
            elif now_s - heard_s > self._timeout_s:
                raise VersionUnavailableError(
                    f"{what} does not come: nothing from the learner at {line.address} for {self._timeout_s:g} s; is it alive "
                    f"and reachable (broadcast.medium.host), do the keys match?"
                )

    @contextmanager
    def _taking_part(self, line: Line, epoch: int) -> Iterator[None]:
        """Tell the learner how the attempt ended; a broken group ends it quietly, to be followed by another."""
        failure = "the fetch was given up"
        try:
            yield
            failure = ""
        except GroupBrokenError as error:
            failure = str(error) or repr(error)
        finally:
            if failure:
                self._leave_group()
            line.say(Failed(epoch, short(failure)) if failure else Done(epoch))

    def _attempt(
        self, line: Line, begin: Begin, ends: tuple[int, ...], device: torch.device, cancelled: threading.Event
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the buckets of one broadcast; raises GroupBrokenError where it breaks off."""
        progress_s = time.monotonic()

        def should_stop() -> bool:
            is_late = time.monotonic() - progress_s > self._timeout_s
            return is_late or cancelled.is_set() or self._is_over(line, begin.epoch)

        group, buffers = self._enter(begin, ends, device)
        group.wait_open(should_stop)
        under_way: deque[Any] = deque()
        num_begun = 0
        for index in range(len(ends)):
            while num_begun < min(len(ends), index + NUM_BUFFERS):
                under_way.append(group.broadcast(buffers[num_begun]))
                num_begun += 1
            progress_s = time.monotonic()
            wait_done(under_way.popleft(), should_stop)
            yield index, buffers[index]

    def _enter(self, begin: Begin, ends: tuple[int, ...], device: torch.device) -> tuple[Group, BucketBuffers]:
        """Return the group of the epoch, which is the present one or is opened now."""
        if self._group is None or self._buffers is None or self._group.place.epoch != begin.epoch:
            self._leave_group()
            if not begin.store:
                raise GroupBrokenError(f"the group of epoch {begin.epoch} was left")
            place = Place(begin.epoch, begin.rank, begin.size, begin.store)
            self._buffers = BucketBuffers(ends, device)
            self._group = Group(self._backend, place, own_address(begin.store), self._timeout_s, device=device)
            self.num_groups += 1
        return self._group, self._buffers

    def _is_over(self, line: Line, epoch: int) -> bool:
        """Return whether the learner said that this epoch is no more."""
        while (answer := line.hear(0)) is not None:
            message = answer[0]
            if isinstance(message, Abort) and message.epoch == epoch:
                return True
            if isinstance(message, Begin | Abort | Refused):
                self._heard.append(message)
        return any(isinstance(message, Begin) and message.epoch != epoch for message in self._heard)

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group, self._buffers = None, None


def _from(first: int, arriving: Iterator[tuple[int, torch.Tensor]], accept: Accept) -> Iterator[tuple[int, torch.Tensor]]:
    """Leave the buckets that an earlier attempt brought; a damaged one ends the attempt."""
    for index, bucket in arriving:
        if index < first:
            continue
        if not accept(index, bucket):
            raise GroupBrokenError(f"bucket {index} arrived damaged")
        yield index, bucket
