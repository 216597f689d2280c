import os
from pathlib import Path

import pytest
import torch

from asyncrl.errors import GenerationError
from asyncrl.generate.vllm_folder import ModelFolder
from asyncrl.generate.vllm_orders import FileOrder
from asyncrl.generate.vllm_weights import load_order
from asyncrl.models.layout import make_manifest, view_tensors
from asyncrl.models.mapped import MappedTensors

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHAPES = {EMBEDDING: (4, 2), "norm.weight": (2,)}
FOLDER = ModelFolder(Path("model"), SHAPES, 4, frozenset(), "float32", "llama", 32, 16, {HEAD: EMBEDDING})


def tensors() -> dict[str, torch.Tensor]:
    return {EMBEDDING: torch.arange(8.0).view(4, 2), "norm.weight": torch.ones(2)}


def test_plain_tensors_lie_in_a_file_for_as_long_as_the_order_lives() -> None:
    with load_order(tensors(), FOLDER) as order:
        assert isinstance(order.source, FileOrder)
        path = order.source.path
        flat = torch.from_file(path, size=order.source.manifest.total_bytes, dtype=torch.uint8)
        found = view_tensors(flat, order.source.manifest)
        assert {name: tensor.tolist() for name, tensor in found.items()} == {n: t.tolist() for n, t in tensors().items()}
    assert not os.path.exists(path)


def test_mapped_tensors_are_named_and_not_copied() -> None:
    manifest = make_manifest(tensors())
    mapped = MappedTensors(manifest, torch.zeros(manifest.total_bytes, dtype=torch.uint8), "/somewhere", 64)
    with load_order(mapped, FOLDER) as order:
        assert order.source == FileOrder("/somewhere", 64, manifest)


@pytest.mark.parametrize("given", [EMBEDDING, HEAD])
def test_a_tied_tensor_under_either_name_is_loaded_under_both(given: str) -> None:
    one = {given: tensors()[EMBEDDING], "norm.weight": torch.ones(2)}
    with load_order(one, FOLDER) as order:
        assert order.also_as == {given: HEAD if given == EMBEDDING else EMBEDDING}


def test_tied_tensors_that_are_one_in_memory_travel_once_and_are_loaded_under_both_names() -> None:
    shared = tensors()
    with load_order({**shared, HEAD: shared[EMBEDDING]}, FOLDER) as order:
        assert [entry.name for entry in order.source.manifest.entries] == [EMBEDDING, "norm.weight"]
        assert order.also_as == {EMBEDDING: HEAD}


def test_tied_tensors_that_differ_are_refused_before_anything_is_written() -> None:
    with pytest.raises(GenerationError, match="differ"), load_order({**tensors(), HEAD: torch.zeros(4, 2)}, FOLDER):
        pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": torch.zeros(1)}, "1 tensors this model does not have: extra"),
        ({"norm.weight": torch.zeros(3)}, r"norm\.weight has shape \(3,\), the model's is \(2,\)"),
    ],
)
def test_unknown_names_and_other_shapes_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(GenerationError, match=message), load_order({**tensors(), **change}, FOLDER):
        pass


def test_a_missing_tensor_is_named() -> None:
    with (
        pytest.raises(GenerationError, match=r"lack 1 of the model's 2 tensors: norm\.weight"),
        load_order({EMBEDDING: tensors()[EMBEDDING]}, FOLDER),
    ):
        pass


def test_a_server_elsewhere_is_given_what_lies_in_the_shared_folder_and_a_copy_there_of_what_does_not(tmp_path: Path) -> None:
    manifest = make_manifest(tensors())
    flat = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    for name, view in view_tensors(flat, manifest).items():
        view.copy_(tensors()[name])
    inside = MappedTensors(manifest, flat, str(tmp_path / "slot"), 64)
    with load_order(inside, FOLDER, shared_folder=str(tmp_path)) as order:
        assert order.source == FileOrder(str(tmp_path / "slot"), 64, manifest)
    with load_order(MappedTensors(manifest, flat, "/elsewhere", 64), FOLDER, shared_folder=str(tmp_path)) as order:
        assert isinstance(order.source, FileOrder)
        copied = Path(order.source.path)
        assert copied.parent == tmp_path
        assert copied.read_bytes() == flat.numpy().tobytes()
    assert list(tmp_path.iterdir()) == []


def test_a_shared_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = str(tmp_path / "gone")
    with (
        pytest.raises(GenerationError, match=r"gone \(generate\.engine\.shared_folder\)"),
        load_order(tensors(), FOLDER, None, folder),
    ):
        pass
