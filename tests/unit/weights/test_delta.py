import math

import numpy as np
import pytest
import torch

from asyncrl.errors import BroadcastError
from asyncrl.models.layout import bucket_ends, make_manifest, view_tensors
from asyncrl.weights.delta import CHUNK_BYTES, apply_delta, blob_fingerprint, encode_delta

TENSORS = {
    "a": torch.zeros(1000, dtype=torch.bfloat16),
    "b": torch.zeros(7, 11, dtype=torch.float32),
    "c": torch.zeros(3, dtype=torch.float64),
    "d": torch.zeros(13, dtype=torch.int8),
    "e": torch.zeros(5, dtype=torch.bool),
}
MANIFEST = make_manifest(TENSORS, bucket_bytes=64)


def flat_of(manifest):
    flat = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    return flat, view_tensors(flat, manifest)


def brought_up(manifest, base, current):
    """Return `base` with the delta to `current` applied, what it touched, and the blob."""
    blob = encode_delta(manifest, base.numpy().data, current.numpy().data)
    changed = base.clone()
    touched = apply_delta(manifest, blob, changed.numpy().data)
    return changed, touched, blob


def test_values_of_every_size_arrive_bit_for_bit():
    base, old = flat_of(MANIFEST)
    current, new = flat_of(MANIFEST)
    old["c"].fill_(1.0)
    new["a"][::3] = 0.1
    new["b"][2, 3] = -7.0
    new["c"][1] = math.pi
    new["d"][12] = -1
    new["e"][0] = True
    changed, _, _ = brought_up(MANIFEST, base, current)
    assert torch.equal(changed, current)


def test_what_floats_call_equal_or_not_a_number_is_told_apart_by_its_bits():
    base, old = flat_of(MANIFEST)
    current, new = flat_of(MANIFEST)
    old["b"].fill_(0.0)
    new["b"].fill_(-0.0)
    old["a"][0] = math.nan
    new["a"].view(torch.int16)[0] = 0x7FC1  # another NaN
    old["c"][0] = new["c"][0] = math.nan
    changed, _, _ = brought_up(MANIFEST, base, current)
    assert torch.equal(changed, current)
    assert math.copysign(1.0, view_tensors(changed, MANIFEST)["b"][0, 0]) == -1.0


def test_nothing_changed_makes_a_delta_of_next_to_nothing_that_touches_nothing():
    base, _ = flat_of(MANIFEST)
    changed, touched, blob = brought_up(MANIFEST, base, base)
    assert (torch.equal(changed, base), touched, len(blob)) == (True, set(), 4)


def test_every_changed_bucket_is_said_to_be_touched():
    base, _ = flat_of(MANIFEST)
    current, new = flat_of(MANIFEST)
    new["b"][0, 0] = 1.0
    new["e"][4] = True
    _, touched, _ = brought_up(MANIFEST, base, current)
    starts = [0, *bucket_ends(MANIFEST)[:-1]]
    assert touched == {starts.index(entry.offset) for entry in MANIFEST.entries if entry.name in {"b", "e"}}


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.3, 1.0])
def test_sparse_and_dense_changes_over_several_chunks_arrive(share):
    manifest = make_manifest({"w": torch.zeros(CHUNK_BYTES + 1000, dtype=torch.bfloat16)})
    base, old = flat_of(manifest)
    current, new = flat_of(manifest)
    random = np.random.default_rng(0)
    old["w"].copy_(torch.from_numpy(random.standard_normal(CHUNK_BYTES + 1000, np.float32)))
    is_changed = torch.from_numpy(random.random(CHUNK_BYTES + 1000) < share)
    new["w"].copy_(torch.where(is_changed, old["w"] * 1.01, old["w"]))
    new["w"][-1] = 5.0
    changed, _, blob = brought_up(manifest, base, current)
    assert torch.equal(changed, current)
    assert len(blob) < 200 + 4 * (share * current.numel() / 2)


def test_a_gap_of_exactly_the_escape_value_is_not_taken_for_an_escape():
    manifest = make_manifest({"w": torch.zeros(600_000, dtype=torch.int8)})
    for positions in ([255, 511, 766], [65_535, 131_071, 262_143], [254, 599_999]):
        base, _ = flat_of(manifest)
        current, new = flat_of(manifest)
        new["w"][positions] = 1
        new["w"][300_000:310_000] = 1
        changed, _, _ = brought_up(manifest, base, current)
        assert torch.equal(changed, current)


def test_a_delta_larger_than_allowed_is_none():
    base, _ = flat_of(MANIFEST)
    current, new = flat_of(MANIFEST)
    new["a"].copy_(torch.arange(1000))
    size = len(encode_delta(MANIFEST, base.numpy().data, current.numpy().data))
    assert encode_delta(MANIFEST, base.numpy().data, current.numpy().data, max_bytes=size) is not None
    assert encode_delta(MANIFEST, base.numpy().data, current.numpy().data, max_bytes=size - 1) is None


def test_blobs_that_differ_have_fingerprints_that_differ():
    assert blob_fingerprint(b"delta") != blob_fingerprint(b"delt4")


@pytest.mark.parametrize("cut", [0, 3, 10, 25])
def test_a_delta_cut_short_is_refused(cut):
    base, _ = flat_of(MANIFEST)
    current, new = flat_of(MANIFEST)
    new["a"][::2] = 3.0
    blob = encode_delta(MANIFEST, base.numpy().data, current.numpy().data)
    with pytest.raises(BroadcastError, match="damaged or of another layout"):
        apply_delta(MANIFEST, blob[:cut], base.numpy().data)
