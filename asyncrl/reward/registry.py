"""From the config's reward functions to callables, and their weighted sum.

A reward function takes one `RewardInput` and returns a number, or an awaitable of one. A new built-in is one `build_*` function
and one row in `_BUILDERS`; a user's own is named by import path (`PythonReward`) and may take several samples at once. Functions
are built once per scoring process (worker_process.py); what they raise fails that sample only.

Invariants: names are unique within a run and the same in every process; the sum is finite or the sample is failed.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple, cast

from asyncrl.algorithms.returns import overlong_penalty
from asyncrl.config import reward as kinds
from asyncrl.errors import ConfigError, RewardError
from asyncrl.reward.answer_match import build_answer_match
from asyncrl.reward.inputs import RewardFunction, RewardInput, compile_pattern, matches_whole, shown
from asyncrl.reward.reasoning_gym import build_reasoning_gym
from asyncrl.reward.sandbox.code_exec import build_code_exec
from asyncrl.user_code import REWARD_ARGUMENTS, load_function, takes_batches

BatchFunction = Callable[[Sequence[RewardInput]], "Sequence[float] | Awaitable[Sequence[float | RewardError]]"]
BATCH_SIZE = 32
"""Samples that a function for several is called with, at most."""
MOST_AWAITED = 128
"""Samples that an async function is awaited for at the same time, at most."""
Resolve = Callable[[Awaitable[object]], object]
"""Runs an awaitable to its end in the scoring process's own event loop."""
Outcome = tuple[float, dict[str, float]] | RewardError
"""The weighted sum and every value by name, unweighted; or why there is none."""


class NamedReward(NamedTuple):
    """One configured reward, ready to be called."""

    name: str
    weight: float
    function: RewardFunction
    batch: BatchFunction | None = None
    """Judges several samples at once; where it is given, `function` does the same for one."""
    most_together: int = 1
    """Samples that `batch` is worth calling with."""


def build_rewards(config: kinds.RewardConfig) -> tuple[NamedReward, ...]:
    """Build every configured reward function, in order.

    Raises:
        ConfigError: A pattern or path is wrong, or limits contradict each other.
        RewardError: A package or tool that a reward needs is not there; the message says what to install.
    """
    for function in config.functions:
        if isinstance(function, kinds.CodeExecReward) and function.wall_s >= config.timeout_s:
            raise ConfigError(
                f"reward.functions code_exec: wall_s ({function.wall_s:g}) must be under timeout_s ({config.timeout_s:g}): "
                f"else the time limit of a sample ends a slow program's process before its own does"
            )
    named = zip(kinds.reward_names(config), config.functions, strict=True)
    return tuple(
        _python_reward(name, each) if isinstance(each, kinds.PythonReward) else NamedReward(name, each.weight, build_reward(each))
        for name, each in named
    )


def build_reward(config: kinds.RewardFunctionConfig) -> RewardFunction:
    """Build one built-in reward function from its config struct. Raises as `build_rewards`."""
    return _BUILDERS[type(config)](config)


def score_together(
    rewards: Sequence[NamedReward],
    items: Sequence[tuple[RewardInput, Sequence[int]]],
    resolve: Resolve,
    at: Callable[[int, int, bool], None] = lambda *_: None,
) -> Iterator[Outcome]:
    """Score samples that came together: functions that take several first, then one sample after the other.

    Args:
        rewards: As built by `build_rewards`.
        items: The samples, each with the functions that score 0 for it without being called.
        resolve: Waits for what an async reward returned.
        at: Called before each function with the sample's index, the function's, and whether it has several samples.

    Yields:
        For each sample its sum and parts, or an error that begins with the name of the function that failed.
    """
    values: dict[tuple[int, int], float | RewardError] = {}
    for number, reward in enumerate(rewards):
        wanted = [index for index, (_, skipped) in enumerate(items) if number not in skipped]
        if reward.batch is not None and len(wanted) > 1:
            at(wanted[0], number, True)
            try:
                told = _call(reward.name, lambda: reward.batch([items[index][0] for index in wanted]), resolve)  # type: ignore[misc] # noqa: B023
                numbers = _checked_batch(reward.name, told, len(wanted))
            except RewardError:
                continue  # One of them is at fault, and fails alone below.
            values.update(((index, number), value) for index, value in zip(wanted, numbers, strict=True))
    for index, (sample, skipped) in enumerate(items):
        total, parts = 0.0, {}
        try:
            for number, (name, weight, function, *_) in enumerate(rewards):
                value = 0.0 if number in skipped else values.get((index, number))
                if value is None:
                    at(index, number, False)
                    value = _checked(name, _call(name, lambda: function(sample), resolve))  # noqa: B023
                if isinstance(value, RewardError):
                    raise value
                parts[name] = value
                total += weight * value
        except RewardError as error:
            yield error
            continue
        yield (total, parts) if math.isfinite(total) else RewardError(f"the weighted sum of {parts} is not finite")


