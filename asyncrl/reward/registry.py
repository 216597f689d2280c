"""From the config's reward functions to callables, and their weighted sum.

A reward function takes one `RewardInput` and returns a number, or an awaitable of one. A new built-in is one module with a
`build_*` function and one row in `_BUILDERS`; a user's own is named by import path (`PythonReward`). Functions are built once per
scoring process (reward/child.py) and called one sample at a time; what they raise fails that sample only.

Invariants: names are unique within a run and the same in every process; the sum is finite or the sample is failed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable
from typing import NamedTuple, cast

from asyncrl.config.reward import (
    AnswerMatchReward,
    CodeExecReward,
    FormatCheckReward,
    OverlongPenalty,
    PreferenceReward,
    PythonReward,
    ReasoningGymReward,
    RewardConfig,
    RewardFunctionConfig,
)
from asyncrl.config.reward_names import reward_names
from asyncrl.config.user_code import REWARD_ARGUMENTS, load_function
from asyncrl.errors import ConfigError, RewardError
from asyncrl.reward.answer_match import build_answer_match
from asyncrl.reward.code_exec import build_code_exec
from asyncrl.reward.format_check import build_format_check
from asyncrl.reward.inputs import RewardFunction, RewardInput
from asyncrl.reward.overlong import build_overlong
from asyncrl.reward.preference import build_preference
from asyncrl.reward.reasoning_gym import build_reasoning_gym


class NamedReward(NamedTuple):
    """One configured reward, ready to be called."""

    name: str
    weight: float
    function: RewardFunction


def build_rewards(config: RewardConfig) -> tuple[NamedReward, ...]:
    """Build every configured reward function, in order.

    Raises:
        ConfigError: A name is taken twice, a pattern or path is wrong, or limits contradict each other.
        RewardError: A package or tool that a reward needs is not there; the message says what to install.
    """
    for function in config.functions:
        if isinstance(function, CodeExecReward) and function.wall_s >= config.timeout_s:
            raise ConfigError(
                f"reward.functions code_exec: wall_s ({function.wall_s:g}) must be under timeout_s ({config.timeout_s:g}): "
                f"a slow program would fail its sample instead of scoring 0"
            )
    return tuple(
        NamedReward(name, function.weight, build_reward(function))
        for name, function in zip(reward_names(config), config.functions, strict=True)
    )


def build_reward(config: RewardFunctionConfig) -> RewardFunction:
    """Build one reward function from its config struct. Raises as `build_rewards`."""
    builder = _BUILDERS.get(type(config))
    if builder is None:
        known = ", ".join(sorted(kind.__struct_config__.tag for kind in _BUILDERS))  # type: ignore[attr-defined]
        raise ConfigError(f"no reward of kind {type(config).__name__}; known: {known}")
    return builder(config)


def weighted_sum(rewards: tuple[NamedReward, ...], sample: RewardInput, resolve: Resolve) -> tuple[float, dict[str, float]]:
    """Call every reward on one sample.

    Args:
        rewards: As built by `build_rewards`.
        sample: The completion to judge.
        resolve: Waits for what an async reward returned.

    Returns:
        The sum of weight x value, and every value by name, unweighted.

    Raises:
        RewardError: A reward raised, or returned something that is not a finite number; the message begins with its name.
    """
    total, parts = 0.0, {}
    for name, weight, function in rewards:
        parts[name] = _call(name, function, sample, resolve)
        total += weight * parts[name]
    if not math.isfinite(total):
        raise RewardError(f"the weighted sum of {parts} is not finite")
    return total, parts


Resolve = Callable[[Awaitable[float]], float]
"""Runs an awaitable to its end in the scoring process's own event loop."""


def _call(name: str, function: RewardFunction, sample: RewardInput, resolve: Resolve) -> float:
    try:
        value = function(sample)
        if inspect.isawaitable(value):
            value = resolve(value)
    except MemoryError:
        raise
    except Exception as error:
        raise RewardError(f"{name}: {type(error).__name__}: {error}") from error
    return _checked(name, value)


def _checked(name: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: a tensor of several elements
        raise RewardError(f"{name}: returned {value!r}, which is not a number") from error
    if isinstance(value, str) or not math.isfinite(number):
        raise RewardError(f"{name}: returned {value!r}, which is not a finite number")
    return number


def _build_python(config: PythonReward) -> RewardFunction:
    user_function = load_function(config.path, "reward path", REWARD_ARGUMENTS)

    def score(sample: RewardInput) -> float | Awaitable[float]:
        return cast("float | Awaitable[float]", user_function(sample.prompt, sample.text))

    return score


_BUILDERS: dict[type, Callable[..., RewardFunction]] = {
    AnswerMatchReward: build_answer_match,
    FormatCheckReward: build_format_check,
    CodeExecReward: build_code_exec,
    ReasoningGymReward: build_reasoning_gym,
    OverlongPenalty: build_overlong,
    PreferenceReward: build_preference,
    PythonReward: _build_python,
}
