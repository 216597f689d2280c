import pytest
import torch

from asyncrl.broadcast.fingerprint import CopyProgress, fingerprints_behind, fingerprints_of
from asyncrl.broadcast.snapshot import take_snapshot
from asyncrl.models.layout import bucket_ends, make_manifest, view_tensors

TENSORS = {
    "embed": torch.randn(1500, 700),
    "nothing": torch.zeros(0, 3),
    "turned": torch.randn(50, 33).t(),
    "count": torch.arange(5),
    "scalar": torch.tensor(2.0),
    "mask": torch.tensor([True, False]),
    "last": torch.randn(7),
    "end": torch.zeros(0),
}


@pytest.mark.parametrize("dtype", ["model", "bfloat16"])
@pytest.mark.parametrize("bucket_bytes", [1, 4096, 64 << 20])
@pytest.mark.parametrize("hashed", [True, False])
def test_the_slot_holds_the_tensors_and_the_fingerprints_are_those_of_its_bytes(dtype, bucket_bytes, hashed):
    manifest = make_manifest(TENSORS, dtype, bucket_bytes)
    slot = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    views, progress = view_tensors(slot, manifest), CopyProgress()
    take_snapshot(TENSORS, manifest, views, progress, hashed=hashed)
    for name, tensor in TENSORS.items():
        assert torch.equal(views[name], tensor.to(views[name].dtype))
    ends, flat = bucket_ends(manifest), slot.numpy().data
    assert fingerprints_behind(flat, ends, progress) == fingerprints_of(flat, ends, lambda: None)
    assert bool(progress.fingerprints) is hashed


def test_a_copy_that_fails_is_raised_and_tells_nobody_that_it_is_done():
    manifest = make_manifest(TENSORS)
    views = view_tensors(torch.zeros(manifest.total_bytes, dtype=torch.uint8), manifest)
    progress = CopyProgress()
    with pytest.raises((RuntimeError, ValueError)):
        take_snapshot(TENSORS | {"last": torch.zeros(8)}, manifest, views, progress)
    assert progress.fingerprints == b""
