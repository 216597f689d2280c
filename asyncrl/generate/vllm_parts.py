"""A model's tensors as checkpoints have them, which is how vLLM takes them.

transformers holds some models otherwise than their checkpoints do (all experts of a layer in one tensor, a head by another name),
converting as it loads and saves; and the learner sends what transformers holds. What it would write of each tensor is found once,
without any data, as names and places inside that tensor. Workers then cut the tensor up without copying.

Called by generate/vllm_folder.py. Imports no vllm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.errors import GenerationError
from asyncrl.generate.vllm_orders import Part

Shapes = dict[str, tuple[int, ...]]


def find_parts(
    path: Path,
    config: Any,  # noqa: ANN401 - transformers is untyped
    shapes: Shapes,
    *,
    trust_remote_code: bool = False,
) -> tuple[Shapes, dict[str, tuple[Part, ...]]]:
    """Find what of a checkpoint each of the model's tensors is.

    Args:
        path: Of the model folder, for the message.
        config: Of the model.
        shapes: Of every tensor in the checkpoint, by its name there.
        trust_remote_code: Whether code in the folder may run.

    Returns:
        The shapes by the names that transformers has for them, and the parts of those tensors that a checkpoint has otherwise.

    Raises:
        GenerationError: A tensor of this model is no rearrangement of tensors in this checkpoint.
    """
    kinds = {config.model_type, config.get_text_config().model_type, *(config.architectures or ())}
    if not any(get_checkpoint_conversion_mapping(kind) for kind in kinds):
        return shapes, {}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    held, parts = dict(shapes), {}
    for name, parameter in model.named_parameters():
        if name in shapes:
            continue
        parts[name] = _parts_of(model, name, parameter)
        if not all(shapes.get(part.name) == part.shape for part in parts[name]):
            missing = ", ".join(f"{part.name} {part.shape}" for part in parts[name][:3])
            raise GenerationError(
                f"the checkpoint in {path} does not have {name} as transformers would write it ({missing}): load the model with "
                "transformers and save it anew"
            )
        held[name] = tuple(parameter.shape)
        for part in parts[name]:
            held.pop(part.name, None)
    return held, parts


def _parts_of(model: torch.nn.Module, name: str, parameter: torch.Tensor) -> tuple[Part, ...]:
    """Return where each tensor that transformers would write lies inside this one."""
    whole = torch.empty(parameter.shape, device="meta")
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
