import pytest
import torch

from asyncrl.broadcast.fingerprint import CopyProgress, fingerprints_behind, fingerprints_of
from asyncrl.broadcast.snapshot import copy_with_fingerprints, take_snapshot
from asyncrl.errors import BroadcastError
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


@pytest.mark.parametrize("bucket_bytes", [1, 4096, 64 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_loaded_out_of_a_slot_is_the_tensors_and_the_fingerprints_are_those_of_the_slot(bucket_bytes, dtype):
    manifest = make_manifest(TENSORS, "model", bucket_bytes)
    slot = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    views = view_tensors(slot, manifest)
    take_snapshot(TENSORS, manifest, views, CopyProgress())
    held = {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in TENSORS.items()}  # one of them keeps its strides
    checks = []
    found = copy_with_fingerprints(manifest, views, held, of_source=True, check=lambda: checks.append(1))
    ends = bucket_ends(manifest)
    assert found == fingerprints_of(slot.numpy().data, ends, lambda: None)
    assert len(checks) == len(ends)
    for name, tensor in TENSORS.items():
        assert torch.equal(held[name], tensor.to(dtype))


def test_a_failing_check_stops_the_copy():
    manifest = make_manifest(TENSORS, "model", 1)
    held = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}

    def check():
        raise BroadcastError("overtaken")

    with pytest.raises(BroadcastError, match="overtaken"):
        copy_with_fingerprints(manifest, TENSORS, held, of_source=True, check=check)
    assert not any(tensor.any() for tensor in held.values())


def test_a_copy_that_fails_is_raised_and_tells_nobody_that_it_is_done():
    manifest = make_manifest(TENSORS)
    views = view_tensors(torch.zeros(manifest.total_bytes, dtype=torch.uint8), manifest)
    progress = CopyProgress()
    with pytest.raises((RuntimeError, ValueError)):
        take_snapshot(TENSORS | {"last": torch.zeros(8)}, manifest, views, progress)
    assert progress.fingerprints == b""