def _call(name: str, function: Callable[[], object], resolve: Resolve) -> object:
    try:
        value = function()
        return resolve(value) if inspect.isawaitable(value) else value
    except MemoryError:
        raise
    except BaseException as error:  # SystemExit and a CancelledError that nobody asked for are the function's own too
        raise RewardError(f"{name}: {type(error).__name__}: {shown(error)}") from error


def _checked(name: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except MemoryError:
        raise
    except Exception as error:
        raise RewardError(f"{name}: returned {shown(value)}, which is not a number") from error
    if isinstance(value, str) or not math.isfinite(number):
        raise RewardError(f"{name}: returned {shown(value)}, which is not a finite number")
    return number


def _checked_batch(name: str, values: object, num_wanted: int) -> list[float | RewardError]:
    try:
        numbers = [value if isinstance(value, RewardError) else _checked(name, value) for value in values]  # type: ignore[attr-defined]
    except (MemoryError, RewardError):
        raise
    except Exception as error:
        said = f"{name}: returned {shown(values)} for {num_wanted} samples, which is not a list of numbers"
        raise RewardError(said) from error
    if len(numbers) != num_wanted:
        raise RewardError(f"{name}: returned {len(numbers)} numbers for {num_wanted} samples")
    return numbers


def _python_reward(name: str, config: kinds.PythonReward) -> NamedReward:
    """Load a user's function. One that takes several samples is called with several; an async one is awaited for many at once."""
    user_function = load_function(config.path, "reward path", REWARD_ARGUMENTS)
    if takes_batches(user_function):

        async def one_of_several(sample: RewardInput) -> float:
            values = user_function([sample.prompt], [sample.text])
            values = await values if inspect.isawaitable(values) else values
            return cast("float", _checked_batch("it", values, 1)[0])

        def several(samples: Sequence[RewardInput]) -> Sequence[float]:
            return cast("Sequence[float]", user_function([each.prompt for each in samples], [each.text for each in samples]))

        return NamedReward(name, config.weight, one_of_several, several, BATCH_SIZE)

    def alone(sample: RewardInput) -> float | Awaitable[float]:
        return cast("float | Awaitable[float]", user_function(sample.prompt, sample.text))

    if not inspect.iscoroutinefunction(user_function):
        return NamedReward(name, config.weight, alone)

    async def one(sample: RewardInput) -> float | RewardError:
        try:
            return _checked(name, await user_function(sample.prompt, sample.text))
        except MemoryError:
            raise
        except RewardError as said:
            return said
        except BaseException as error:  # noqa: BLE001 - the boundary: what a user's function raises fails its sample
            failure = RewardError(f"{name}: {type(error).__name__}: {shown(error)}")
            failure.__cause__ = error
            return failure

    async def all_at_once(samples: Sequence[RewardInput]) -> list[float | RewardError]:
        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(one(sample)) for sample in samples]
        except* MemoryError as group_error:
            raise MemoryError from group_error
        return [task.result() for task in asked]

    return NamedReward(name, config.weight, alone, all_at_once, MOST_AWAITED)


def _build_format_check(config: kinds.FormatCheckReward) -> RewardFunction:
    """1 where the whole completion matches the pattern, `.` matching newlines."""
    pattern = compile_pattern(config.pattern, "reward.functions format_check pattern")
    return lambda sample: float(matches_whole(sample.text, pattern))


def _build_overlong(config: kinds.OverlongPenalty) -> RewardFunction:
    """DAPO's soft punishment of long answers; its weight is the configured one, so a positive weight punishes."""
    return lambda sample: overlong_penalty(sample.num_tokens, config.max_tokens, config.buffer_tokens)


def _build_preference(_: kinds.PreferenceReward) -> RewardFunction:
    """1 for the chosen answer, 0 for the rejected one: the replay engine gives them back as members 0 and 1."""

    def score(sample: RewardInput) -> float:
        if sample.index > 1:
            raise RewardError(f"member {sample.index} of a group is neither the chosen answer (0) nor the rejected one (1)")
        return 1.0 - sample.index

    return score


_BUILDERS: dict[type, Callable[..., RewardFunction]] = {
    kinds.AnswerMatchReward: build_answer_match,
    kinds.FormatCheckReward: _build_format_check,
    kinds.CodeExecReward: build_code_exec,
    kinds.ReasoningGymReward: build_reasoning_gym,
    kinds.OverlongPenalty: _build_overlong,
    kinds.PreferenceReward: _build_preference,
}
