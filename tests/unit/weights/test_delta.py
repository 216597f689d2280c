import numpy as np
import pytest
import torch

from asyncrl.models.layout import make_manifest, view_tensors
from asyncrl.weights.delta import CHUNK_BYTES, apply_delta, encode_delta


def flat_of(manifest):
    flat = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    return flat, view_tensors(flat, manifest)


def brought_up(manifest, base, current):
    """Return `base` with the delta to `current` applied, and the blob."""
    blob = encode_delta(manifest, base.numpy().data, current.numpy().data)
    changed = base.clone()
    apply_delta(manifest, blob, changed.numpy().data)
    return changed, blob


@pytest.mark.parametrize("share", [0.0001, 1.0])
def test_sparse_and_dense_changes_over_several_chunks_arrive(share):
    manifest = make_manifest({"w": torch.zeros(CHUNK_BYTES + 1000, dtype=torch.bfloat16)})
    base, old = flat_of(manifest)
    current, new = flat_of(manifest)
    random = np.random.default_rng(0)
    old["w"].copy_(torch.from_numpy(random.standard_normal(CHUNK_BYTES + 1000, np.float32)))
    is_changed = torch.from_numpy(random.random(CHUNK_BYTES + 1000) < share)
    new["w"].copy_(torch.where(is_changed, old["w"] * 1.01, old["w"]))
    new["w"][-1] = 5.0
    changed, blob = brought_up(manifest, base, current)
    assert torch.equal(changed, current)
    assert len(blob) < 200 + 4 * (share * current.numel() / 2)
    for max_bytes, expected in ((len(blob), blob), (len(blob) - 1, None)):
        assert encode_delta(manifest, base.numpy().data, current.numpy().data, max_bytes=max_bytes) == expected


def test_gaps_around_the_number_of_bytes_that_one_takes_arrive():
    manifest = make_manifest({"w": torch.zeros(600_000, dtype=torch.int8)})
    for positions in ([255, 511, 766], [256, 512], [65_535, 131_071, 262_143], [65_536], [254, 599_999]):
        base, _ = flat_of(manifest)
        current, new = flat_of(manifest)
        new["w"][positions] = 1
        new["w"][300_000:310_000] = 1
        changed, _ = brought_up(manifest, base, current)
        assert torch.equal(changed, current)
