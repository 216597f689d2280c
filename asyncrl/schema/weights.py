"""Announcements of weight versions; the bytes themselves are sent by a medium (see weights/)."""

from __future__ import annotations

import msgspec

from asyncrl.schema.control import Message


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor in the flat byte layout of a version."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As safetensors writes it: F32, BF16, F16."""
    offset: int
    """Bytes from the start of the flat layout; a multiple of 64."""
    num_bytes: int


class WeightsManifest(msgspec.Struct, frozen=True):
    """The flat layout: the same for every version of a run."""

    entries: tuple[TensorEntry, ...]
    total_bytes: int
    bucket_bytes: int = 64 << 20
    """Whole tensors, in order, are gathered into buckets of at least this size; each bucket has a fingerprint of its own."""


class Delta(msgspec.Struct, frozen=True):
    """The changes from one version to the next, as a blob that the medium can fetch by its name."""

    version: int
    base_version: int
    """The version that the delta turns into `version`."""
    base_fingerprint: str
    """Fingerprint of the base version, because another learner's bytes may have the same version number."""
    name: str
    num_bytes: int
    fingerprint: str
    """xxh3-128 of the blob, hex."""


class Probe(msgspec.Struct, frozen=True):
    """A fixed token sequence and the learner's logprobs of it under a version, which a generator compares after its swap."""

    token_ids: bytes
    """int32 [T]."""
    logprobs: bytes
    """float32 [T - 1], of token t + 1 given tokens up to t, temperature 1."""


class WeightsAvailable(Message, frozen=True, tag="weights_available"):
    """Learner to controller to generators: a version is published and can be fetched."""

    version: int
    medium: str
    location: str
    """What the medium needs to find the bytes: a folder, a shared-memory name, an address."""
    manifest: WeightsManifest
    fingerprint: str
    """xxh3-128 of `bucket_fingerprints`, hex: identifies exactly these bytes."""
    published_s: float
    """Clock seconds when it became available to fetch."""
    blocked_ms: float = 0.0
    """How long publishing blocked the learner."""
    probe: Probe | None = None
    bucket_fingerprints: bytes = b""
    """xxh3-64 of each bucket's bytes, 8 bytes each, little-endian."""
    full_version: int = -1
    """The version that can be fetched complete; -1: this one. It is an earlier one if only deltas were published since."""
    full_bucket_fingerprints: bytes = b""
    """Bucket fingerprints of `full_version`, if that is another version."""
    deltas: tuple[Delta, ...] = ()
    """Oldest first, each based on the one before; the last leads to `version`."""

    @property
    def update_bytes(self) -> int:
        """Bytes that a generator with the previous version fetches: the last delta, or the complete version."""
        return self.deltas[-1].num_bytes if self.deltas else self.manifest.total_bytes


class VersionLive(Message, frozen=True, tag="version_live"):
    """Generator to controller: from now on, its tokens are sampled by this version."""

    version: int
    generator: str
    live_s: float
    """Clock seconds; minus `published_s`, the weight-sync time."""
    fetch_ms: float
    swap_ms: float
    """How long the swap blocked token generation."""
    probe_error: float = 0.0
    """Largest absolute difference of a probe logprob between generator and learner; -1 if there was no probe."""
