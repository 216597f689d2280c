"""Random changes, absences and restarts over an unreliable medium, through the real codec, offers and staging buffers: the bytes
are the learner's, at no greater cost than a whole version and the deltas that are offered.
"""

import contextlib
import threading

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.broadcast import DeltaConfig
from asyncrl.errors import BroadcastError
from asyncrl.models.layout import bucket_ends, make_manifest
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.weights.buckets import fingerprints_of, version_fingerprint
from asyncrl.weights.delta import DeltaOffers, apply_delta, bytes_of, deltas_from, encode_delta, plan_whole
from asyncrl.weights.media.base import VersionUnavailableError
from asyncrl.weights.subscriber import Staging

DTYPES = [torch.bfloat16, torch.float32, torch.int8, torch.float64, torch.bool, torch.float16]
MANIFEST = make_manifest({str(i): torch.zeros(40 + i, dtype=dtype) for i, dtype in enumerate(DTYPES)}, bucket_bytes=128)
NOT_CANCELLED = threading.Event()


class UnreliableMedium:
    """Both ends at once, in a dict; refuses and damages what it is told to, and counts what is fetched."""

    def __init__(self, keeps_slots):
        self.keeps_slots = keeps_slots
        self.wholes, self.blobs = {}, {}
        self.flat, self.fetched = b"", []
        self.refuses_wholes = self.refuses_blobs = False

    def commit(self, slot, version, fingerprint):
        if self.refuses_wholes:
            raise BroadcastError("no room")
        location = f"{version} {fingerprint}"
        self.wholes[location] = bytes(self.flat)
        return location

    def put_blob(self, name, blob):
        if self.refuses_blobs:
            raise BroadcastError("no room")
        self.blobs[name] = blob

    def drop_blob(self, name):
        self.blobs.pop(name, None)

    def fetch(self, available, into, cancelled):
        into[:] = self.wholes[available.location]
        self.fetched.append(len(into))
        return fingerprints_of(into, bucket_ends(available.manifest))

    def fetch_blob(self, available, name, size, cancelled):
        if name not in self.blobs:
            raise VersionUnavailableError("gone")
        self.fetched.append(size)
        return self.blobs[name]


class Learner:
    def __init__(self, medium, full_every, max_share):
        self._medium, self._full_every = medium, full_every
        self._offers = DeltaOffers(DeltaConfig(full_every=full_every, max_share=max_share), medium, MANIFEST)
        medium.blobs.clear()

    def publish(self, version, flat):
        self._medium.flat = flat
        buckets = fingerprints_of(memoryview(flat), bucket_ends(MANIFEST))
        whole, deltas = self._offers.offer(0, version, memoryview(flat), version_fingerprint(buckets), buckets)
        assert len(deltas) <= self._full_every
        assert bytes_of(deltas) <= MANIFEST.total_bytes
        available = WeightsAvailable(
            version, "any", whole.location, MANIFEST, version_fingerprint(buckets), 0.0, bucket_fingerprints=buckets,
            full_version=whole.version, full_bucket_fingerprints=whole.bucket_fingerprints, deltas=deltas,
        )  # fmt: skip
        plan_whole(available)  # raises where the deltas do not lead on from the whole version
        assert deltas_from(deltas, deltas[0].base_version if deltas else version) == deltas
        return available


CHANGES = st.dictionaries(st.integers(0, MANIFEST.total_bytes - 1), st.integers(0, 255), max_size=30)
TROUBLES = st.sampled_from(["", "", "", "", "no room", "no room for blobs", "blob damaged", "blob lost", "restart"])
MOVES = st.lists(st.tuples(TROUBLES, CHANGES, st.sets(st.integers(0, 2))), max_size=25)


@settings(max_examples=100)
@given(st.booleans(), st.integers(1, 4), st.sampled_from([0.05, 0.3, 1.0]), MOVES)
def test_what_goes_live_is_the_learners_snapshot_bit_for_bit_or_an_error(keeps_slots, full_every, max_share, moves):
    """Who has the version before fetches deltas alone, nobody more than the whole and all deltas; unless some were spoiled."""
    medium = UnreliableMedium(keeps_slots)
    learner, flat, version = Learner(medium, full_every, max_share), bytearray(MANIFEST.total_bytes), 0
    generators, held, is_spoiled = [Staging(medium) for _ in range(3)], [None] * 3, False
    for trouble, changes, absent in moves:
        if trouble == "restart":
            learner, version, is_spoiled = Learner(medium, full_every, max_share), max(0, version - 2), False
        version += 1
        for place, value in changes.items():
            flat[place] = value
        medium.refuses_wholes, medium.refuses_blobs = trouble == "no room", trouble.startswith("no room")
        try:
            available = learner.publish(version, flat)
        except BroadcastError:
            continue
        assert set(medium.blobs) <= {delta.name for delta in available.deltas}
        if trouble in {"blob damaged", "blob lost"} and available.deltas:
            name, is_spoiled = available.deltas[-1].name, True
            damaged = medium.blobs[name][:-1] + bytes([medium.blobs[name][-1] ^ 1])
            medium.blobs = medium.blobs | {name: damaged} if trouble == "blob damaged" else {}
        before = [(delta.base_version, delta.base_fingerprint) for delta in available.deltas[-1:]]
        for index in {0, 1, 2} - absent:
            medium.fetched.clear()
            try:
                received = generators[index].receive(available, NOT_CANCELLED)
            except BroadcastError:
                assert not keeps_slots, "the whole was there"
                held[index] = None
            else:
                assert bytes(received.flat.numpy().data) == bytes(flat)
                most = bytes_of(available.deltas) + (0 if held[index] in before else MANIFEST.total_bytes)
                assert is_spoiled or (sum(medium.fetched) <= most and MANIFEST.total_bytes not in medium.fetched[1:])
                held[index] = (available.version, available.fingerprint)
    medium.refuses_wholes = medium.refuses_blobs = False
    for step in range(1, full_every + 1):
        available = learner.publish(version + step, flat)
    for generator in generators:
        assert bytes(generator.receive(available, NOT_CANCELLED).flat.numpy().data) == bytes(flat)


@settings(max_examples=200)
@given(CHANGES, st.data())
def test_a_delta_between_any_bytes_is_lossless_and_a_damaged_one_breaks_nothing_but_the_buffer(changes, data):
    total = MANIFEST.total_bytes
    base = data.draw(st.just(bytes(total)) | st.binary(min_size=total, max_size=total))
    current = bytearray(base)
    for place, value in changes.items():
        current[place] = value
    blob = bytearray(encode_delta(MANIFEST, memoryview(base), memoryview(current)))
    buffer = bytearray(base)
    apply_delta(MANIFEST, bytes(blob), memoryview(buffer))
    assert buffer == current
    for place, value in data.draw(st.dictionaries(st.integers(0, len(blob) - 1), st.integers(0, 255), max_size=4)).items():
        blob[place] = value
    with contextlib.suppress(BroadcastError):
        assert apply_delta(MANIFEST, bytes(blob), memoryview(bytearray(base))) <= set(range(len(bucket_ends(MANIFEST))))
