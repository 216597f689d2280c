import pytest
import torch

from asyncrl.errors import BroadcastError
from asyncrl.models.layout import check_manifest, copy_tensor, copy_tensors, make_manifest
from asyncrl.schema.weights import TensorEntry, WeightsManifest


def test_tied_tensors_travel_once_under_their_first_name():
    embedding = torch.randn(6, 4)
    manifest = make_manifest({"embed": embedding, "layer": torch.randn(4), "head": embedding})
    assert [entry.name for entry in manifest.entries] == ["embed", "layer"]


@pytest.mark.parametrize("entries", [
    [((2,), "F32", 0, 12)], [((2,), "F32", 8, 8)], [((2,), "F99", 0, 8)], [((-2,), "F32", 0, -8)], [((40,), "F32", 0, 160)],
    [((16,), "F32", 0, 64), ((2,), "F32", 0, 8)],
])  # fmt: skip
def test_a_manifest_that_contradicts_itself_is_refused(entries):
    named = tuple(TensorEntry(f"t{number}", *entry) for number, entry in enumerate(entries))
    with pytest.raises(BroadcastError):
        check_manifest(WeightsManifest(named, 128))


def test_copies_of_several_tensors_are_exact_and_another_shape_is_refused_before_a_byte_is_written():
    sources = [torch.arange(number, number + (1 << 20), dtype=torch.int32) for number in range(9)]
    held = torch.zeros(9 << 20, dtype=torch.int32)
    copy_tensors(zip(sources, held.chunk(9), strict=True))
    assert torch.equal(held, torch.cat(sources))
    with pytest.raises(RuntimeError, match="size"):
        copy_tensor(sources[1], held[:5])
    assert torch.equal(held, torch.cat(sources))
