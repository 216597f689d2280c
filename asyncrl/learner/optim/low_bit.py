"""AdamW with its moments in 8 bits, by bitsandbytes, and its state as plain tensors.

The tables that turn 8 bits into numbers are constants of the library and not saved. The only file that imports bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from asyncrl.config.learner import LearnerConfig
from asyncrl.errors import ConfigError

_CLASSES = {"adamw_8bit": "AdamW8bit", "paged_adamw_8bit": "PagedAdamW8bit"}
_CONSTANTS = ("qmap1", "qmap2")


def build_lowbit(groups: Sequence[dict[str, Any]], config: LearnerConfig) -> torch.optim.Optimizer:
    """Return the 8-bit optimizer the config names, over groups that carry their weight decay.

    Raises:
        ConfigError: The library is missing.
    """
    try:
        module = import_module("bitsandbytes.optim")
    except ImportError as error:
        raise ConfigError(
            f"learner.optimizer = {config.optimizer!r} needs bitsandbytes: pip install 'asyncrl[lowbit]' ({error})"
        ) from error
    build = getattr(module, _CLASSES[config.optimizer])
    built: torch.optim.Optimizer = build(groups, lr=config.learning_rate, betas=config.betas, eps=config.epsilon)
    return built


def plain_state(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return one parameter's state as tensors to save; the number of updates becomes int64."""
    kept = {kind: value for kind, value in state.items() if kind not in _CONSTANTS}
    return {kind: value if isinstance(value, torch.Tensor) else torch.tensor(value) for kind, value in kept.items()}


def restore_state(optimizer: Any, parameter: torch.nn.Parameter, saved: dict[str, torch.Tensor]) -> None:  # noqa: ANN401
    """Give a parameter the state that `plain_state` returned, in memory of the optimizer's own (paged where it pages).

    Raises:
        ValueError: The state is of another kind or size.
    """
    (place,) = [
        (group, group_index, index)
        for group_index, group in enumerate(optimizer.param_groups)
        for index, candidate in enumerate(group["params"])
        if candidate is parameter
    ]
    group, group_index, index = place
    optimizer.state.pop(parameter, None)
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
