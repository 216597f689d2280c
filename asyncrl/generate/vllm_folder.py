"""What the model's folder says before vLLM opens it: tensors' names and shapes, tied ones, the vocabulary, the end tokens.

vLLM is told none of it: it loads what it is given and reads past what it does not understand, so requests and weights are checked
against the folder first. Reads safetensors' headers only. Called by generate/vllm_engine.py and generate/vllm_server_engine.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, GenerationConfig

from asyncrl.errors import GenerationError
from asyncrl.generate.vllm_orders import HEAD, FixedTensor, Part
from asyncrl.generate.vllm_parts import find_tensors

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_MOST_FIXED_BYTES = 16 << 20
_EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A Hugging Face folder, looked at from outside."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    """Of every tensor, by its name in transformers' model; tied ones once."""
    vocabulary_size: int
    end_ids: frozenset[int]
    dtype: str
    """Of the largest tensor, as torch names it: what vLLM's `auto` is not, which halves float32."""
    model_type: str
    """transformers' name of the architecture."""
    head_size: int
    """Of attention; 0: it does not say."""
    max_positions: int
    """Longest sequence the model was made for; 0: it does not say."""
    tied: dict[str, str] = field(default_factory=dict)
    """A second name of a tensor to the name it has in `shapes`."""
    parts: dict[str, tuple[Part, ...]] = field(default_factory=dict)
    """What the checkpoint has instead of a tensor of `shapes`, where it has not that one."""
    fixed: dict[str, FixedTensor] = field(default_factory=dict)
    """What the checkpoint has beside them that belongs to the model, by its name there."""


def read_folder(path: Path, *, trust_remote_code: bool = False) -> ModelFolder:
    """Read a folder's config and headers.

    Raises:
        GenerationError: It cannot be read, has no safetensors, or its tensors are not those of transformers' model.
    """
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
        shapes, dtype = _tensors(path)
    except (OSError, ValueError, KeyError, SafetensorError, StrictDataclassError) as error:
        raise GenerationError(f"cannot open the model folder {path}: {error}") from error
    if not shapes:
        raise GenerationError(f"the model folder {path} has no model.safetensors: save the model with save_pretrained")
    if getattr(config, "quantization_config", None):
        raise GenerationError(
            f"the model in {path} is quantized (quantization_config in its config.json); training changes what it was made "
            "of: take the unquantized model"
        )
    tensors = find_tensors(path, config, shapes, trust_remote_code=trust_remote_code)
    shapes = tensors.shapes
    text = config.get_text_config()
    tied = _tied(shapes) if getattr(config, "tie_word_embeddings", False) else {}
    for name in tied:
        shapes.pop(name, None)
    return ModelFolder(
        path=path,
        shapes=shapes,
        vocabulary_size=text.vocab_size,
        end_ids=_end_ids(path, text),
        dtype=dtype,
        model_type=config.model_type,
        head_size=_head_size(text),
        max_positions=getattr(text, "max_position_embeddings", 0) or 0,
        tied=tied,
        parts=tensors.parts,
        fixed=_fixed(path, tensors.fixed),
    )


def _tensors(path: Path) -> tuple[dict[str, tuple[int, ...]], str]:
    """Return the shapes, and the dtype of the largest tensor."""
    shapes, dtypes = {}, {}
    for file in weight_files(path):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                header = tensors.get_slice(name)
                shapes[name], dtypes[name] = tuple(header.get_shape()), header.get_dtype()
    largest = max(shapes, key=lambda name: prod(shapes[name]), default="")
    return shapes, _DTYPES.get(dtypes.get(largest, ""), "auto")


def _fixed(path: Path, names: frozenset[str]) -> dict[str, FixedTensor]:
    found = {}
    for file in weight_files(path) if names else []:
        with safe_open(file, framework="pt") as tensors:
            for name in names.intersection(tensors.keys()):
                tensor = tensors.get_tensor(name)
                data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                found[name] = FixedTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)
    if (num_bytes := sum(len(tensor.data) for tensor in found.values())) > _MOST_FIXED_BYTES:
        raise GenerationError(
            f"the model folder {path} has {num_bytes} bytes of buffers beside its parameters ({min(found)}, ...); "
            f"vLLM is given at most {_MOST_FIXED_BYTES} with each update: use generate.engine.kind = 'transformers'"
        )
    return found


def weight_files(path: Path) -> list[Path]:
    """Return the files that save_pretrained wrote, and no others that lie beside them."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return [path / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    return [file for file in [path / "model.safetensors"] if file.is_file()]


def _tied(shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    embedding = next((name for name in shapes if name.endswith(_EMBEDDING)), None)
    return {} if embedding is None else {HEAD: embedding}


def _head_size(config: Any) -> int:  # noqa: ANN401 - transformers is untyped
    if getattr(config, "kv_lora_rank", None):  # latent attention has kernels, and sizes, of its own
        return 0
    given = getattr(config, "head_dim", None)
    heads, width = getattr(config, "num_attention_heads", 0), getattr(config, "hidden_size", 0)
    return int(given or (width // heads if heads else 0))


def _end_ids(path: Path, config: Any) -> frozenset[int]:  # noqa: ANN401 - transformers is untyped
    end = getattr(config, "eos_token_id", None)
    if (path / "generation_config.json").is_file():
        end = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id or end
    if end is None:
        return frozenset()
    return frozenset([end] if isinstance(end, int) else end)
