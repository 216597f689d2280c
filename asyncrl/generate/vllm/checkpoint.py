"""Examines a model's checkpoint before vLLM opens it: names and locations of its tensors, and limits of the model.

vLLM loads the tensors that it gets and ignores unknown ones, so requests and weights are checked against the folder first.
transformers stores some models differently from their checkpoints (all experts of a layer in one tensor, a head by another name),
and the learner sends transformers' tensors. The checkpoint tensors that transformers would write for each of them are found once,
without any data, as names and positions inside that tensor; workers then take views of them without copying.

Reads safetensors' headers only. Imports no vllm.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.errors import EngineConfigError, GenerationError
from asyncrl.models.causal import rope_positions

HEAD = "lm_head.weight"
"""transformers' name of a head that may be tied to the embedding."""
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_MOST_FIXED_BYTES = 16 << 20
_EMBEDDING = "embed_tokens.weight"

Shapes = dict[str, tuple[int, ...]]


class Part(msgspec.Struct, frozen=True):
    """A checkpoint's tensor inside one of the model's; all numbers count elements."""

    name: str
    """Its name in the checkpoint."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Offset from the start of the model's contiguous tensor."""


class FixedTensor(msgspec.Struct, frozen=True):
    """A small tensor that no version changes (a buffer of the model) and that vLLM needs at every load of its layer."""

    dtype: str
    """The torch dtype's name."""
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The description of a Hugging Face folder."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    """The shape of every tensor, by its name in transformers' model; tied tensors once."""
    vocabulary_size: int
    end_ids: frozenset[int]
    dtype: str
    """The torch dtype of the largest tensor; vLLM's `auto` would load float32 as a 16-bit dtype."""
    model_type: str
    """transformers' name of the architecture."""
    head_size: int
    """Attention head size; 0: unknown."""
    max_positions: int
    """Maximum sequence length of the model; 0: unknown."""
    tied: dict[str, str] = field(default_factory=dict)
    """Maps a second name of a tensor to its name in `shapes`."""
    parts: dict[str, tuple[Part, ...]] = field(default_factory=dict)
    """The checkpoint's tensors for each tensor of `shapes` that it does not contain itself."""
    fixed: dict[str, FixedTensor] = field(default_factory=dict)
    """Further tensors of the model in the checkpoint, by their names there."""
    rope_positions: int = 0
    """See `models.causal.rope_positions`."""
    trust_remote_code: bool = False


def read_folder(path: Path, *, trust_remote_code: bool = False) -> ModelFolder:
    """Read a folder's config and headers.

    Raises:
        EngineConfigError: It has no safetensors, or its tensors are not those of transformers' model.
        GenerationError: It cannot be read.
    """
    headers: Shapes = {}
    dtypes: dict[str, str] = {}
    end = None
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
        for file in weight_files(path):
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    header = tensors.get_slice(name)
                    headers[name], dtypes[name] = tuple(header.get_shape()), header.get_dtype()
        if (path / "generation_config.json").is_file():
            end = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
    except (OSError, ValueError, KeyError, SafetensorError, StrictDataclassError) as error:
        raise GenerationError(f"cannot open the model folder {path}: {error}") from error
    if not headers:
        raise EngineConfigError(f"the model folder {path} has no model.safetensors: save the model with save_pretrained")
    if getattr(config, "quantization_config", None):
        raise EngineConfigError(
            f"the model in {path} is quantized (quantization_config in its config.json); training changes what it was made "
            "of: take the unquantized model"
        )
    shapes, parts, fixed = find_tensors(path, config, headers, trust_remote_code=trust_remote_code)
    embedding = next((name for name in shapes if name.endswith(_EMBEDDING)), None)
    tied = {HEAD: embedding} if embedding and getattr(config, "tie_word_embeddings", False) else {}
    text = config.get_text_config()
    num_heads = getattr(text, "num_attention_heads", 0)
    head_size = getattr(text, "head_dim", None) or (getattr(text, "hidden_size", 0) // num_heads if num_heads else 0)
    end = end or getattr(text, "eos_token_id", None)
    return ModelFolder(
        path=path,
        shapes={name: shape for name, shape in shapes.items() if name not in tied},
        vocabulary_size=text.vocab_size,
        end_ids=frozenset([] if end is None else [end] if isinstance(end, int) else end),
        dtype=_DTYPES.get(dtypes[max(headers, key=lambda name: prod(headers[name]))], "auto"),
        model_type=config.model_type,
        head_size=0 if getattr(text, "kv_lora_rank", None) else int(head_size),  # latent attention has its own sizes
        max_positions=rope_positions(config) or getattr(text, "max_position_embeddings", 0) or 0,
        rope_positions=rope_positions(config, "longrope"),
        tied=tied,
        parts=parts,
        fixed=_fixed(path, fixed),
        trust_remote_code=trust_remote_code,
    )


def _fixed(path: Path, names: frozenset[str]) -> dict[str, FixedTensor]:
    found = {}
    for file in weight_files(path) if names else []:
        with safe_open(file, framework="pt") as tensors:
            for name in names.intersection(tensors.keys()):
                tensor = tensors.get_tensor(name)
                data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                found[name] = FixedTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)
    if (num_bytes := sum(len(tensor.data) for tensor in found.values())) > _MOST_FIXED_BYTES:
        raise EngineConfigError(
            f"the model folder {path} has {num_bytes} bytes of buffers beside its parameters ({min(found)}, ...); "
            f"vLLM is given at most {_MOST_FIXED_BYTES} with each update: use generate.engine.kind = 'transformers'"
        )
    return found


