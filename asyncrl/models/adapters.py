"""Low-rank adapters (LoRA) in a causal model, by peft: added in learner and engine, switched off for the reference.

Invariants: the model keeps its class; its own parameters are frozen and never change, so they need not be sent or saved again;
two processes that add adapters with the same config and seed have the same adapters, on any device.
The only file that imports peft.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from asyncrl.config.learner import LoRAConfig
from asyncrl.errors import ConfigError

ADAPTER = "default"
"""peft's name of the only adapter; parameters are called `...lora_A.default.weight`."""


def add_adapters(model: PreTrainedModel, config: LoRAConfig, seed: int) -> None:
    """Freeze the model and add trainable adapters in place; at first they do not change its results.

    Args:
        model: Without adapters.
        config: Rank, alpha and layers.
        seed: Seed of the initial values.

    Raises:
        ConfigError: The model has no linear layer of a name in `target_modules`.

    Source: Hu et al. 2021 (arXiv 2106.09685), section 4.1: B starts at 0, A random (peft's Kaiming uniform).
    """
    model.requires_grad_(False)
    peft_config = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,
        target_modules=list(config.target_modules) or "all-linear",
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type="CAUSAL_LM",
    )
    try:
        inject_adapter_in_model(peft_config, model, ADAPTER)
    except ValueError as error:
        raise ConfigError(f"learner.lora.target_modules {list(config.target_modules)}: {error}") from error
    adapted = [f".{name}" for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    if unknown := [name for name in config.target_modules if not any(path.endswith(f".{name}") for path in adapted)]:
        known = sorted({path.rpartition(".")[2] for path in adapted})
        raise ConfigError(
            f"learner.lora.target_modules {unknown}: no linear layer of this model has that name; {known} were found"
        )
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        is_adapter = f".{ADAPTER}." in name
        parameter.requires_grad_(is_adapter)
        if is_adapter:
            with torch.no_grad():
                parameter.zero_()
                if "lora_A" in name:
                    values = torch.empty(parameter.shape, dtype=torch.float32)
                    torch.nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
                    parameter.copy_(values)


@contextlib.contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """Switch the adapters off within the context; the model is then the reference, without a second copy."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
