import numpy as np
import pytest
import torch

from asyncrl.models.layout import make_manifest, view_tensors
from asyncrl.weights.delta import CHUNK_BYTES, apply_delta, encode_delta

NUM_ELEMENTS = CHUNK_BYTES + 1000
MANIFEST = make_manifest({"w": torch.zeros(NUM_ELEMENTS, dtype=torch.bfloat16)})


def places(share):
    return np.random.default_rng(0).random(NUM_ELEMENTS) < share


@pytest.mark.parametrize(
    "changed", [places(0.0001), places(1.0), [255, 511, 766], [256, 512], [65_535, 131_071, 262_143], [65_536], [254, -1]]
)
def test_changes_sparse_and_dense_over_several_chunks_and_of_every_gap_arrive_in_few_bytes(changed):
    flats = [torch.zeros(MANIFEST.total_bytes, dtype=torch.uint8) for _ in range(2)]
    (old,), (new,) = (view_tensors(flat, MANIFEST).values() for flat in flats)
    old.copy_(torch.from_numpy(np.random.default_rng(1).standard_normal(NUM_ELEMENTS, np.float32)))
    new.copy_(old)
    new[changed] *= 1.01
    new[[300_000, -1]] = 50.0
    base, current = (flat.numpy().data for flat in flats)
    blob = encode_delta(MANIFEST, base, current)
    assert len(blob) < 200 + 4 * int((old != new).sum())
    for max_bytes, expected in ((len(blob), blob), (len(blob) - 1, None)):
        assert encode_delta(MANIFEST, base, current, max_bytes=max_bytes) == expected
    apply_delta(MANIFEST, blob, base)
    assert torch.equal(*flats)
