"""Media `gloo` and `nccl`, a generator's end: it asks for a version until told to begin, then receives its buckets.

`gloo` fills the subscriber's staging buffer and hashes the received bytes, as every medium does. `nccl` writes to the model's own
device, without staging: each bucket is verified there and its tensors are yielded at once.

Invariants:
- Every wait has a limit: if the learner says nothing for `timeout_s`, the fetch raises; if no bucket arrives for so long, the
  member leaves the group. A member that is told that the attempt is over leaves at once and asks again, MAX_ATTEMPTS times.
- Each bucket is yielded once, in order: a later attempt receives the buckets that were already yielded again, and ignores them.
- A new group has new buffers: late writes of a broken group are never read.
"""

from __future__ import annotations

import secrets
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zmq

from asyncrl.config.broadcast import GlooMedium, NCCLMedium
from asyncrl.errors import BroadcastError
from asyncrl.models.layout import DTYPE_OF_NAME, bucket_ends, check_manifest
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.transport.security import ClientKeys
from asyncrl.weights.buckets import DIGEST_BYTES, NUM_BUFFERS, BucketBuffers, device_fingerprint, fingerprints_of, gpu_for
from asyncrl.weights.media.base import MediumReader, ReceiverArguments, VersionUnavailableError
from asyncrl.weights.media.collective import Abort, Answer, Begin, FromLearner, FromMember, Ready, Refused
from asyncrl.weights.media.collective_group import Backend, Group, GroupBrokenError, own_address, wait_done
from asyncrl.weights.sockets import ask, decode, keys_of_run, open_dealer

MAX_ATTEMPTS = 4
ASK_EVERY_S = 1.0
_POLL_MS = 100


