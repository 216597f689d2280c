import pytest
import torch

from asyncrl.errors import BroadcastError
from asyncrl.models.layout import make_manifest
from asyncrl.models.mapped import MappedTensors

MANIFEST = make_manifest({"a": torch.zeros(3), "b": torch.zeros(2, 2, dtype=torch.bfloat16)})


def test_it_is_a_mapping_of_views_in_the_order_of_the_layout():
    flat = torch.zeros(MANIFEST.total_bytes, dtype=torch.uint8)
    tensors = MappedTensors(MANIFEST, flat)
    assert (list(tensors), len(tensors)) == (["a", "b"], 2)
    assert tensors["b"].shape == (2, 2)
    tensors["a"].fill_(1.0)
    assert flat[:12].view(torch.float32).tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(KeyError):
        tensors["c"]


def test_without_a_lease_there_is_nothing_to_check_or_release_and_no_file():
    tensors = MappedTensors(MANIFEST, torch.zeros(MANIFEST.total_bytes, dtype=torch.uint8))
    tensors.check()
    tensors.release()
    assert (tensors.path, tensors.offset) == ("", 0)


def test_check_and_release_are_those_of_the_lease():
    released = []

    def overwritten():
        raise BroadcastError("overwritten")

    flat = torch.zeros(MANIFEST.total_bytes, dtype=torch.uint8)
    tensors = MappedTensors(MANIFEST, flat, "/somewhere", 4096, check=overwritten, release=lambda: released.append(1))
    with pytest.raises(BroadcastError, match="overwritten"):
        tensors.check()
    tensors.release()
    assert (tensors.path, tensors.offset, released) == ("/somewhere", 4096, [1])


@pytest.mark.parametrize(
    "read", [MappedTensors.verify, dict, lambda tensors: tensors["a"], lambda tensors: tensors.copy_into({})]
)
def test_it_is_verified_once_by_the_first_who_reads_and_by_nobody_who_does_not(read):
    verified = []
    flat = torch.zeros(MANIFEST.total_bytes, dtype=torch.uint8)
    tensors = MappedTensors(MANIFEST, flat, verify=lambda *_: verified.append(1))
    assert "a" in tensors
    assert "c" not in tensors
    assert (list(tensors), verified) == (["a", "b"], [])
    read(tensors)
    assert (tensors["b"].shape, verified) == ((2, 2), [1])


def test_what_was_not_found_right_cannot_be_read():
    def damaged(tensors, targets):
        raise BroadcastError(f"damaged: {sorted(tensors)} on the way to {sorted(targets)}")

    tensors = MappedTensors(MANIFEST, torch.zeros(MANIFEST.total_bytes, dtype=torch.uint8), verify=damaged)
    for _ in range(2):
        with pytest.raises(BroadcastError, match=r"\['a', 'b'\] on the way to \['a'\]"):
            tensors.copy_into({"a": torch.zeros(3)})
        with pytest.raises(BroadcastError, match=r"on the way to \[\]"):
            tensors["a"]


def test_verified_tensors_are_copied_by_name_and_cast():
    tensors = MappedTensors(MANIFEST, torch.zeros(MANIFEST.total_bytes, dtype=torch.uint8))
    tensors["b"].fill_(2.0)
    targets = {"b": torch.zeros(2, 2), "a": torch.ones(3), "other": torch.ones(1)}
    tensors.copy_into(targets)
    assert {name: target.unique().tolist() for name, target in targets.items()} == {"b": [2.0], "a": [0.0], "other": [1.0]}


def test_a_buffer_of_another_size_is_refused():
    with pytest.raises(BroadcastError, match="the manifest describes"):
        MappedTensors(MANIFEST, torch.zeros(64, dtype=torch.uint8))