def weight_files(path: Path) -> list[Path]:
    """Return the files that save_pretrained wrote, without other files in the folder."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return [path / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    return [file for file in [path / "model.safetensors"] if file.is_file()]


def find_tensors(
    path: Path, config: PreTrainedConfig, shapes: Shapes, *, trust_remote_code: bool
) -> tuple[Shapes, dict[str, tuple[Part, ...]], frozenset[str]]:
    """Find the checkpoint tensors for each of the model's tensors; other tensors do not belong to the model.

    Args:
        path: The model folder, for the message.
        config: The model's config.
        shapes: The shape of every tensor in the checkpoint, by its name there.
        trust_remote_code: Whether code in the folder may run.

    Returns:
        The shape of every parameter that the learner sends, tied ones once; the checkpoint's tensors for each parameter that it
        does not contain itself; the checkpoint's names of the model's buffers. If transformers has no such language model, the
        checkpoint's own tensors.

    Raises:
        EngineConfigError: transformers cannot build the model, or one of its tensors is not a rearrangement of this checkpoint's.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in getattr(config, "auto_map", {}):
        return shapes, {}, frozenset()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", trust_remote_code=trust_remote_code)
    except Exception as error:
        raise EngineConfigError(f"transformers cannot build the model in {path}: {type(error).__name__}: {error}") from error
    model.tie_weights()
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    differing = {name: shape for name, shape in parameters.items() if name not in shapes}
    parts = {name: _parts_of(model, name, shape) for name, shape in differing.items()}
    if _missing(parts, shapes):  # a prefix that transformers omits in a model made from a config
        model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)  # noqa: SLF001 - as from_pretrained does
        parts = {name: _parts_of(model, name, shape) for name, shape in differing.items()}
    for name, missing in _missing(parts, shapes).items():
        raise EngineConfigError(
            f"the checkpoint in {path} lacks {name}, by this name and as transformers would write it ({missing}): load the "
            "model with transformers and save it again, or use generate.engine.kind = 'transformers'"
        )
    buffers = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if not isinstance(tensor, Parameter)}
    fixed = {part.name for name, tensor in buffers.items() for part in _parts_of(model, name, tuple(tensor.shape))}
    return parameters, parts, frozenset(fixed & shapes.keys())


def _missing(parts: dict[str, tuple[Part, ...]], shapes: Shapes) -> dict[str, str]:
    """Return the tensors with parts that the checkpoint lacks, each with the first missing part."""
    lacking = {name: [part for part in own if shapes.get(part.name) != part.shape] for name, own in parts.items()}
    return {name: ", ".join(f"{part.name} {part.shape}" for part in some[:3]) for name, some in lacking.items() if some}


def _parts_of(model: torch.nn.Module, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
    """Return the position, inside this tensor, of each tensor that transformers would write."""
    whole = torch.empty(shape, device="meta")
    try:
        with torch.no_grad(), _ViewsOnly():  # type: ignore[no-untyped-call]
            written = revert_weight_conversion(model, {name: whole})
    except (RuntimeError, ValueError, TypeError) as error:
        raise EngineConfigError(f"vLLM cannot be given new values of {name}: {error}") from error
    if any(tensor.untyped_storage()._cdata != whole.untyped_storage()._cdata for tensor in written.values()):  # noqa: SLF001
        raise EngineConfigError(
            f"vLLM cannot be given new values of {name}: its checkpoint has other numbers, not just another order; "
            f"generate.engine.kind = 'transformers' can"
        )
    return tuple(
        Part(own, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())) for own, tensor in written.items()
    )


class _ViewsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Skips copies that only change the layout (`contiguous`), so that a result still shows its position in the source."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        del types
        return args[0] if func is torch.ops.aten.clone.default else func(*args, **(kwargs or {}))
