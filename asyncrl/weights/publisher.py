"""The learner's end of weight sync: the learner waits for a snapshot only; everything else runs on the publisher's thread.

`publish` copies the tensors into a slot and returns. The publisher's thread computes the fingerprints, has the medium make the
version available to fetch (complete, as a delta, or both: delta.py) and calls `on_available`.

Invariants:
- `publish` never waits for a subscriber or a disk. It waits for a commit only if the one slot left to write to is being read.
- A version is superseded if a newer one is published before its commit begins; it is then not announced. The newest version is
  always announced, unless its snapshot failed: `publish` raised that error, and the version before may have been superseded.
- Announcements are made in the order of versions, on the publisher's thread.
- A failed commit is logged, and either passed to `on_failure` or raised by the next `publish` or `close`: no version is lost
  without a message.
- The newest version may be published again after its snapshot or its commit failed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch

from asyncrl.clock import Clock
from asyncrl.config.broadcast import BroadcastConfig, SharedMemoryMedium
from asyncrl.errors import BroadcastError
from asyncrl.models.layout import bucket_ends, check_tensors, copy_out, make_manifest, view_tensors
from asyncrl.schema.weights import Delta, Probe, WeightsAvailable, WeightsManifest
from asyncrl.weights.buckets import device_fingerprints, fingerprints_of, side_stream, version_fingerprint
from asyncrl.weights.delta import DeltaOffers, WholeVersion
from asyncrl.weights.media.base import NUM_SLOTS
from asyncrl.weights.media.registry import open_writer
from asyncrl.weights.media.shared_memory import PROVES_WHOLE_VERSIONS

CLOSE_TIMEOUT_S = 60.0
_Phase = Literal["free", "filling", "staged", "committing", "committed"]
log = logging.getLogger(__name__)


class Slots:
    """Decides which slot takes the next version, and which version is committed next; pure.

    Every version ends in exactly one state: committed (and later overwritten), superseded by a newer one before its commit began,
    or failed. While one slot is being committed, there is always another to write to.

    Example:
        >>> slots = Slots(2, keeps_slots=True)
        >>> slots.fill(1, busy=frozenset()), slots.filled(1), slots.next_commit()
        (0, None, (0, 1))
        >>> slots.finish(1, is_committed=True), slots.fill(2, busy=frozenset())
        (None, 1)
    """

    def __init__(self, num_slots: int, keeps_slots: bool) -> None:
        self._phases: list[_Phase] = ["free"] * num_slots
        self._versions = [-1] * num_slots
        self._keeps_slots = keeps_slots
        self.newest = -1

    def must_wait(self, busy: frozenset[int]) -> bool:
        """Return whether every slot to fill now is being read, while the running commit will make another one free."""
        others = {index for index, phase in enumerate(self._phases) if phase != "committing"}
        return len(others) < len(self._phases) and others <= busy

    def fill(self, version: int, busy: frozenset[int]) -> int:
        """Return the slot for `version`: a free one, else a superseded one, else a committed one, preferably unread, the oldest.

        Raises:
            BroadcastError: The version is not newer than the last one.
        """
        if version <= self.newest:
            back = "versions only grow; a learner that goes back to a checkpoint needs a new publisher"
            raise BroadcastError(f"version {version} was published after version {self.newest}: {back}")
        rank = {"free": 0, "staged": 1, "committed": 2}
        fillable = [index for index, phase in enumerate(self._phases) if phase in rank]
        chosen = min(fillable, key=lambda i: (rank[self._phases[i]], i in busy, self._versions[i], i))
        self._phases[chosen], self._versions[chosen], self.newest = "filling", version, version
        return chosen

    def filled(self, version: int) -> None:
        """Note that the version is complete in its slot."""
        self._phases[self._versions.index(version)] = "staged"

    def next_commit(self) -> tuple[int, int] | None:
        """Return the slot and version to commit now, if there is one and no other commit is running."""
        staged = [(self._versions[index], index) for index, phase in enumerate(self._phases) if phase == "staged"]
        if not staged or "committing" in self._phases:
            return None
        version, index = min(staged)
        self._phases[index] = "committing"
        return index, version

    def finish(self, version: int, *, is_committed: bool) -> None:
        """Note that the version can be fetched, or that its snapshot or commit failed; the newest may then be filled again."""
        slot = self._versions.index(version)
        if is_committed and self._keeps_slots:
            self._phases[slot] = "committed"
        else:
            self._phases[slot], self._versions[slot] = "free", -1
        if not is_committed and version == self.newest:
            self.newest -= 1

    def check_invariants(self) -> None:
        """Assert what must hold between calls."""
        held = [version for version in self._versions if version >= 0]
        assert len(held) == len(set(held)), f"a version is in two slots: {held}"
        assert self._phases.count("committing") <= 1, f"two commits at once: {self._phases}"
        assert all(version <= self.newest for version in held), f"holds what was never published: {held}"


class Publisher:
    """Publishes the learner's weights, version after version.

    Args:
        config: Medium and dtype.
        run_folder: The run's folder: the place of files and of the keys (RUN/keys), if any; leftovers of a killed learner are
            found by its name.
        on_available: Called on the publisher's thread for each version that can be fetched.
        clock: For `published_s`.
        on_failure: Called on that thread with the error if a version, or every later one, cannot be fetched; None: the next
            `publish` or `close` raises it.

    Example:
        >>> publisher = Publisher(config.broadcast, run_folder, on_available, clock)  # doctest: +SKIP
        >>> blocked_ms = publisher.publish(1, dict(model.named_parameters()), probe=None)  # doctest: +SKIP
        >>> publisher.close()  # doctest: +SKIP
    """

    def __init__(
        self, config: BroadcastConfig, run_folder: Path, on_available: Callable[[WeightsAvailable], object], clock: Clock,
        on_failure: Callable[[BroadcastError], object] | None = None,
    ) -> None:  # fmt: skip
        self._config, self._on_available, self._on_failure, self._clock = config, on_available, on_failure, clock
        whole_is_proven = isinstance(config.medium, SharedMemoryMedium) and PROVES_WHOLE_VERSIONS
        self._has_fingerprints = not whole_is_proven or config.delta is not None or config.verify
        self._writer = open_writer(config.medium, run_folder)
        self._slots = Slots(NUM_SLOTS, self._writer.keeps_slots)
        self._changed = threading.Condition()
        self._publications: dict[int, tuple[Probe | None, float]] = {}
        """By slot: probe and milliseconds blocked of the version in the slot."""
        self._failure = ""
        """Error of a failed commit; raised once, if there is no `on_failure`."""
        self._broken = ""
        """Why the thread has ended; raised from then on."""
        self._closing = False
        self._manifest: WeightsManifest | None = None
        self._ends: tuple[int, ...] = ()
        self._deltas: DeltaOffers | None = None
        self._device = torch.device("cpu")
        self._stream: torch.cuda.Stream | None = None
        self._flats: tuple[torch.Tensor, ...] = ()
        """The slots' memory, uint8 [total_bytes] each."""
        self._thread = threading.Thread(target=self._run, name="asyncrl-publisher", daemon=True)

    def publish(self, version: int, named_tensors: Mapping[str, torch.Tensor], probe: Probe | None = None) -> float:
        """Take a snapshot of the weights and make it available to generators; blocks only for the snapshot.

        Args:
            version: Greater than any before.
            named_tensors: As in the model's state dict, on any device; the same names and shapes every time.
            probe: Tokens and the learner's log-probabilities of them under this version, for generators to compare with.

        Returns:
            Milliseconds the caller was blocked; after the return it may change the tensors.

        Raises:
            BroadcastError: An earlier version could not be published, there is no room, or the tensors are not those of the run.
        """
        started_s = time.perf_counter()
        self._raise_failure()
        if self._closing:
            raise BroadcastError("the publisher is closed")
        manifest = self._manifest or self._open(named_tensors)
        check_tensors(named_tensors, manifest)
        with self._changed:
            # Rather than overwrite what is being read, wait for the commit that holds the other slot: our own, and soon over.
            self._changed.wait_for(lambda: self._broken or not self._slots.must_wait(self._writer.busy_slots()))
            self._raise_failure()
            slot = self._slots.fill(version, self._writer.busy_slots())
            self._writer.overwrite(slot)
        try:
            copy_out(named_tensors, view_tensors(self._flats[slot], manifest))
        except BaseException:
            with self._changed:
                self._slots.finish(version, is_committed=False)
            raise
        blocked_ms = (time.perf_counter() - started_s) * 1e3
        with self._changed:
            self._publications[slot] = (probe, blocked_ms)
            self._slots.filled(version)
            self._changed.notify_all()
        return blocked_ms

    def close(self) -> None:
        """Finish publishing, then release everything. Safe to repeat.

        Raises:
            BroadcastError: A version could not be published, or publishing did not finish within a minute.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)
        self._flats, self._deltas = (), None
        self._writer.close()
        if self._thread.is_alive():
            raise BroadcastError(f"the last version was not published within {CLOSE_TIMEOUT_S:.0f} s of closing")
        self._raise_failure()

    def _open(self, named_tensors: Mapping[str, torch.Tensor]) -> WeightsManifest:
        """Compute the layout of a version, make the slots and start the publisher's thread."""
        manifest = make_manifest(named_tensors, self._config.dtype, self._config.bucket_bytes)
        self._device, self._ends = next(iter(named_tensors.values())).device, bucket_ends(manifest)
        with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
            self._flats = self._writer.open(manifest)
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._manifest = manifest
        if self._config.delta is not None:
            self._deltas = DeltaOffers(self._config.delta, self._writer, manifest)
        self._thread.start()
        return manifest

    def _run(self) -> None:
        """Commit one version after the other until closed and done."""
        try:
            while True:
                with self._changed:
                    commit = self._slots.next_commit()
                    while commit is None and not self._closing:
                        self._changed.wait()
                        commit = self._slots.next_commit()
                    if commit is None:
                        return
                    slot, version = commit
                    probe, blocked_ms = self._publications[slot]
                failure = ""
                try:
                    self._on_available(self._commit(slot, version, probe, blocked_ms))
                except BroadcastError as error:
                    failure = f"version {version} was not published: {error}"
                    log.error("%s", failure)  # noqa: TRY400 - the message is complete
                with self._changed:
                    if self._on_failure is None:
                        self._failure = failure or self._failure
                    self._slots.finish(version, is_committed=not failure)
                    self._changed.notify_all()
                if failure and self._on_failure is not None:
                    self._on_failure(BroadcastError(failure))
        except BaseException as error:
            with self._changed:
                self._broken = f"the publisher thread failed, nothing can be published any more: {error!r}"
                self._changed.notify_all()
            if self._on_failure is not None:
                self._on_failure(BroadcastError(self._broken))
            raise

    def _commit(self, slot: int, version: int, probe: Probe | None, blocked_ms: float) -> WeightsAvailable:
        """Compute the version's fingerprints and make it available to fetch; return its announcement."""
        assert self._manifest is not None
        flat, fingerprints, deltas = self._flats[slot], b"", tuple[Delta, ...]()
        if self._config.medium.on_gpu:
            try:
                with side_stream(self._device, self._stream):
                    fingerprints = device_fingerprints(flat, self._ends, self._device)
            except torch.OutOfMemoryError as error:
                instead = "set packing.tokens_per_row lower, or broadcast.medium.kind to shared_memory"
                raise BroadcastError(f"{self._device} has no room to compute fingerprints ({error}); {instead}") from error
        elif self._has_fingerprints:
            fingerprints = fingerprints_of(flat.numpy().data, self._ends)
        name = version_fingerprint(fingerprints) if fingerprints else ""
        if self._deltas is None:
            whole = WholeVersion(version, self._writer.commit(slot, version, name), fingerprints)
        else:
            whole, deltas = self._deltas.offer(slot, version, flat.numpy().data, name, fingerprints)
        is_whole = whole.version == version
        return WeightsAvailable(
            version=version,
            medium=self._config.medium.kind,
            location=whole.location,
            manifest=self._manifest,
            fingerprint=name,
            published_s=self._clock.now(),
            blocked_ms=blocked_ms,
            probe=probe,
            bucket_fingerprints=fingerprints,
            full_version=-1 if is_whole else whole.version,
            full_bucket_fingerprints=b"" if is_whole else whole.bucket_fingerprints,
            deltas=deltas,
        )

    def _raise_failure(self) -> None:
        with self._changed:
            failure, self._failure = self._broken or self._failure, ""
        if failure:
            raise BroadcastError(failure)
