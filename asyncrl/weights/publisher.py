"""The learner's end of weight sync: a snapshot while the learner waits, everything else on one thread of its own.

`publish` copies the tensors into a slot and returns. The publisher's thread makes the fingerprints, has the medium make the
version fetchable (whole, as a delta, or both: delta_chain.py) and calls `on_available`.

Invariants:
- `publish` never waits for a subscriber or a disk; for a commit only where the one slot left to write to is being read.
- A version that newer ones overtake before its commit begins is superseded: it is not announced, and the newest always is.
- Announcements are made in the order of versions, on the publisher's thread.
- A commit that failed is raised by the next `publish`, `flush` or `close`: no version goes missing silently.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from asyncrl.clock import Clock
from asyncrl.config.broadcast import BroadcastConfig
from asyncrl.errors import BroadcastError, ConfigError
from asyncrl.models.layout import bucket_ends, check_tensors, copy_out, make_manifest, view_tensors
from asyncrl.schema.weights import Probe, WeightsAvailable, WeightsManifest
from asyncrl.weights.delta_chain import DeltaOffers, Offer, WholeVersion
from asyncrl.weights.fingerprint import fingerprints_of, version_fingerprint
from asyncrl.weights.media.base import NUM_SLOTS
from asyncrl.weights.media.device import as_current, device_fingerprints, device_of, side_stream
from asyncrl.weights.media.registry import fingerprints_made, kind_of, open_writer
from asyncrl.weights.sockets import CurveKeys

CLOSE_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _Slot:
    phase: Literal["free", "filling", "staged", "committing", "committed"] = "free"
    version: int = -1


class Slots:
    """Which slot takes the next version, and which version is committed next: pure.

    Every version ends in exactly one of: committed (and later overwritten), superseded by a newer one before its commit began, or
    failed. With one slot being committed there is always another to write to.

    Example:
        >>> slots = Slots(2, keeps_slots=True)
        >>> slots.fill(1, busy=frozenset()), slots.filled(1), slots.next_commit()
        (0, None, (0, 1))
        >>> slots.finish(1, is_committed=True), slots.fill(2, busy=frozenset())
        (None, 1)
    """

    def __init__(self, num_slots: int, keeps_slots: bool) -> None:
        self._slots = [_Slot() for _ in range(num_slots)]
        self._keeps_slots = keeps_slots
        self.newest = -1

    @property
    def num_unfinished(self) -> int:
        """Versions that are on their way into a slot or from there to the medium."""
        return sum(slot.phase in {"filling", "staged", "committing"} for slot in self._slots)

    @property
    def is_committing(self) -> bool:
        """Whether a version is on its way from its slot to the medium, or about to be."""
        return any(slot.phase in {"staged", "committing"} for slot in self._slots)

    def must_wait(self, busy: frozenset[int]) -> bool:
        """Return whether to fill a slot now would take one that is being read, and would not after the commit under way."""
        open_slots = {index for index, slot in enumerate(self._slots) if slot.phase != "committing"}
        return len(open_slots) < len(self._slots) and open_slots <= busy

    def fill(self, version: int, busy: frozenset[int]) -> int:
        """Return the slot for `version`: free before superseded before committed; of the committed one nobody reads, the oldest.

        Raises:
            BroadcastError: The version is not newer than the last.
        """
        if version <= self.newest:
            raise BroadcastError(
                f"version {version} was published after version {self.newest}; versions only grow, a learner that goes back to a "
                f"checkpoint needs a new publisher"
            )
        rank = {"free": 0, "staged": 1, "committed": 2}
        open_slots = [index for index, slot in enumerate(self._slots) if slot.phase in rank]
        chosen = min(open_slots, key=lambda i: (rank[self._slots[i].phase], i in busy, self._slots[i].version, i))
        self._slots[chosen] = _Slot("filling", version)
        self.newest = version
        return chosen

    def filled(self, version: int) -> None:
        """Note that the version is whole in its slot."""
        self._of(version, "filling").phase = "staged"

    def next_commit(self) -> tuple[int, int] | None:
        """Return slot and version to commit now, if there is one and no other commit is under way."""
        staged = [(slot.version, index) for index, slot in enumerate(self._slots) if slot.phase == "staged"]
        if not staged or any(slot.phase == "committing" for slot in self._slots):
            return None
        version, index = min(staged)
        self._slots[index].phase = "committing"
        return index, version

    def finish(self, version: int, *, is_committed: bool) -> None:
        """Note that the version can be fetched, or that its filling or its commit failed."""
        slot = self._of(version, "committing" if is_committed else "")
        is_kept = is_committed and self._keeps_slots
        slot.phase, slot.version = ("committed", version) if is_kept else ("free", -1)

    def check_invariants(self) -> None:
        """Assert what must hold between calls."""
        held = [slot.version for slot in self._slots if slot.phase != "free"]
        assert len(held) == len(set(held)), f"a version is in two slots: {self._slots}"
        assert sum(slot.phase == "committing" for slot in self._slots) <= 1, f"two commits at once: {self._slots}"
        assert all(version <= self.newest for version in held), f"holds what was never published: {self._slots}"

    def _of(self, version: int, phase: str) -> _Slot:
        for slot in self._slots:
            if slot.version == version and slot.phase != "free" and phase in {"", slot.phase}:
                return slot
        raise AssertionError(f"version {version} is not {phase or 'in a slot'}: {self._slots}")


@dataclass(slots=True)
class _Publication:
    """A version between `publish` and its announcement."""

    probe: Probe | None
    blocked_ms: float


class Publisher:
    """Publishes the learner's weights, version after version.

    Args:
        config: Medium and dtype.
        run_folder: Of this run; names what is left behind by a killed learner, and where files go.
        on_available: Called on the publisher's thread for each version that can be fetched.
        clock: For `published_s`.
        curve_keys: For media with sockets; None: the run's own (RUN/keys), or no encryption where it has none.

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
        self._made = fingerprints_made(config)
        if config.delta is not None and self._made == "device":
            raise ConfigError(
                f"broadcast.delta works on bytes in host memory, and medium {kind_of(config.medium)!r} leaves none there: drop it"
            )
        self._writer = open_writer(config.medium, run_folder, curve_keys)
        self._slots = Slots(NUM_SLOTS, self._writer.keeps_slots)
        self._changed = threading.Condition()
        self._publications: dict[int, _Publication] = {}
        self._failure = ""
        """Of a commit; raised once."""
        self._broken = ""
        """Why the thread is no more: raised from then on."""
        self._closing = False
        self._manifest: WeightsManifest | None = None
        self._ends: tuple[int, ...] = ()
        self._deltas: DeltaOffers | None = None
        self._device = torch.device("cpu")
        self._flats: tuple[torch.Tensor, ...] = ()
        """The slots' memory, uint8 [total_bytes] each."""
        self._thread = threading.Thread(target=self._run, name="asyncrl-publisher", daemon=True)

    @property
    def num_unfinished(self) -> int:
        """Versions that were published and are not yet announced."""
        with self._changed:
            return self._slots.num_unfinished

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
        slot = self._free_slot(version)
        try:
            copy_out(named_tensors, view_tensors(self._flats[slot], manifest))
        except BaseException:
            with self._changed:
                self._slots.finish(version, is_committed=False)
            raise
        blocked_ms = (time.perf_counter() - started_s) * 1e3
        with self._changed:
            self._publications[version] = _Publication(probe, blocked_ms)
            self._slots.filled(version)
            self._changed.notify_all()
        return blocked_ms

    def flush(self, timeout_s: float) -> bool:
        """Wait until every published version is announced or superseded; return False when `timeout_s` passed first.

        Raises:
            BroadcastError: One could not be published.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: self._failure or self._broken or not self._slots.num_unfinished, timeout_s)
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
        self._flats, self._deltas = (), None
        self._writer.close()
        if self._thread.is_alive():
            raise BroadcastError(f"the last version was not published within {CLOSE_TIMEOUT_S:.0f} s of closing")
        self._raise_failure()

    def _open_once(self, named_tensors: Mapping[str, torch.Tensor]) -> WeightsManifest:
        if self._closing:
            raise BroadcastError("the publisher is closed")
        if self._manifest is None:
            manifest = make_manifest(named_tensors, self._config.dtype, self._config.bucket_bytes)
            self._device, self._ends = device_of(named_tensors), bucket_ends(manifest)
            with as_current(self._device):
                self._flats = self._writer.open(manifest)
            self._manifest = manifest
            if self._config.delta is not None:
                self._deltas = DeltaOffers(self._config.delta, self._writer, manifest)
            self._thread.start()
        return self._manifest

    def _free_slot(self, version: int) -> int:
        """Choose a slot and make what it holds unfetchable."""
        with self._changed:
            if self._slots.must_wait(self._writer.busy_slots()):
                # Rather than overwrite what is being read: the commit that holds the other slot is our own, and soon over.
                self._changed.wait_for(lambda: not self._slots.is_committing or self._broken)
                self._raise_failure()
            slot = self._slots.fill(version, self._writer.busy_slots())
            self._writer.overwrite(slot, version)
            return slot

    def _run(self) -> None:
        """Commit one version after the other until closed and done."""
        try:
            while (commit := self._next_commit()) is not None:
                slot, version = commit
                available, failure = None, ""
                with self._changed:
                    publication = self._publications.pop(version)
                    # Of older ones only what was superseded is left.
                    self._publications = {number: kept for number, kept in self._publications.items() if number > version}
                try:
                    available = self._commit(slot, version, publication)
                except BroadcastError as error:
                    failure = f"version {version} was not published: {error}"
                if available is not None:
                    self._on_available(available)
                with self._changed:
                    self._failure = failure or self._failure
                    self._slots.finish(version, is_committed=not failure)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._broken = f"the publisher thread broke, nothing can be published any more: {error!r}"
                self._changed.notify_all()
            raise

    def _next_commit(self) -> tuple[int, int] | None:
        """Wait for a version to commit; None: closed, and there is none."""
        commit: tuple[int, int] | None = None
        with self._changed:
            while (commit := self._slots.next_commit()) is None and not self._closing:
                self._changed.wait()
        return commit

    def _commit(self, slot: int, version: int, publication: _Publication) -> WeightsAvailable:
        """Fingerprint the version and make it fetchable; return its announcement."""
        assert self._manifest is not None
        fingerprints = self._fingerprints(self._flats[slot])
        name = version_fingerprint(fingerprints)
        if self._deltas is None:
            offer = Offer(WholeVersion(version, self._writer.commit(slot, version, name), fingerprints))
        else:
            offer = self._deltas.offer(slot, version, self._flats[slot].numpy().data, name, fingerprints)
        is_whole = offer.whole.version == version
        return WeightsAvailable(
            version=version,
            medium=kind_of(self._config.medium),
            location=offer.whole.location,
            manifest=self._manifest,
            fingerprint=name,
            published_s=self._clock.now(),
            blocked_ms=publication.blocked_ms,
            probe=publication.probe,
            bucket_fingerprints=fingerprints,
            full_version=-1 if is_whole else offer.whole.version,
            full_bucket_fingerprints=b"" if is_whole else offer.whole.bucket_fingerprints,
            deltas=offer.deltas,
        )

    def _fingerprints(self, flat: torch.Tensor) -> bytes:
        """Return what the version's buckets are announced with; empty where the medium proves a whole version without."""
        if self._made == "none":
            return b""
        if self._made == "device":
            with side_stream(self._device):
                return device_fingerprints(flat, self._ends, self._device)
        return fingerprints_of(flat.numpy().data, self._ends)

    def _raise_failure(self) -> None:
        with self._changed:
            failure, self._failure = self._broken or self._failure, ""
        if failure:
            raise BroadcastError(failure)
