"""AdamW with a schedule and clipping, float32 master weights under a bfloat16 model, and a state that is saved without pickle.

Invariants: the learning rate is a function of the step number alone, so there is no scheduler state to lose; parameters that
are not float32 have a float32 copy here which is what the optimizer changes (at RL learning rates a bfloat16 update rounds to
nothing) and in which the gradients of all micro-batches add up; saving and loading changes no bit. Called by learner/step.py
and learner/checkpoint.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from asyncrl.config.algorithm import LearnerConfig
from asyncrl.errors import LearnerError


def learning_rate_at(step: int, config: LearnerConfig, num_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (0 is the first).

    Linear from learning_rate / warmup_steps up to `learning_rate`, then cosine down to `min_learning_rate_ratio` of it at the
    last step; constant where the ratio is 1.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    floor = config.min_learning_rate_ratio
    progress = min(1.0, (step - config.warmup_steps) / max(1, num_steps - 1 - config.warmup_steps))
    return config.learning_rate * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))


def build_optimizer(model: torch.nn.Module, config: LearnerConfig, num_steps: int) -> PolicyOptimizer:
    """Return the optimizer of a model's trainable parameters; `num_steps` is where a cosine schedule ends."""
    return PolicyOptimizer(model.named_parameters(), config, num_steps)


class PolicyOptimizer:
    """AdamW over a model's trainable parameters.

    Example:
        >>> optimizer = PolicyOptimizer(model.named_parameters(), LearnerConfig(), num_steps=100)
        >>> loss.backward()
        >>> norm = optimizer.clip()
        >>> optimizer.step(0)
    """

    def __init__(self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]], config: LearnerConfig, num_steps: int) -> None:
        self._config = config
        self._num_steps = num_steps
        self._model = {name: parameter for name, parameter in named_parameters if parameter.requires_grad}
        self._trained = {name: _master_of(parameter) for name, parameter in self._model.items()}
        matrices = [parameter for parameter in self._trained.values() if parameter.ndim >= 2]
        vectors = [parameter for parameter in self._trained.values() if parameter.ndim < 2]
        self._adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.epsilon,
            fused=True,
        )

    def clip(self) -> float:
        """Scale the gradients to at most `max_grad_norm`; return the norm they had (not finite where a gradient was not)."""
        return torch.nn.utils.clip_grad_norm_(self._trained.values(), self._config.max_grad_norm).item()

    def step(self, step: int) -> float:
        """Apply and drop the gradients at the learning rate of optimizer step `step`, and return that rate."""
        rate = learning_rate_at(step, self._config, self._num_steps)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.zero_grad()
        with torch.no_grad():
            for name, parameter in self._model.items():
                if self._trained[name] is not parameter:
                    parameter.copy_(self._trained[name])
        return rate

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def save(self, path: Path) -> None:
        """Write moments, update counts and master weights to a safetensors file."""
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self._trained.items():
            if parameter is not self._model[name]:
                tensors[f"master/{name}"] = parameter.detach()
            for key, value in self._adamw.state.get(parameter, {}).items():
                tensors[f"{key}/{name}"] = value
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path)

    def load(self, path: Path) -> None:
        """Take over what `save` wrote for a model of the same parameters.

        Raises:
            LearnerError: The file belongs to another model.
        """
        tensors = load_file(path)
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            parameter = self._trained.get(name)
            if parameter is None or tensor.numel() not in {1, parameter.numel()}:
                raise LearnerError(f"{path} is not the optimizer state of this model: {key} {tuple(tensor.shape)} does not fit")
            if kind == "master":
                with torch.no_grad():
                    parameter.copy_(tensor)
            else:
                self._adamw.state[parameter][kind] = tensor.to(parameter.device)


def _master_of(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return the parameter itself, or a float32 copy that takes over its gradients as they come."""
    if parameter.dtype in {torch.float32, torch.float64}:
        return parameter
    master = torch.nn.Parameter(parameter.detach().float())

    def take_over(source: torch.Tensor) -> None:
        assert source.grad is not None
        gradient = source.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        source.grad = None

    parameter.register_post_accumulate_grad_hook(take_over)  # type: ignore[no-untyped-call]
    return master
