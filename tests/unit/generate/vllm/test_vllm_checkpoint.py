"""What vLLM is given of a model whose checkpoint has its tensors otherwise: exactly what transformers would write."""

from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from asyncrl.errors import GenerationError
from asyncrl.generate.vllm.checkpoint import read_folder
from asyncrl.generate.vllm.load_request import FileSource, LoadRequest, load_request
from asyncrl.generate.vllm.worker_extension import checkpoint_tensors
from asyncrl.models.layout import make_manifest

SMALL = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
MIXTURE = {**SMALL, "num_key_value_heads": 1, "num_experts_per_tok": 2}
CONFIGS = {
    "experts in one tensor": transformers.Qwen3MoeConfig(**MIXTURE, num_experts=3, moe_intermediate_size=5),
    "experts and layers by other names": transformers.MixtralConfig(**MIXTURE, num_local_experts=3),
    "buffers beside its parameters": transformers.Glm4MoeConfig(
        **MIXTURE, n_routed_experts=3, moe_intermediate_size=5, first_k_dense_replace=1
    ),
    "a head by another name": transformers.GPTNeoXConfig(**SMALL),
    "nothing else": transformers.LlamaConfig(**SMALL),
}


def saved(name: str, folder: Path) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name])
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_is_made_of_the_models_tensors_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    folder = read_folder(tmp_path)
    assert folder.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    with load_request(tensors, folder) as order:
        order = msgspec.json.decode(msgspec.json.encode(order), type=LoadRequest)
    given = dict(checkpoint_tensors(iter(tensors.items()), order))
    written = load_file(tmp_path / "model.safetensors")
    assert given.keys() == written.keys()
    assert all(torch.equal(given[name], tensor) for name, tensor in written.items())
    assert bool(folder.parts) == (name != "nothing else")
    assert len(folder.fixed) == (name == "buffers beside its parameters")


def test_a_prefix_of_the_checkpoints_own_is_found(tmp_path: Path) -> None:
    """As Gemma 3 of the hub has its vision tower: transformers writes the prefix only of what it read with it."""
    vision = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4}
    text = {**SMALL, "num_key_value_heads": 1, "head_dim": 4}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    written = {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in load_file(file).items()}
    save_file(written, file, {"format": "pt"})
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    order = LoadRequest(FileSource("", 0, make_manifest(tensors)), parts=read_folder(tmp_path).parts)
    given = dict(checkpoint_tensors(iter(tensors.items()), order))
    assert given.keys() == written.keys()
    assert all(torch.equal(given[name], tensor) for name, tensor in written.items())


@pytest.mark.parametrize(("field", "message"), [
    ({"quantization_config": {"quant_method": "fp8"}}, "is quantized"),
    ({"num_attention_heads": 3}, "cannot open the model folder .* multiple of the number of attention heads"),
    ({"hidden_act": "nonsense"}, "cannot build the model in .*nonsense"),
])  # fmt: skip
def test_a_folder_that_cannot_be_trained_is_refused(field: dict[str, object], message: str, tmp_path: Path) -> None:
    saved("nothing else", tmp_path)
    config = tmp_path / "config.json"
    config.write_bytes(msgspec.json.encode({**msgspec.json.decode(config.read_bytes()), **field}))
    with pytest.raises(GenerationError, match=f"(?s){message}"):
        read_folder(tmp_path)


def test_what_is_not_the_models_is_not_asked_for(tmp_path: Path) -> None:
    model = saved("nothing else", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.layers.2.eh_proj.weight": torch.zeros(2)}, file, {"format": "pt"})
    assert read_folder(tmp_path).shapes.keys() == dict(model.named_parameters()).keys()


def test_a_checkpoint_that_lacks_an_expert_is_refused_at_the_start(tmp_path: Path) -> None:
    saved("experts in one tensor", tmp_path)
    file = tmp_path / "model.safetensors"
    rest = {name: tensor for name, tensor in load_file(file).items() if "layers.1.mlp.experts.2.up_proj" not in name}
    save_file(rest, file, {"format": "pt"})
    with pytest.raises(GenerationError, match=r"lacks .*layers\.1\.mlp\.experts\.gate_up_proj, .*experts\.2\.up_proj.* again"):
        read_folder(tmp_path)
