"""The learner's end of the broadcast: a snapshot while the learner waits, everything else on one thread of its own.

Owns the slots, the medium's writer and the publisher thread. `publish` copies the tensors into a slot, with fingerprints
(snapshot.py), and returns; the thread commits (whole, as a delta, or both: delta_offers.py), and calls `on_available`.

Invariants:
- `publish` never waits for a subscriber or a disk; for a commit only where the one slot left to write to is being read.
- A version whose turn never comes because newer ones arrive faster than they can be committed is superseded: it is not
  announced, and the newest always is.
- Announcements are made in the order of versions, on the publisher thread.
- A commit that failed is raised by the next `publish`, `flush` or `close`: no version goes missing silently.

Called by learner/worker.py, through pipeline.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from asyncrl.broadcast.delta_offers import DeltaOffers, Offer, offer_whole
from asyncrl.broadcast.device import as_current, device_of, is_checked_on_device, slot_fingerprints
from asyncrl.broadcast.fingerprint import CopyProgress, version_fingerprint
from asyncrl.broadcast.media import kind_of, open_writer
from asyncrl.broadcast.medium import NUM_SLOTS
from asyncrl.broadcast.snapshot import take_snapshot
from asyncrl.broadcast.state import (
    Announce,
    Commit,
    CommitFailed,
    Committed,
    Drop,
    PublisherEvent,
    PublisherInstruction,
    PublisherState,
    PublishRequested,
    Stage,
)
from asyncrl.broadcast.zeromq import CurveKeys
from asyncrl.clock import Clock
from asyncrl.config.broadcast import BroadcastConfig
from asyncrl.errors import BroadcastError, ConfigError
from asyncrl.models.layout import bucket_ends, check_tensors, make_manifest, view_tensors
from asyncrl.schema.weights import Probe, WeightsAvailable, WeightsManifest

CLOSE_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _Publication:
    """A version between `publish` and its announcement."""

    probe: Probe | None
    progress: CopyProgress = field(default_factory=CopyProgress)
    snapshot_taken: threading.Event = field(default_factory=threading.Event)
    blocked_ms: float = 0.0
    offer: Offer | None = None
    fingerprint: str = ""
    bucket_fingerprints: bytes = b""


class Publisher:
    """Publishes the learner's weights, version after version.

    Args:
        config: Medium and dtype.
        run_folder: Of this run; names what is left behind by a killed learner, and where files go.
        on_available: Called on the publisher's thread for each version that can be fetched.
        clock: For `published_s`.
        curve_keys: For the `zeromq` medium; None: the run's own (RUN/keys), or no encryption where it has none.

    Example:
        >>> publisher = Publisher(config.broadcast, run_folder, on_available, clock)  # doctest: +SKIP
        >>> blocked_ms = publisher.publish(1, dict(model.named_parameters()), probe=None)  # doctest: +SKIP
        >>> publisher.close()  # doctest: +SKIP
    """

    def __init__(
        self,
        config: BroadcastConfig,
        run_folder: Path,
        on_available: Callable[[WeightsAvailable], None],
        clock: Clock,
        curve_keys: CurveKeys | None = None,
    ) -> None:
        self._config = config
        self._on_available = on_available
        self._clock = clock
        if config.delta is not None and is_checked_on_device(config.medium):
            raise ConfigError(
                f"broadcast.delta works on bytes in host memory, and medium {kind_of(config.medium)!r} leaves none there: drop it"
            )
        self._writer = open_writer(config.medium, run_folder, curve_keys)
        self._state = PublisherState(NUM_SLOTS, self._writer.keeps_slots)
        self._changed = threading.Condition()  # its lock may be taken again by the thread that has it
        self._publications: dict[int, _Publication] = {}
        self._to_commit: Commit | None = None
        self._failure = ""
        """Of a commit; raised once."""
        self._broken = ""
        """Why the thread is no more: raised from then on."""
        self._closing = False
        self._manifest: WeightsManifest | None = None
        self._deltas: DeltaOffers | None = None
        self._device = torch.device("cpu")
        self._slots: tuple[torch.Tensor, ...] = ()
        self._flats: tuple[memoryview, ...] = ()
        self._views: tuple[dict[str, torch.Tensor], ...] = ()
        self._thread = threading.Thread(target=self._run, name="asyncrl-publisher", daemon=True)

    @property
    def num_unfinished(self) -> int:
        """Versions that were published and are not yet announced."""
        with self._changed:
            return self._state.num_unfinished

    def publish(self, version: int, named_tensors: Mapping[str, torch.Tensor], probe: Probe | None = None) -> float:
        """Take a snapshot of the weights and have it made fetchable; blocks for the snapshot alone.

        Args:
            version: Greater than any before.
            named_tensors: As in the model's state dict, on any device; the same names and shapes every time.
            probe: What the learner computes under this version, for generators to compare with.

        Returns:
            Milliseconds the caller was blocked; on return it may change the tensors.

        Raises:
            BroadcastError: An earlier version could not be published, there is no room, or the tensors are not those of the run.
        """
        started_s = time.perf_counter()
        self._raise_failure()
        manifest = self._open_once(named_tensors)
        check_tensors(named_tensors, manifest)
        publication = _Publication(probe)
        stage = self._begin(version, publication)
        try:
            hashed = not is_checked_on_device(self._config.medium)
            take_snapshot(named_tensors, manifest, self._views[stage.slot], publication.progress, hashed=hashed)
        except BaseException:
            publication.progress.abandon()
            raise
        finally:
            publication.blocked_ms = (time.perf_counter() - started_s) * 1e3
            publication.snapshot_taken.set()
        return publication.blocked_ms

    def flush(self, timeout_s: float) -> bool:
        """Wait until every published version is announced or superseded; return False when `timeout_s` passed first.

        Raises:
            BroadcastError: One could not be published.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: self._failure or self._broken or not self._state.num_unfinished, timeout_s)
        self._raise_failure()
        return bool(done)

    def close(self) -> None:
        """Finish what is published, then release everything. Safe to repeat.

        Raises:
            BroadcastError: A version could not be published, or did not get done in a minute.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)
        self._views, self._flats, self._slots, self._deltas = (), (), (), None
        self._writer.close()
        if self._thread.is_alive():
            raise BroadcastError(f"the last version was not published within {CLOSE_TIMEOUT_S:.0f} s of closing")
        self._raise_failure()

    def _open_once(self, named_tensors: Mapping[str, torch.Tensor]) -> WeightsManifest:
        if self._closing:
            raise BroadcastError("the publisher is closed")
        if self._manifest is None:
            manifest = make_manifest(named_tensors, self._config.dtype, self._config.bucket_bytes)
            self._device = device_of(named_tensors)
            with as_current(self._device):
                self._slots = self._writer.open(manifest)
            self._flats = tuple(slot.numpy().data for slot in self._slots if slot.device.type == "cpu")
            self._views = tuple(view_tensors(slot, manifest) for slot in self._slots)
            self._manifest = manifest
            if self._config.delta is not None:
                self._deltas = DeltaOffers(self._config.delta, self._writer, manifest)
            self._thread.start()
        return self._manifest

    def _begin(self, version: int, publication: _Publication) -> Stage:
        """Choose a slot and free it; the commit may follow the copy at once."""
        with self._changed:
            busy_slots = self._writer.busy_slots()
            if self._state.only_busy_left(busy_slots):
                # Rather than pull a slot from under a reader: the commit that holds the other one is our own, and soon over.
                self._changed.wait_for(lambda: not self._state.is_committing or self._broken)
                self._raise_failure()
                busy_slots = self._writer.busy_slots()
            instructions = self._state.handle(PublishRequested(version, busy_slots), self._clock.now())
            (stage,) = (instruction for instruction in instructions if isinstance(instruction, Stage))
            self._writer.overwrite(stage.slot, version)
            self._publications[version] = publication
            self._carry_out(instructions)
            return stage

    def _run(self) -> None:
        """Commit one version after the other until closed and done."""
        try:
            while (commit := self._wait_for_commit()) is not None:
                self._report(self._commit(commit))
        except BaseException as error:
            with self._changed:
                self._broken = f"the publisher thread broke, nothing can be published any more: {error!r}"
                self._changed.notify_all()
            raise

    def _wait_for_commit(self) -> Commit | None:
        with self._changed:
            self._changed.wait_for(lambda: self._to_commit is not None or self._closing)
            commit, self._to_commit = self._to_commit, None
            return commit

    def _commit(self, commit: Commit) -> PublisherEvent:
        """Hash and commit outside the lock; return what became of it."""
        publication = self._publications[commit.version]
        try:
            assert self._manifest is not None
            ends = bucket_ends(self._manifest)
            publication.bucket_fingerprints = slot_fingerprints(
                self._config.medium, self._slots[commit.slot], ends, publication.progress, self._device
            )
            publication.fingerprint = version_fingerprint(publication.bucket_fingerprints)
            publication.offer = self._offer(commit, publication)
        except BroadcastError as error:
            return CommitFailed(commit.version, str(error))
        publication.snapshot_taken.wait()
        return Committed(commit.version)

    def _offer(self, commit: Commit, publication: _Publication) -> Offer:
        if self._deltas is None:
            return offer_whole(self._writer, commit, publication.fingerprint, publication.bucket_fingerprints)
        flat = self._flats[commit.slot]
        return self._deltas.offer(commit, flat, publication.fingerprint, publication.bucket_fingerprints)

    def _report(self, event: PublisherEvent) -> None:
        with self._changed:
            instructions = self._state.handle(event, self._clock.now())
            if isinstance(event, CommitFailed):
                self._failure = f"version {event.version} was not published: {event.reason}"
            announced = [self._announcement(instruction) for instruction in instructions if isinstance(instruction, Announce)]
            self._carry_out(instructions)
        for available in announced:
            self._on_available(available)
        with self._changed:
            self._changed.notify_all()

    def _carry_out(self, instructions: list[PublisherInstruction]) -> None:
        """Note what is to be committed and forgotten; the caller holds the lock."""
        for instruction in instructions:
            match instruction:
                case Commit():
                    self._to_commit = instruction
                case Drop(version):
                    self._publications.pop(version, None)
                case Stage() | Announce():
                    pass
        self._changed.notify_all()

    def _announcement(self, announce: Announce) -> WeightsAvailable:
        publication = self._publications.pop(announce.version)
        offer = publication.offer
        assert self._manifest is not None
        assert offer is not None
        is_whole = offer.whole.version == announce.version
        return WeightsAvailable(
            version=announce.version,
            medium=kind_of(self._config.medium),
            location=offer.whole.location,
            manifest=self._manifest,
            fingerprint=publication.fingerprint,
            published_s=self._clock.now(),
            blocked_ms=publication.blocked_ms,
            probe=publication.probe,
            bucket_fingerprints=publication.bucket_fingerprints,
            full_version=-1 if is_whole else offer.whole.version,
            full_bucket_fingerprints=b"" if is_whole else offer.whole.bucket_fingerprints,
            deltas=offer.deltas,
        )

    def _raise_failure(self) -> None:
        with self._changed:
            failure, self._failure = self._broken or self._failure, ""
        if failure:
            raise BroadcastError(failure)
