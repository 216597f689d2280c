import pytest
import torch

from asyncrl.errors import BroadcastError
from asyncrl.models.layout import check_manifest, make_manifest
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
