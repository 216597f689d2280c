"""AdamW with a schedule, clipping and loss scaling, over float32 master weights, with a state that is saved without pickle.

The moments may have 8 bits, by bitsandbytes; no other file imports it.

Invariants: the learning rate depends only on the step number, so there is no scheduler state to lose; the tensors that the
optimizer changes are at least float32 (optim/master_weights.py); saving and loading changes no bit; a loss scale is a power of 2,
so that scaling and unscaling cause no rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.utils import get_total_norm

from asyncrl.config.learner import LearnerConfig
from asyncrl.errors import ConfigError, LearnerError
from asyncrl.learner.optim.master_weights import HostGradients, Master, buckets_of
from asyncrl.learner.ranks.group import divided_like, part_here, whole

_MASTER, _SCALE = "master", "loss_scale"
_ADAMW_KINDS = {"step", "exp_avg", "exp_avg_sq"}
_LOWBIT_CLASSES = {"adamw_8bit": "AdamW8bit", "paged_adamw_8bit": "PagedAdamW8bit"}
_LOWBIT_CONSTANTS = ("qmap1", "qmap2")
"""Tables of the library that map 8 bits to numbers. They are not saved."""
FIRST_SCALE = 2.0**16
SMALLEST_SCALE = 1.0
GROWTH_INTERVAL = 2000
"""Number of successful updates in a row after which the scale doubles."""
SAMPLED = 1024
"""Approximate number of weights of each matrix by which an update is measured."""


class LossScale:
    """The factor of float16 losses before the backward pass: without it small gradients vanish; if too large, gradients overflow.

    Source: Micikevicius et al. 2018 (arXiv 1710.03740), section 3.2; constants of `torch.amp.GradScaler`.

    Example:
        >>> scale = LossScale()
        >>> scale.shrink(), scale.value
        (True, 32768.0)
    """

    def __init__(self) -> None:
        self.value = FIRST_SCALE
        self.good_updates = 0

    def note_update(self) -> None:
        """Count a successful update."""
        self.good_updates += 1
        if self.good_updates >= GROWTH_INTERVAL:
            self.value, self.good_updates = self.value * 2.0, 0

    def shrink(self) -> bool:
        """Halve the scale after an overflow; return False if the scale is minimal, so that it is not the cause."""
        self.good_updates = 0
        if self.value <= SMALLEST_SCALE:
            return False
        self.value /= 2.0
        return True


def learning_rate_at(step: int, config: LearnerConfig, num_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (0 is the first).

    Linear from learning_rate / warmup_steps up to `learning_rate`, then cosine down to `min_learning_rate_ratio` of it at the
    last step; constant if the ratio is 1.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    floor = config.min_learning_rate_ratio
    progress = min(1.0, (step - config.warmup_steps) / max(1, num_steps - 1 - config.warmup_steps))
    return config.learning_rate * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))


class PolicyOptimizer:
    """AdamW over a model's trainable parameters.

    Example:
        >>> optimizer = PolicyOptimizer(model.named_parameters(), LearnerConfig(), num_steps=100)
        >>> optimizer.backward(loss)
        >>> norm = optimizer.clip()
        >>> if math.isfinite(norm):
        ...     optimizer.step(0)
        ... elif not skip_update([(optimizer, norm)]):
        ...     raise LearnerError
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        config: LearnerConfig,
        num_steps: int,
        shares_scale_of: PolicyOptimizer | None = None,
    ) -> None:
        """Take over a model's parameters.

        Args:
            named_parameters: Parameters that need no gradient are not changed.
            config: Optimizer and dtype.
            num_steps: The step at which a cosine schedule ends.
            shares_scale_of: The optimizer that owns the loss scale, if its backward pass gives these parameters their gradients
                too (a value head beside its policy).
        """
        self._config, self._num_steps = config, num_steps
        on_host = config.offload_optimizer
        self._masters = {name: Master(name, p, on_host=on_host) for name, p in named_parameters if p.requires_grad}
        masters = list(self._masters.values())
        buckets = buckets_of(masters) if on_host else [masters]
        self._adamws: list[torch.optim.Optimizer] = []
        for bucket in buckets:
            trained = [master.trained for master in bucket]
            groups: list[dict[str, Any]] = [
                {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": config.weight_decay},
                {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
            ]
            settings: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "eps": config.epsilon}
            plain = config.optimizer == "adamw"
            self._adamws.append(torch.optim.AdamW(groups, fused=True, **settings) if plain else build_lowbit(groups, config))
        self._host = HostGradients(buckets) if on_host else None
        self._adamw_of = {id(m.trained): adamw for bucket, adamw in zip(buckets, self._adamws, strict=True) for m in bucket}
        self._own_scale = LossScale() if config.dtype == "float16" and shares_scale_of is None else None
        self.scale: LossScale | None = self._own_scale if shares_scale_of is None else shares_scale_of.scale
        """Shared by all optimizers whose gradients come from one backward pass; None except for float16."""
        self._norm = math.nan
        """Of the gradients at the newest `clip`."""
        self.relative_update = 0.0
        """Norm of the newest `step`'s change of the matrices' weights over their norm (of a sample on this rank), scaled to the
        schedule's highest rate. So the first step of a warm-up already shows the value at its end."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a loss."""
        (loss if self.scale is None else loss * self.scale.value).backward()  # type: ignore[no-untyped-call]

    def gradients(self) -> Iterator[torch.Tensor]:
        """Yield each parameter's gradient, in order, unclipped and without the loss scale (float64; zeros if it has none)."""
        scale = 1.0 if self.scale is None else self.scale.value
        for master in self._masters.values():
            gradient = torch.zeros_like(master.parameter) if master.gradient is None else master.gradient
            yield gradient.detach().double() / scale

    def clip(self) -> float:
        """Scale the gradients to at most `max_grad_norm`; return their norm before (not finite if a gradient was not)."""
        gradients = [gradient for master in self._masters.values() if (gradient := master.gradient) is not None]
        scale = 1.0 if self.scale is None else self.scale.value
        norm = whole(get_total_norm(gradients)) / scale
        factor = (self._config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0).item() / scale
        if gradients and factor != 1.0:
            torch._foreach_mul_([part_here(gradient) for gradient in gradients], factor)
        self._norm = norm.item()
        return self._norm

    def follow(self, config: LearnerConfig, num_steps: int) -> None:
        """Use this config from the next step on, except kind, dtype and offload; `num_steps`: the step at which a cosine ends."""
        self._config, self._num_steps = config, num_steps
        for adamw in self._adamws:
            for group in adamw.param_groups:
                group |= {"betas": config.betas, "eps": config.epsilon}
            adamw.param_groups[0]["weight_decay"] = config.weight_decay  # for matrices; other parameters have none

    def step(self, step: int, first_step: int = 0) -> float:
        """Apply and drop the clipped gradients with the learning rate of optimizer step `step`, and return that rate.

        The schedule begins at `first_step`, the first step that trains these parameters. If all gradients were 0 at `clip`,
        nothing changes and the rate is 0: the moments of earlier steps would move the weights.
        """
        if self._norm == 0.0:
            self.zero_grad()
            self.relative_update = 0.0
            return 0.0
        rate = learning_rate_at(step - first_step, self._config, self._num_steps - first_step)
        for adamw in self._adamws:
            for group in adamw.param_groups:
                group["lr"] = rate
        before = self._sampled()
        if self._host is None:
            for master in self._masters.values():
                master.trained.grad = master.gradient
            self._adamws[0].step()
        else:
            for index in self._host.arrivals():
                self._adamws[index].step()
        copied = [master for master in self._masters.values() if master.is_copy]
        if copied:  # all at once: one call per tensor would cost more than the copy
            with torch.no_grad():
                parameters, values = [part_here(one.parameter) for one in copied], [part_here(one.trained) for one in copied]
                torch._foreach_copy_(parameters, values, non_blocking=self._host is not None)
        moved = ((self._sampled() - before).norm() / before.norm().clamp(min=1e-30)).item()
        self.relative_update = moved * self._config.learning_rate / rate if rate > 0 else 0.0
        if self._own_scale is not None:
            self._own_scale.note_update()
        self.zero_grad()
        return rate

    @torch.no_grad()
    def _sampled(self) -> torch.Tensor:
        parts = [part_here(master.trained).flatten() for master in self._masters.values() if master.trained.ndim >= 2]
        taken = [part[:: max(1, part.numel() // SAMPLED)].float() for part in parts]
        return torch.cat(taken) if taken else torch.zeros(0)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for master in self._masters.values():
            master.drop_gradient()

    def named_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all tensors to save, each under its kind and its parameter's name, in the parameters' order."""
        for name, master in self._masters.items():
            if master.is_copy:
                yield f"{_MASTER}/{name}", master.trained.detach()
            for kind, value in plain_state(self._adamw_of[id(master.trained)].state.get(master.trained, {})).items():
                yield f"{kind}/{name}", value
        if (scale := self._own_scale) is not None:
            yield f"{_SCALE}/", torch.tensor([scale.value, scale.good_updates], dtype=torch.float64)

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that the optimizer keeps between steps, not copies; there are more after the first step.

        Tensors that an optimizer pages itself are left out, because their memory is not on a device.
        """
        for name, master in self._masters.items():
            if master.is_copy:
                yield f"{_MASTER}/{name}", master.trained
            for kind, value in self._adamw_of[id(master.trained)].state.get(master.trained, {}).items():
                if isinstance(value, torch.Tensor) and not getattr(value, "is_paged", False):
                    yield f"{kind}/{name}", value

    def load(self, path: Path) -> None:
        """Load a saved `named_state` of a model with the same parameters, optimizer and dtype.

        Raises:
            LearnerError: The file belongs to another model or another optimizer.
        """
        states: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in load_file(path).items():
            kind, _, name = key.partition("/")
            states.setdefault(name, {})[kind] = tensor
        scale = states.pop("", {})
        if self._own_scale is not None and _SCALE in scale:
            self._own_scale.value, self._own_scale.good_updates = float(scale[_SCALE][0]), int(scale[_SCALE][1])
        for name, state in states.items():
            try:
                self._load_one(self._masters[name], state)
            except (KeyError, ValueError, RuntimeError) as error:
                raise LearnerError(f"{path} is not the optimizer state of this model: {name} does not fit ({error})") from error

    def _load_one(self, master: Master, state: dict[str, torch.Tensor]) -> None:
        values = state.pop(_MASTER, None)
        if (values is not None) != master.is_copy:
            raise ValueError(f"it has {'a' if values is not None else 'no'} master weight, this run another dtype or offload")
        if values is not None:
            with torch.no_grad():
                master.trained.copy_(_fitting(values, master.trained))
        if not state:
            return
        adamw = self._adamw_of[id(master.trained)]
        if self._config.optimizer != "adamw":
            restore_state(adamw, master.trained, state)
            return
        if state.keys() != _ADAMW_KINDS:
            raise ValueError(f"it has {sorted(state)}, adamw has {sorted(_ADAMW_KINDS)}")
        for kind, value in state.items():
            adamw.state[master.trained][kind] = (
                value.to(master.trained.device) if kind == "step" else _fitting(value, master.trained)
            )


def skip_update(norms: Sequence[tuple[PolicyOptimizer, float]]) -> bool:
    """Drop the gradients of an update in which some are not finite; return whether the run may continue.

    It may if float16 overflowed because a loss scale is too large: each scale of an overflowed gradient is halved, once even if
    several optimizers share it, and other scales stay. With other dtypes, or a scale that is already minimal, it may not.

    Args:
        norms: The update's optimizers, each with the norm of its gradients.
    """
    for optimizer, _ in norms:
        optimizer.zero_grad()
    overflowed = [optimizer.scale for optimizer, norm in norms if not math.isfinite(norm)]
    answers = [scale is not None and scale.shrink() for scale in {id(scale): scale for scale in overflowed}.values()]
    return all(answers)


def _fitting(values: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the values on the parameter's device; raises ValueError if the shapes differ."""
    if values.shape != parameter.shape:
        raise ValueError(f"{tuple(values.shape)} instead of {tuple(parameter.shape)}")
    return divided_like(values, parameter)


def build_lowbit(groups: Sequence[dict[str, Any]], config: LearnerConfig) -> torch.optim.Optimizer:
    """Return the configured 8-bit optimizer, over groups that have their own weight decay.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    try:
        module = import_module("bitsandbytes.optim")
    except ImportError as error:
        raise ConfigError(
            f"learner.optimizer = {config.optimizer!r} needs bitsandbytes: pip install 'asyncrl[lowbit]' ({error})"
        ) from error
    build = getattr(module, _LOWBIT_CLASSES[config.optimizer])
    built: torch.optim.Optimizer = build(groups, lr=config.learning_rate, betas=config.betas, eps=config.epsilon)
    return built


def plain_state(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return one parameter's state as tensors to save; the number of updates becomes int64."""
    kept = {kind: value for kind, value in state.items() if kind not in _LOWBIT_CONSTANTS}
    return {kind: value if isinstance(value, torch.Tensor) else torch.tensor(value) for kind, value in kept.items()}


def restore_state(optimizer: Any, parameter: torch.nn.Parameter, saved: dict[str, torch.Tensor]) -> None:  # noqa: ANN401
    """Give a parameter the state that `plain_state` returned, in the optimizer's own memory (paged if it uses paging).

    Raises:
        ValueError: The state is of another kind or size.
    """
    optimizer.state.pop(parameter, None)
    for group_index, group in enumerate(optimizer.param_groups):
        for index, candidate in enumerate(group["params"]):
            if candidate is parameter:
                optimizer.init_state(group, parameter, group_index, index)
    state = optimizer.state[parameter]
    if saved.keys() != plain_state(state).keys():
        raise ValueError(f"it has {sorted(saved)}, an 8-bit optimizer has {sorted(plain_state(state))}")
    for kind, value in saved.items():
        if not isinstance(state[kind], torch.Tensor):
            state[kind] = int(value)
        elif state[kind].shape != value.shape or state[kind].dtype != value.dtype:
            raise ValueError(f"{kind} is {tuple(value.shape)} {value.dtype}, not {tuple(state[kind].shape)} {state[kind].dtype}")
        else:
            state[kind].copy_(value)
