"""A generator's end of the broadcast: which version to fetch, where it arrives, and the check before it goes live.

Owns the medium's reader, one staging buffer as large as a version (staging.py), and one fetching thread.

Invariants:
- Tensors can be read only once all bytes are here and their fingerprint is the announced one; until then whoever holds the old
  version is not disturbed. Of those that the medium lends, the first reader sees to that (`MappedTensors.verify`), and what it
  found damaged or overwritten has not been live: it can be fetched again.
- The tensors are views of the staging buffer, or of the learner's own slot where the medium can lend it: valid until released, or
  until the next `fetch` or `next_version`, which says that the engine is done with them.
- With deltas they always lie in the staging buffer: the next version is made from them, so nobody may write to them.
- What arrived damaged is fetched again, with back-off; what is gone is given up for the next announcement (SubscriberState).

Called by generate/worker.py, through pipeline.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from asyncrl.broadcast.fingerprint import fingerprints_of
from asyncrl.broadcast.media import kind_of, open_reader
from asyncrl.broadcast.medium import Lease, VersionUnavailableError
from asyncrl.broadcast.snapshot import copy_with_fingerprints
from asyncrl.broadcast.staging import Staging, refuse_damaged
from asyncrl.broadcast.state import (
    Announced,
    Fetch,
    FetchDone,
    FetchFailed,
    GiveUp,
    RetryAt,
    SubscriberEvent,
    SubscriberInstruction,
    SubscriberState,
    Tick,
    WentLive,
)
from asyncrl.broadcast.zeromq import CurveKeys
from asyncrl.clock import Clock, SystemClock
from asyncrl.config.broadcast import BroadcastConfig
from asyncrl.errors import BroadcastError
from asyncrl.models.layout import bucket_ends, check_manifest
from asyncrl.models.mapped import MappedTensors
from asyncrl.schema.weights import WeightsAvailable


@dataclass(frozen=True, slots=True)
class FetchedVersion:
    """A version that is whole and verified, or is verified as it is read."""

    available: WeightsAvailable
    tensors: MappedTensors
    """CPU tensors, views of where the bytes lie, valid until released or the next fetch; tied tensors under one name."""
    fetch_ms: float


class Subscriber:
    """Fetches versions for one engine.

    Args:
        config: The medium; the same as the publisher's.
        run_folder: Of this run.
        clock: For back-off.
        curve_keys: For the `zeromq` medium; None: the run's own (RUN/keys), or no encryption where it has none.

    Example:
        >>> subscriber.announce(available)  # whenever one arrives  # doctest: +SKIP
        >>> fetched = await subscriber.next_version()  # in the loop that swaps  # doctest: +SKIP
        >>> await engine.load_weights(fetched.available.version, fetched.tensors, "keep")  # doctest: +SKIP
    """

    def __init__(
        self, config: BroadcastConfig, run_folder: Path, clock: Clock | None = None, curve_keys: CurveKeys | None = None
    ) -> None:
        self._medium = kind_of(config.medium)
        self._reader = open_reader(config.medium, run_folder, curve_keys)
        self._clock: Clock = clock or SystemClock()
        self._state = SubscriberState()
        self._wanted: WeightsAvailable | None = None
        self._announced = asyncio.Event()
        self._staging = Staging(self._reader)
        self._may_lease = config.delta is None
        self._handed_out: MappedTensors | None = None
        self._spoilt: BroadcastError | None = None
        """What the engine met when it read the tensors handed out."""
        self._cancelled = threading.Event()
        self._received: Future[MappedTensors] | None = None
        """Of the fetch whose outcome nobody has taken yet."""
        self._is_closed = False
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="asyncrl-subscriber")

    def announce(self, available: WeightsAvailable) -> None:
        """Take note of a version; call on the event loop, at any time. The latest announcement above the live version wins.

        Raises:
            BroadcastError: It is of another medium, or its manifest contradicts itself.
        """
        if available.medium != self._medium:
            raise BroadcastError(f"version {available.version} lies in {available.medium!r}, this run uses {self._medium!r}")
        check_manifest(available.manifest)
        if available.version > self._state.live:
            self._wanted = available
        self._handle(Announced(available.version))
        self._announced.set()

    async def next_version(self) -> FetchedVersion:
        """Wait for a version newer than the last one that went live, fetch and verify it.

        Calling it says that the engine is done with the tensors handed out before. Cancelling it stops the fetch.

        Returns:
            The version, whole.

        Raises:
            BroadcastError: The latest announced version is gone, or could not be fetched after several attempts. The next call
                waits for another announcement.
        """
        _raise_given_up(self._release_staged())
        while True:
            match self._state.handle(Tick(), self._clock.now()):
                case [Fetch()]:
                    if (fetched := await self._fetch_once()) is not None:
                        return fetched
                case [RetryAt(at_s)]:
                    await self._until_announced(at_s - self._clock.now())
                case _:
                    await self._until_announced()

    async def fetch(self, available: WeightsAvailable) -> MappedTensors:
        """Fetch and verify exactly this version.

        Returns:
            Name to tensor, as `FetchedVersion.tensors`.

        Raises:
            BroadcastError: It could not be fetched, is not newer than the last live one, or another was announced meanwhile.
        """
        self._release_staged()
        if available.version <= self._state.live:
            raise BroadcastError(f"version {available.version} is not newer than {self._state.live}, which was fetched before")
        self.announce(available)
        fetched = await self.next_version()
        if fetched.available != available:
            raise BroadcastError(
                f"version {fetched.available.version} was announced while version {available.version} was fetched"
            )
        return fetched.tensors

    def forget(self) -> None:
        """Note that the engine has given its weights up: what was live may be fetched again, and older versions too."""
        self._release_staged()
        self._state = SubscriberState()

    def close(self) -> None:
        """Stop a fetch under way and release everything; tensors handed out can still be read, but are no longer spared."""
        self._is_closed = True
        self._cancelled.set()
        self._executor.shutdown(wait=True)
        if self._received is not None:
            _release_unused(self._received)
        if self._handed_out is not None:
            self._handed_out.release()
        self._staging.close()
        self._reader.close()

    async def _fetch_once(self) -> FetchedVersion | None:
        """Fetch what is wanted; None where it is to be tried again."""
        assert self._wanted is not None
        available = self._wanted
        started_s = time.perf_counter()
        try:
            tensors = await self._on_thread(available)
        except BroadcastError as error:
            failure = FetchFailed(available.version, str(error), isinstance(error, VersionUnavailableError))
            _raise_given_up(self._handle(failure))
            return None
        except asyncio.CancelledError:
            self._handle(FetchFailed(available.version, "cancelled"))
            raise
        self._handle(FetchDone(available.version))
        self._handed_out = tensors
        return FetchedVersion(available, tensors, (time.perf_counter() - started_s) * 1e3)

    async def _on_thread(self, available: WeightsAvailable) -> MappedTensors:
        """Fetch and verify; on cancellation the thread is told to stop, and the next fetch queues behind it."""
        cancelled = self._cancelled = threading.Event()  # before the look: `close`, on another thread, sets it after its word
        if self._is_closed:
            raise VersionUnavailableError("the subscriber is closed")
        try:
            received = self._received = self._executor.submit(self._receive, available, cancelled)
        except RuntimeError as error:  # closed since
            raise VersionUnavailableError("the subscriber is closed") from error
        try:
            tensors = await asyncio.wrap_future(received)
        except asyncio.CancelledError:
            cancelled.set()
            received.add_done_callback(_release_unused)
            raise
        self._received = None
        if self._is_closed:  # in between: what was received has been let go of
            raise VersionUnavailableError("the subscriber is closed")
        return tensors

    def _receive(self, available: WeightsAvailable, cancelled: threading.Event) -> MappedTensors:
        """Return the verified bytes: where they lie, if the medium can lend them, or else in the staging buffer."""
        lease = self._reader.lease(available) if self._may_lease else None
        if lease is not None:
            return self._lent(lease, available)
        flat = self._staging.receive(available, cancelled)
        return MappedTensors(available.manifest, flat, self._staging.path)

    async def _until_announced(self, timeout_s: float | None = None) -> None:
        """Wait for the next announcement, or until the time has passed on the clock."""
        self._announced.clear()
        if timeout_s is None:
            await self._announced.wait()
            return
        async with asyncio.TaskGroup() as waiting:
            alarm = waiting.create_task(self._ring_after(timeout_s))
            await self._announced.wait()
            alarm.cancel()

    async def _ring_after(self, timeout_s: float) -> None:
        await self._clock.sleep(timeout_s)
        self._announced.set()

    def _lent(self, lease: Lease, available: WeightsAvailable) -> MappedTensors:
        """Return the leased bytes as tensors, to be verified by their first reader."""

        def check() -> None:
            with self._noting_spoilt():
                lease.check()

        def verify(tensors: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
            with self._noting_spoilt():
                lease.check()
                if targets:
                    found = copy_with_fingerprints(available.manifest, tensors, targets, of_source=True, check=lease.check)
                else:
                    found = fingerprints_of(lease.flat.numpy().data, bucket_ends(available.manifest), lease.check)
                lease.check()
                refuse_damaged(available, found)

        return MappedTensors(
            available.manifest, lease.flat, lease.path, lease.offset, check=check, release=lease.release, verify=verify
        )

    @contextlib.contextmanager
    def _noting_spoilt(self) -> Iterator[None]:
        try:
            yield
        except BroadcastError as error:
            self._spoilt = error
            raise

    def _release_staged(self) -> list[SubscriberInstruction]:
        """Take note that the engine is done with what it was given, live or not."""
        if self._handed_out is not None:
            self._handed_out.release()
            self._handed_out = None
        spoilt, self._spoilt = self._spoilt, None
        if (version := self._state.staged) is None:
            return []
        if spoilt is None:
            return self._handle(WentLive(version))
        return self._handle(FetchFailed(version, str(spoilt), isinstance(spoilt, VersionUnavailableError)))

    def _handle(self, event: SubscriberEvent) -> list[SubscriberInstruction]:
        return self._state.handle(event, self._clock.now())


def _release_unused(received: Future[MappedTensors]) -> None:
    """Let go of a version that arrived although nobody waits for it any more: a lease would be held for good."""
    if not received.cancelled() and received.exception() is None:
        received.result().release()


def _raise_given_up(instructions: list[SubscriberInstruction]) -> None:
    for instruction in instructions:
        if isinstance(instruction, GiveUp):
            raise BroadcastError(f"version {instruction.version} could not be fetched: {instruction.reason}")
