"""Adapters (LoRA) for vLLM: checked in the generator, merged into the base inside vLLM's workers, as they load.

A version's adapters travel alone; each worker reads the base from the run's model folder, adds scale B A to the layers that have
adapters, and loads the result as it loads whole weights. So requests in flight, versions, fused layers and tensor parallelism are
the same with adapters as without, whatever vLLM's version; the base is held once, in the page cache; what is sampled from is one
plain model. (vLLM's own LoRA would keep base and adapters apart, binds a request to an adapter's id, and has kernels of its own.)

Invariants: the base in the folder is never written; sums are taken in float32 and rounded once, to the engine's dtype.
Called by generate/vllm_weights.py (checks) and generate/vllm_worker.py (merges). Imports no vllm and no peft.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from asyncrl.config.learner import LoRAConfig
from asyncrl.errors import GenerationError
from asyncrl.generate.vllm_folder import ModelFolder, weight_files
from asyncrl.generate.vllm_orders import Base

_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"
_INPUT_FIRST = frozenset({"gpt2", "openai-gpt"})
"""Model types whose linear layers are stored as [in, out] (transformers' Conv1D)."""


def base_of(folder: ModelFolder, lora: LoRAConfig) -> Base:
    """Return what the learner's adapters are of."""
    return Base(str(folder.path.resolve()), lora.alpha / lora.rank, folder.model_type in _INPUT_FIRST)


def check_adapters(shapes: Mapping[str, tuple[int, ...]], folder: ModelFolder, lora: LoRAConfig) -> None:
    """Refuse what is not the whole of the adapters.

    Args:
        shapes: Of the new tensors, by name.
        folder: The base's.
        lora: The learner's.

    Raises:
        GenerationError: A tensor belongs to no layer of the base, or to one that its checkpoint has under another name; lacks its
            partner, or has another shape; or a layer that `target_modules` names has no adapters.
    """
    expected: dict[str, tuple[int, ...]] = {}
    layers = {name.removesuffix(_A).removesuffix(_B) for name in shapes}
    if elsewhere := sorted(layer for layer in layers if f"{layer}.weight" in folder.parts):
        raise GenerationError(
            f"the checkpoint has {elsewhere[0]} under another name, where adapters are not merged: leave it out of "
            "learner.lora.target_modules"
        )
    for layer in layers:
        shape = folder.shapes.get(f"{layer}.weight", ())
        if len(shape) == 2:
            outputs, inputs = reversed(shape) if folder.model_type in _INPUT_FIRST else shape
            expected |= {layer + _A: (lora.rank, inputs), layer + _B: (outputs, lora.rank)}
    unknown = sorted(shapes.keys() - expected.keys())
    if unknown:
        raise GenerationError(
            f"new adapters have {len(unknown)} tensors this model does not have: {', '.join(unknown[:5])}; "
            f"with learner.lora only adapters are taken, called LAYER{_A} and LAYER{_B}"
        )
    missing = sorted((expected.keys() | _targeted(folder, lora)) - shapes.keys())
    if missing or not shapes:
        raise GenerationError(f"new adapters lack {len(missing)} tensors: {', '.join(missing[:5])}; send all of them")
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise GenerationError(f"new adapters: {name} has shape {shape}, the model's is {expected[name]}")


def merged(adapters: Iterable[tuple[str, torch.Tensor]], base: Base, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the whole model: the base's tensors, those with adapters with them added.

    Args:
        adapters: All of a version's, [rank, in] and [out, rank].
        base: Where the rest is.
        device: Where sums are taken.

    Source: Hu et al. 2021 (arXiv 2106.09685), equation 3: W + alpha / r B A.
    """
    by_name = {name: tensor.to(device, torch.float32, copy=True) for name, tensor in adapters}
    for name, weight in _tensors_of(base):
        layer = name.removesuffix(".weight")
        if layer + _A not in by_name:
            yield name, weight
            continue
        product = by_name[layer + _B] @ by_name[layer + _A]
        yield name, weight.to(device, torch.float32) + base.scale * (product.T if base.is_input_first else product)


def _tensors_of(base: Base) -> Iterator[tuple[str, torch.Tensor]]:
    for file in weight_files(Path(base.folder)):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                yield name, tensors.get_tensor(name)


def _targeted(folder: ModelFolder, lora: LoRAConfig) -> set[str]:
    """Return the tensors that must be there by name; none where the config says `all linear layers`."""
    layers = {name.removesuffix(".weight") for name, shape in folder.shapes.items() if len(shape) == 2}
    hit = {layer for layer in layers if any(layer == end or layer.endswith(f".{end}") for end in lora.target_modules)}
    return {layer + part for layer in hit for part in (_A, _B)}
