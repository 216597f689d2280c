"""LoRA adapters at the learner: added, sent, saved and read back, without the base.

A checkpoint under LoRA is a Hugging Face folder whose weights are links to the run's model, with the adapters beside them in
peft's format (adapter_config.json, adapter_model.safetensors). `AutoModelForCausalLM.from_pretrained` opens it with the adapters
in force; `peft.PeftModel.from_pretrained` opens it over the base.

Invariants: what engines and checkpoints get is exactly what is trained; saving and loading changes no bit. peft is
imported only where there are adapters.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from asyncrl.config.run import RunConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.model.policy import link_folder, open_model
from asyncrl.learner.ranks.fsdp import whole_tensors

ADAPTER_FILE = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."


def open_policy(config: RunConfig, model_folder: Path, checkpoint: Path | None = None) -> PreTrainedModel:
    """Open the policy with what is trained of it, ready to train.

    Args:
        config: `model`, `learner` and `seed` are read.
        model_folder: `RUN/model`, the policy at version 0.
        checkpoint: Whose weights, or adapters, it has; None: those of version 0.

    Raises:
        ConfigError: A folder cannot be opened, or there is no layer that the adapters name.
        LearnerError: The checkpoint has no adapters, or they are not of this model and this `learner.lora`.
    """
    weights = checkpoint if checkpoint is not None and config.learner.lora is None else model_folder
    model = open_model(weights, config.learner, trust_remote_code=config.trusts_code, fp32_head=config.model.fp32_head)
    if config.learner.lora is not None:
        import_module("asyncrl.models.adapters").add_adapters(model, config.learner.lora, config.seed)
        if checkpoint is not None:
            path = checkpoint / ADAPTER_FILE
            if not path.is_file():
                raise LearnerError(
                    f"{checkpoint} has no {ADAPTER_FILE}: it was written without learner.lora; go on without, or start anew"
                )
            saved = load_file(path)
            wanted = {_peft_name(name): parameter for name, parameter in publishable_tensors(model).items()}
            if {name: one.shape for name, one in saved.items()} != {name: one.shape for name, one in wanted.items()}:
                raise LearnerError(
                    f"the adapters in {path} are not those of this model under this learner.lora: take the run's own config"
                )
            with torch.no_grad():
                for name, parameter in wanted.items():
                    parameter.copy_(saved[name])
    return model


def has_adapters(model: PreTrainedModel) -> bool:
    """Return whether `add_adapters` was called on a model."""
    return bool(getattr(model, "peft_config", None))


def publishable_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return what engines must load to hold this version: the trained adapters where there are any, else every parameter."""
    parameters = model.named_parameters()
    if not has_adapters(model):
        return dict(parameters)
    return {name: parameter for name, parameter in parameters if parameter.requires_grad}


def save_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Fill an empty folder that `AutoModelForCausalLM.from_pretrained` opens as this policy: adapters, and links to the base."""
    base = Path(model.name_or_path).resolve()
    link_folder(base, folder, relative=True)
    adapters = {_peft_name(name): tensor.contiguous() for name, tensor in whole_tensors(publishable_tensors(model).items())}
    save_file(adapters, folder / ADAPTER_FILE)
    config = next(iter(model.peft_config.values()))
    config.base_model_name_or_path = str(base)
    config.save_pretrained(folder)


def _peft_name(name: str) -> str:
    """Return what peft calls a parameter in its files: without the adapter's name."""
    return _PEFT_PREFIX + name.replace(".default.", ".")