class Member:
    """One receiver of the learner's broadcasts; used from one thread.

    Args:
        config: The same as the learner's.
        keys: Keys of the run; None: the learner needs no key.
    """

    def __init__(self, config: GlooMedium | NCCLMedium, keys: ClientKeys | None) -> None:
        self._backend: Backend = "nccl" if isinstance(config, NCCLMedium) else "gloo"
        self._timeout_s, self._keys = config.timeout_s, keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._dealer: zmq.Socket[bytes] | None = None
        self._address = ""
        self._group: Group | None = None
        self._buffers: BucketBuffers | None = None

    def buckets(
        self,
        available: WeightsAvailable,
        device: torch.device,
        cancelled: threading.Event,
        accept: Callable[[int, torch.Tensor], bool],
    ) -> Generator[tuple[int, torch.Tensor], None, None]:
        """Receive a version.

        Args:
            available: The announcement.
            device: Device on which the buckets arrive.
            cancelled: When set, the fetch stops.
            accept: Returns whether the bucket is as announced; if not, it and the rest are received again.

        Yields:
            Number and bytes of each bucket, in order; valid until the next one is requested.

        Raises:
            VersionUnavailableError: The version is gone, the learner says nothing, or the fetch was cancelled.
            BroadcastError: MAX_ATTEMPTS attempts failed.
        """
        if self._address != available.location:
            self._hang_up()
            # The first byte of a ROUTER's names must not be zero.
            name = b"m" + secrets.token_bytes(11)
            self._dealer = open_dealer(self._context, f"tcp://{available.location}", self._keys, name=name)
            self._address = available.location
        next_index, failure = 0, ""
        for _ in range(MAX_ATTEMPTS):
            begin = self._await_begin(available, cancelled)
            failure = "the fetch was stopped"
            try:
                for index, bucket in self._receive(begin, bucket_ends(available.manifest), device, cancelled):
                    if index < next_index:
                        continue
                    if not accept(index, bucket):
                        failure = f"bucket {index} arrived damaged"
                        break
                    yield index, bucket
                    next_index = index + 1
                else:
                    failure = ""
            except GroupBrokenError as error:
                failure = str(error) or repr(error)
            finally:
                if failure:
                    self._leave_group()
                self._say(Answer(begin.attempt, failure[:1000]))
            if not failure:
                return
        raise BroadcastError(f"version {available.version} could not be sent in {MAX_ATTEMPTS} attempts: {failure}")

    def close(self) -> None:
        """Leave; the other members continue. Safe to repeat."""
        self._hang_up()
        self._context.term()

    def _await_begin(self, available: WeightsAvailable, cancelled: threading.Event) -> Begin:
        """Ask every ASK_EVERY_S until told to begin; raises if the learner says nothing for `timeout_s`."""
        version, heard_s, asked_s = available.version, time.monotonic(), float("-inf")
        while (now_s := time.monotonic()) - heard_s <= self._timeout_s:
            if cancelled.is_set():
                self._say(Answer(failure="it left"))
                raise VersionUnavailableError(f"the fetch of version {version} was cancelled")
            if now_s - asked_s >= ASK_EVERY_S:
                self._say(Ready(version, available.fingerprint))
                asked_s = now_s
            message = self._hear(_POLL_MS)
            heard_s = heard_s if message is None else time.monotonic()
            match message:
                case Begin(attempt) if message.version == version:
                    return message
                case Begin(attempt) | Abort(attempt):
                    self._leave_group()
                    self._say(Answer(attempt, f"wants version {version}"))
                case Refused(refused, reason) if refused == version:
                    raise VersionUnavailableError(f"version {version} can no longer be fetched: {reason}; fetch the newest")
        told = f"nothing from the learner at {self._address} for {self._timeout_s:g} s"
        ask = "is it alive and reachable (broadcast.medium.host), and do the keys match?"
        raise VersionUnavailableError(f"version {version} does not come: {told}; {ask}")

    def _receive(
        self, begin: Begin, ends: tuple[int, ...], device: torch.device, cancelled: threading.Event
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the buckets of one broadcast; raises GroupBrokenError if it fails."""
        progress_s = time.monotonic()

        def look() -> None:
            while (message := self._hear(0)) is not None:
                if message == Abort(begin.attempt):
                    raise GroupBrokenError("the learner ended the attempt")
            if cancelled.is_set() or time.monotonic() - progress_s > self._timeout_s:
                raise GroupBrokenError(f"the fetch was cancelled, or nothing arrived for {self._timeout_s:g} s")

        if begin.store:
            self._leave_group()
            self._buffers, host = BucketBuffers(ends, device), own_address(begin.store)
            self._group = Group(self._backend, begin.rank, begin.size, host, self._timeout_s, begin.store, device)
        if self._group is None or self._buffers is None:
            raise GroupBrokenError("the group was left")
        group, buffers, under_way = self._group, self._buffers, deque[Any]()
        group.wait_open(look)
        for index in range(len(ends)):
            while len(under_way) < min(NUM_BUFFERS, len(ends) - index):
                under_way.append(group.broadcast(buffers[index + len(under_way)]))
            progress_s = time.monotonic()
            wait_done(under_way.popleft(), look)
            yield index, buffers[index]

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group, self._buffers = None, None

    def _hang_up(self) -> None:
        self._leave_group()
        if self._dealer is not None:
            self._say(Answer(failure="it left"))
            self._dealer.close()
        self._dealer, self._address = None, ""

    def _say(self, message: FromMember) -> None:
        """Send to the learner; the message is lost if the connection has been down for long."""
        assert self._dealer is not None
        ask(self._dealer, message)

    def _hear(self, timeout_ms: int) -> FromLearner | None:
        """Wait for one message; None if there was none."""
        assert self._dealer is not None
        if not self._dealer.poll(timeout_ms):
            return None
        heard: FromLearner | None = decode(self._dealer.recv_multipart(), FromLearner)
        if heard is None:
            raise BroadcastError(f"{self._address} sent an unknown message; is it a learner of this version?")
        return heard


class CollectiveReader(MediumReader):
    """A generator's end of `gloo`, into host memory."""

    def __init__(self, config: GlooMedium, keys: ClientKeys | None) -> None:
        self._member = Member(config, keys)

    def fetch(self, available: WeightsAvailable, into: memoryview, cancelled: threading.Event) -> bytes:
        """Take part in a broadcast and fill `into`; see MediumReader."""
        ends = bucket_ends(available.manifest)
        for index, bucket in self._member.buckets(available, torch.device("cpu"), cancelled, lambda _index, _bucket: True):
            target = into[ends[index - 1] if index else 0 : ends[index]]
            np.copyto(np.frombuffer(target, np.uint8), bucket.numpy())
        return fingerprints_of(into, ends)

    def close(self) -> None:
        """Leave; the other members continue."""
        self._member.close()


class CollectiveReceiver:
    """A Receiver (weights/tensors.py): buckets arrive on the model's device and are verified there."""

    def __init__(self, arguments: bytes) -> None:
        told = msgspec.json.decode(arguments, type=ReceiverArguments)
        assert isinstance(told.medium, GlooMedium | NCCLMedium)
        self._is_nccl = isinstance(told.medium, NCCLMedium)
        self._member = Member(told.medium, keys_of_run(Path(told.run_folder)))
        self._in_use = threading.Lock()
        """Held while the member is in use: `close` may be called from another thread."""
        self._closing = threading.Event()

    def fetch(self, available: WeightsAvailable, device: torch.device) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Take part in a broadcast; see Receiver."""
        if self._is_nccl:
            gpu_for("nccl", device)
        check_manifest(available.manifest)
        manifest, announced = available.manifest, available.bucket_fingerprints
        starts = (0, *bucket_ends(manifest)[:-1])
        buckets = self._member.buckets(
            available, device, self._closing,
            lambda index, bucket: device_fingerprint(bucket) == announced[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES],
        )  # fmt: skip
        with closing(buckets):
            while True:
                with self._in_use:
                    arrived = next(buckets, None)
                if arrived is None:
                    return
                index, bucket = arrived
                start, end = starts[index], starts[index] + len(bucket)
                for entry in manifest.entries[bisect_left(manifest.entries, start, key=lambda entry: entry.offset) :]:
                    if entry.offset >= end != manifest.total_bytes:
                        break
                    flat = bucket[entry.offset - start :][: entry.num_bytes]
                    yield entry.name, flat.view(DTYPE_OF_NAME[entry.dtype]).view(entry.shape)

    def close(self) -> None:
        """Leave; the other members continue."""
        self._closing.set()
        with self._in_use:
            self._member.close()
