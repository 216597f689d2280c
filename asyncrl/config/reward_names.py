"""What each reward function's part is called, and which of them say right or wrong.

Called by reward/registry.py, config/inference_rules.py and control/evaluation.py.
"""

from __future__ import annotations

from collections import Counter

from asyncrl.config.reward import OverlongPenalty, RewardConfig
from asyncrl.errors import ConfigError


def reward_names(config: RewardConfig) -> tuple[str, ...]:
    """Return each function's name: as configured, else its kind, with `_2`, `_3`, ... where the kind repeats.

    Raises:
        ConfigError: Two functions are given the same name.
    """
    given = Counter(function.name for function in config.functions if function.name)
    repeated = sorted(name for name, count in given.items() if count > 1)
    if repeated:
        raise ConfigError(f"reward.functions: the name {repeated[0]!r} is given {given[repeated[0]]} times; names must be unique")
    taken, names = set(given), []
    for function in config.functions:
        name = function.name or _free_name(str(function.__struct_config__.tag), taken)
        taken.add(name)
        names.append(name)
    return tuple(names)


def verdict_weights(config: RewardConfig) -> dict[str, float]:
    """Return the weights, by name, of the functions that judge an answer: all but penalties (`overlong`, a weight under 0)."""
    named = zip(reward_names(config), config.functions, strict=True)
    return {name: each.weight for name, each in named if each.weight > 0 and not isinstance(each, OverlongPenalty)}


def _free_name(kind: str, taken: set[str]) -> str:
    if kind not in taken:
        return kind
    suffix = 2
    while f"{kind}_{suffix}" in taken:
        suffix += 1
    return f"{kind}_{suffix}"
