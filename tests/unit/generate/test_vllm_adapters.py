from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.config.learner import LoRAConfig
from asyncrl.errors import GenerationError
from asyncrl.generate.vllm_adapters import base_of, check_adapters, merged
from asyncrl.generate.vllm_folder import ModelFolder
from asyncrl.generate.vllm_orders import Part

A, B = "layer.q_proj.lora_A.default.weight", "layer.q_proj.lora_B.default.weight"
LORA = LoRAConfig(rank=2, alpha=6.0, target_modules=("q_proj",))


def folder_of(tmp_path, model_type: str = "llama") -> ModelFolder:
    shapes = {"layer.q_proj.weight": (4, 3), "norm.weight": (3,)}
    return ModelFolder(tmp_path, shapes, 8, frozenset(), "float32", model_type, 32, 16)


def test_the_merged_layer_is_base_plus_scaled_product_and_others_are_as_they_were(tmp_path) -> None:
    torch.manual_seed(0)
    base = {"layer.q_proj.weight": torch.randn(4, 3), "norm.weight": torch.randn(3)}
    save_file(base, tmp_path / "model.safetensors")
    a, b = torch.randn(2, 3), torch.randn(4, 2)
    found = dict(merged([(A, a), (B, b)], base_of(folder_of(tmp_path), LORA), torch.device("cpu")))
    assert torch.allclose(found["layer.q_proj.weight"], base["layer.q_proj.weight"] + 3.0 * b @ a)
    assert torch.equal(found["norm.weight"], base["norm.weight"])


def test_layers_stored_input_first_get_the_product_transposed(tmp_path) -> None:
    base = torch.randn(3, 4)
    save_file({"layer.q_proj.weight": base}, tmp_path / "model.safetensors")
    a, b = torch.randn(2, 3), torch.randn(4, 2)
    found = dict(merged([(A, a), (B, b)], base_of(folder_of(tmp_path, "gpt2"), LORA), torch.device("cpu")))
    assert torch.allclose(found["layer.q_proj.weight"], base + 3.0 * (b @ a).T)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({A: (2, 3)}, "lack 1"),
        ({}, "lack 2"),
        ({A: (2, 3), B: (4, 5)}, r"shape \(4, 5\), the model's is \(4, 2\)"),
        ({A: (2, 3), B: (4, 2), "norm.weight": (3,)}, "does not have: norm.weight"),
        ({A: (2, 3), B: (4, 2), "other.lora_A.default.weight": (2, 3)}, "does not have: other"),
    ],
)
def test_what_is_not_the_whole_of_the_adapters_is_refused(tmp_path, shapes, message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        check_adapters(shapes, folder_of(tmp_path), LORA)


def test_the_whole_of_the_adapters_is_taken(tmp_path) -> None:
    check_adapters({A: (2, 3), B: (4, 2)}, folder_of(tmp_path), LORA)


def test_a_layer_that_the_checkpoint_has_under_another_name_is_refused(tmp_path) -> None:
    part = Part("attention.query.weight", (4, 3), (3, 1), 0)
    folder = replace(folder_of(tmp_path), parts={"layer.q_proj.weight": (part,)})
    with pytest.raises(GenerationError, match=r"layer\.q_proj under another name"):
        check_adapters({A: (2, 3), B: (4, 2)}, folder, LORA)
