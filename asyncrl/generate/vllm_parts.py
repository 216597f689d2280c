"""A model's tensors as checkpoints have them, which is how vLLM takes them.

transformers holds some models otherwise than their checkpoints do (all experts of a layer in one tensor, a head by another name),
converting as it loads and saves; and the learner sends what transformers holds. What it would write of each tensor is found once,
without any data, as names and places inside that tensor. Workers then cut the tensor up without copying.

Called by generate/vllm_folder.py. Imports no vllm.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.errors import GenerationError
from asyncrl.generate.vllm_orders import Part

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """What a model has, by the names of transformers."""

    shapes: Shapes
    """Of every parameter, tied ones once: what the learner sends."""
    parts: dict[str, tuple[Part, ...]]
    """What the checkpoint has instead of a parameter, where it has not that one."""
    fixed: frozenset[str] = frozenset()
    """Names, in the checkpoint, of what is no parameter but the model's: it never changes, and vLLM wants it all the same."""


def find_tensors(
    path: Path,
    config: Any,  # noqa: ANN401 - transformers is untyped
    shapes: Shapes,
    *,
    trust_remote_code: bool = False,
) -> ModelTensors:
    """Find what of a checkpoint each of the model's tensors is; what else lies in it is not the model's.

    Args:
        path: Of the model folder, for the message.
        config: Of the model.
        shapes: Of every tensor in the checkpoint, by its name there.
        trust_remote_code: Whether code in the folder may run.

    Returns:
        The model's tensors; those of the checkpoint where transformers has no such language model.

    Raises:
        GenerationError: transformers cannot build the model, or a tensor of it is no rearrangement of tensors in this checkpoint.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in getattr(config, "auto_map", {}):
        return ModelTensors(shapes, {})
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", trust_remote_code=trust_remote_code)
    except Exception as error:
        raise GenerationError(f"transformers cannot build the model in {path}: {type(error).__name__}: {error}") from error
    model.tie_weights()
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    differing = {name: shape for name, shape in parameters.items() if name not in shapes}
    parts = {name: _parts_of(model, name, shape) for name, shape in differing.items()}
    if _missing(parts, shapes):  # a prefix of the checkpoint's, which transformers leaves out of what was made from a config
        model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)  # noqa: SLF001 - as from_pretrained does
        parts = {name: _parts_of(model, name, shape) for name, shape in differing.items()}
    for name, missing in _missing(parts, shapes).items():
        raise GenerationError(
            f"the checkpoint in {path} has {name} neither by this name nor as transformers would write it ({missing}): load the "
            "model with transformers and save it anew, or use generate.engine.kind = 'transformers'"
        )
    buffers = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if not isinstance(tensor, Parameter)}
    fixed = {part.name for name, tensor in buffers.items() for part in _parts_of(model, name, tuple(tensor.shape))}
    return ModelTensors(parameters, parts, frozenset(fixed & shapes.keys()))


def _missing(parts: dict[str, tuple[Part, ...]], shapes: Shapes) -> dict[str, str]:
    """Return the tensors of which the checkpoint lacks parts, with the first of these."""
    lacking = {name: [part for part in own if shapes.get(part.name) != part.shape] for name, own in parts.items()}
    return {name: ", ".join(f"{part.name} {part.shape}" for part in some[:3]) for name, some in lacking.items() if some}


def _parts_of(model: torch.nn.Module, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
    """Return where each tensor that transformers would write lies inside this one."""
    whole = torch.empty(shape, device="meta")
    try:
        with torch.no_grad(), _ViewsOnly():  # type: ignore[no-untyped-call]
            written = revert_weight_conversion(model, {name: whole})
    except (RuntimeError, ValueError, TypeError) as error:
        raise GenerationError(f"vLLM cannot be given new values of {name}: {error}") from error
    if any(tensor.untyped_storage()._cdata != whole.untyped_storage()._cdata for tensor in written.values()):  # noqa: SLF001
        raise GenerationError(
            f"vLLM cannot be given new values of {name}: its checkpoint has other numbers, not the same in another order; "
            f"generate.engine.kind = 'transformers' can"
        )
    return tuple(
        Part(own, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())) for own, tensor in written.items()
    )


class _ViewsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies that only lay out anew (`contiguous`) are left out, so that a result still says where in the source it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        del types
        return args[0] if func is torch.ops.aten.clone.default else func(*args, **(kwargs or {}))
