"""Builds the config's reward functions, computes their weighted sum, and serves rewards of a connected program (`judge_for`).

A reward function takes one `RewardInput` and returns a number, or an awaitable of one. A new built-in is one `build_*` function
and one case in `build_reward`; a user's own function is given by import path (`PythonReward`) and may take several samples at
once. Functions are built once per scoring process (worker_process.py); an exception makes only that sample fail.

The answer of `answer_match` is the first group of the last match of `extract`, or the whole completion. A text with several
candidates is not an answer: `numeric` needs exactly one number (numbers.py), and `math` exactly one expression (math_match.py).

A program that is connected to the run may judge instead of reward workers (`kind = "caller"`). In a loop, it asks the run for
requests and returns the scores. The run keeps each request until its scores arrive, and gives an unanswered request to the next
program that asks. So if a program is lost, no sample is lost, and another program may continue.

Invariants: names are unique within a run and the same in every process; the sum is finite or the sample is failed.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
import uuid
from asyncio.events import _set_running_loop
from asyncio.tasks import _enter_task, _leave_task
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeVar, cast

from asyncrl.algorithms.advantages import overlong_penalty
from asyncrl.config import reward as kinds
from asyncrl.errors import ConfigError, RewardError, kind_of, leaves, trace_of
from asyncrl.reward.expressions import Equal, within_budget
from asyncrl.reward.inputs import (
    Judgement,
    RewardFunction,
    RewardInput,
    as_number,
    compile_extract,
    compile_pattern,
    extract_answer,
    matches_whole,
    shown,
)
from asyncrl.reward.math_match import same_mathematics
from asyncrl.reward.numbers import parse_quantity, same_quantity
from asyncrl.reward.reasoning_gym import build_reasoning_gym
from asyncrl.reward.sandbox.code_exec import build_code_exec, check_tests
from asyncrl.schema.samples import Member, Prompt, Score, ScoreRequest, Scores
from asyncrl.schema.status import Judged
from asyncrl.user_code import REWARD_ARGUMENTS, load_function, takes_batches

BatchFunction = Callable[[Sequence[RewardInput]], "Sequence[float] | Awaitable[Sequence[float]]"]
Inputs = TypeVar("Inputs")
At = Callable[[int, int, bool], None]
"""Called before each function with the index of the sample, the index of the function, and whether it has several samples."""


MOST_REFERENCES, MOST_COMPUTED = 20_000, 1_000
"""Maximum numbers of prompts whose references are checked at the start: of a list, and of a sequence computed on access."""


class NamedReward(NamedTuple):
    """One configured reward, ready to be called."""

    name: str
    weight: float
    function: RewardFunction
    batch: BatchFunction | None = None
    """Judges several samples at once; if given, `function` does the same for one sample."""
    is_async: bool = False
    """It is async: many samples are scored at the same time."""


class TimeLimit:
    """The time limit for all functions of one sample, for samples that are scored at the same time in one event loop.

    A plain (not async) function blocks all samples. Its time counts only for its own sample.
    """

    def __init__(self, limit_s: float) -> None:
        """Set the limit of each sample."""
        self.limit_s = limit_s
        self.plain_s = 0.0
        """Seconds that plain functions took, for all samples."""

    def now(self) -> float:
        """Return the time of a clock that stops while a plain function runs."""
        return time.monotonic() - self.plain_s

    def call(self, function: Callable[[Inputs], object], inputs: Inputs) -> object:
        """Call a function that may be plain."""
        begun_s = time.monotonic()
        try:
            return function(inputs)
        finally:
            self.plain_s += time.monotonic() - begun_s


def build_rewards(config: kinds.RewardConfig) -> tuple[NamedReward, ...]:
    """Build every configured reward function, in order.

    Raises:
        ConfigError: A pattern or path is wrong, or limits contradict each other.
        RewardError: A package or tool that a reward needs is missing; the message says what to install.
    """
    for function in config.functions:
        if isinstance(function, kinds.CodeExecReward) and function.wall_s >= config.timeout_s:
            raise ConfigError(
                f"reward.functions code_exec: wall_s ({function.wall_s:g}) must be under timeout_s ({config.timeout_s:g}): "
                f"otherwise the sample's time limit ends a slow program's process before wall_s does; lower wall_s"
            )
    return tuple(
        _python_reward(name, each) if isinstance(each, kinds.PythonReward) else NamedReward(name, each.weight, build_reward(each))
        for name, each in zip(kinds.reward_names(config), config.functions, strict=True)
    )


def build_reward(config: kinds.RewardFunctionConfig) -> RewardFunction:
    """Build one built-in reward function from its config struct. Raises as `build_rewards`."""
    match config:
        case kinds.AnswerMatchReward():
            return _build_answer_match(config)
        case kinds.FormatCheckReward():
            pattern = compile_pattern(config.pattern, "reward.functions format_check pattern")
            return lambda sample: float(matches_whole(sample.text, pattern))
        case kinds.CodeExecReward():
            return build_code_exec(config)
        case kinds.ReasoningGymReward():
            return build_reasoning_gym(config)
        case kinds.OverlongPenalty():  # a positive weight is a penalty
            return lambda sample: overlong_penalty(sample.num_tokens, config.max_tokens, config.buffer_tokens)
        case kinds.PreferenceReward():
            return _preference
    raise AssertionError(f"{type(config).__name__} is not built in")


async def batch_values(
    rewards: Sequence[NamedReward], items: Sequence[tuple[RewardInput, Sequence[int]]], at: At, limit: TimeLimit
) -> dict[int, dict[int, float]]:
    """Judge samples that arrived together with the functions that take several samples.

    Args:
        rewards: As built by `build_rewards`.
        items: The samples, each with the functions that score 0 for it without being called.
        at: See `At`.
        limit: The time limit of samples that are scored meanwhile; it does not apply to these functions.

    Returns:
        Values by sample, then by function. A failed function has no values: the samples are then judged one by one.
    """
    values: dict[int, dict[int, float]] = defaultdict(dict)
    for number, reward in enumerate(rewards):
        wanted = [index for index, (_, skipped) in enumerate(items) if number not in skipped]
        if reward.batch is not None and len(wanted) > 1:
            at(wanted[0], number, True)
            try:
                told = limit.call(reward.batch, [items[index][0] for index in wanted])
                if inspect.isawaitable(told):
                    told, _ = await _awaited(reward.name, told, limit, math.inf)
                numbers = _checked_batch(reward.name, told, len(wanted))
            except MemoryError:
                raise
            except BaseException:  # noqa: BLE001, S112 - see above
                continue
            for index, value in zip(wanted, numbers, strict=True):
                values[index][number] = value
    return values


async def score_sample(
    rewards: Sequence[NamedReward],
    sample: RewardInput,
    values: Mapping[int, float],
    at: Callable[[int], None] = lambda _: None,
    limit: TimeLimit | None = None,
) -> Judgement:
    """Score one sample.

    Args:
        rewards: As built by `build_rewards`.
        sample: The sample.
        values: Known values, by function.
        at: Called before each function with its index.
        limit: An async function that exceeds it scores 0, and the later functions get the same time again; None: the caller
            ends the process.

    Raises:
        RewardError: A function failed; the message begins with its name.
    """
    total, parts, late = 0.0, {}, list[int]()
    limit = limit or TimeLimit(math.inf)
    until_s = limit.now() + limit.limit_s
    for number, (name, weight, function, *_) in enumerate(rewards):
        value = values.get(number)
        if value is None:
            at(number)
            plain_s = limit.plain_s
            try:
                told = limit.call(function, sample)
                is_awaited = not isinstance(told, float | int) and inspect.isawaitable(told)
            except BaseException as error:  # including SystemExit, which the function raised
                raise _failure(name, error) from error
            until_s -= limit.plain_s - plain_s
            if is_awaited:
                told, is_late = await _awaited(name, cast("Awaitable[object]", told), limit, until_s)
                if is_late:
                    late.append(number)
                    until_s = limit.now() + limit.limit_s
            value = _checked(name, told)
        parts[name] = value
        total += weight * value
    if not math.isfinite(total):
        raise RewardError(f"the weighted sum of {parts} is not finite")
    return Judgement(total, parts, tuple(late))


async def _awaited(name: str, value: Awaitable[object], limit: TimeLimit, until_s: float) -> tuple[object, bool]:
    """Return a function's result, and whether it is 0 because the time ran out, at `until_s` by the limit's clock.

    The function gets its own task: if it cancels its task, it cancels no other.
    """
    waiting = asyncio.ensure_future(_settled(value))  # noqa: TID251 - one that does not heed its end outlives everything
    while not (await asyncio.wait({waiting}, timeout=until_s - limit.now()))[0]:
        if limit.now() >= until_s:
            waiting.cancel()
            return 0.0, True
    told, error = (None, asyncio.CancelledError()) if waiting.cancelled() else waiting.result()
    if error is not None:
        raise _failure(name, error) from error
    return told, False


async def _settled(value: Awaitable[object]) -> tuple[object, BaseException | None]:
    """Return the result or the exception: a SystemExit that leaves a task would end the event loop."""
    try:
        return await value, None
    except BaseException as error:  # noqa: BLE001 - see above
        return None, error


def _failure(name: str, error: BaseException) -> RewardError | MemoryError:
    """Return the error of a sample for its function's exception; out of memory (also in a task group) stays a MemoryError."""
    out_of_memory = next((each for each in leaves(error) if isinstance(each, MemoryError)), None)
    kind = "" if isinstance(error, RewardError) else f"{type(error).__name__}: "
    return out_of_memory or RewardError(f"{name}: {kind}{shown(error)}")


def _checked(name: str, value: object) -> float:
    try:
        return as_number(value)
    except MemoryError:
        raise
    except BaseException as error:
        raise RewardError(f"{name}: returned {shown(value)}, which is not a finite number") from error


def _checked_batch(name: str, values: object, num_wanted: int) -> list[float]:
    try:
        if isinstance(values, Set | Mapping):
            raise TypeError("a set has no order, and a dict gives its keys")  # noqa: TRY301 - as any other that is no list
        numbers = [_checked(name, value) for value in values]  # type: ignore[attr-defined]
    except (MemoryError, RewardError):
        raise
    except Exception as error:
        said = f"{name}: returned {shown(values)} for {num_wanted} samples, which is not a list of numbers"
        raise RewardError(said) from error
    if len(numbers) != num_wanted:
        raise RewardError(f"{name}: returned {len(numbers)} numbers for {num_wanted} samples")
    return numbers


def _python_reward(name: str, config: kinds.PythonReward) -> NamedReward:
    """Load a user's function. If it takes several samples, it is called with several; if async, many calls run at once."""
    loaded = load_function(config.path, "reward path", REWARD_ARGUMENTS)
    is_async = inspect.iscoroutinefunction(loaded) or inspect.iscoroutinefunction(getattr(loaded, "__call__", None))  # noqa: B004

    def outside_the_loop(*arguments: object) -> Any:  # noqa: ANN401 - what the user's function returns
        """Call a plain function as if no event loop ran, so that it can run its own (`asyncio.run`) and cannot touch ours."""
        task = asyncio.current_task()
        assert task is not None, "rewards are called in tasks"
        loop = task.get_loop()
        _leave_task(loop, task)
        _set_running_loop(None)
        try:
            return loaded(*arguments)
        finally:
            _set_running_loop(loop)
            _enter_task(loop, task)

    user_function = loaded if is_async else outside_the_loop
    if not takes_batches(loaded):
        return NamedReward(name, config.weight, lambda sample: user_function(sample.prompt, sample.text), is_async=is_async)

    def several(samples: Sequence[RewardInput]) -> Sequence[float] | Awaitable[Sequence[float]]:
        return cast("Sequence[float]", user_function([each.prompt for each in samples], [each.text for each in samples]))

    async def one_of_several(sample: RewardInput) -> float:
        values = several([sample])
        return _checked_batch("a list of one", await values if inspect.isawaitable(values) else values, 1)[0]

    return NamedReward(name, config.weight, one_of_several, several)


def _build_answer_match(config: kinds.AnswerMatchReward) -> RewardFunction:
    """1 if the completion's answer equals the reference answer: exact, numeric, regex or mathematical equality."""
    extract = compile_extract(config.extract, "reward.functions answer_match extract")
    matchers: dict[str, Equal] = {
        "exact": str.__eq__,
        "numeric": lambda answer, reference: answer == reference or same_quantity(answer, reference, config.tolerance),
        "regex": lambda answer, reference: matches_whole(answer, compile_pattern(reference, "reference")),
    }
    matches = within_budget(same_mathematics) if config.mode == "math" else matchers[config.mode]

    def score(sample: RewardInput) -> float:
        reference = sample.prompt.answer.strip()
        if not reference:
            raise RewardError(f"prompt {sample.prompt.prompt_id!r} has no reference answer")
        answer = extract_answer(sample.text, extract)
        return float(bool(answer) and matches(answer or "", reference))

    return score


def check_prompts(config: kinds.RewardConfig, prompts: Sequence[Prompt]) -> None:
    """Refuse prompts that a built-in reward cannot judge, before a run starts.

    Args:
        config: The rewards.
        prompts: A task's prompts; of a sequence that is not a list only the first are checked, and so of a very long list.

    Raises:
        ConfigError: There are such prompts; the message has their number, and the first ones.
    """
    check_tests(config, prompts)
    looked_at = prompts[: MOST_REFERENCES if isinstance(prompts, list | tuple) else MOST_COMPUTED]
    for function in config.functions:
        if isinstance(function, kinds.AnswerMatchReward):
            _check_references(function, looked_at)


def _check_references(config: kinds.AnswerMatchReward, prompts: Sequence[Prompt]) -> None:
    where = f"reward.functions answer_match, mode {config.mode!r}"
    if without := [prompt.prompt_id for prompt in prompts if not prompt.answer.strip()]:
        raise ConfigError(f"{where}: {len(without)} prompts have no reference answer ({', '.join(without[:3])}): take them out")
    if config.mode == "regex":
        for prompt in prompts:
            compile_pattern(prompt.answer.strip(), f"{where}: the reference of prompt {prompt.prompt_id!r}")
    first = next(iter(prompts), None)
    if config.mode == "numeric" and first and all(parse_quantity(each.answer, None) is None for each in prompts):
        shown = f"{first.answer.strip()[:80]!r} of {first.prompt_id!r}"
        raise ConfigError(f"{where}: no reference is a number, such as {shown}; task.answer_regex takes it out of a longer text")


def _preference(sample: RewardInput) -> float:
    """1 for the chosen answer, 0 for the rejected one: the replay engine returns them as members 0 and 1."""
    if sample.index > 1:
        raise RewardError(f"member {sample.index} of a group is neither the chosen answer (0) nor the rejected one (1)")
    return 1.0 - sample.index


# -- a connected program -------------------------------------------------------------------------------------------------------

Reward = Callable[[Prompt, str], float | Awaitable[float]]
"""(prompt, completion) to a reward, plain or async."""
Ask = Callable[[Judged], Awaitable[list[ScoreRequest]]]
"""Sends scores, and returns the next requests."""
MOST_CALLS = 64
"""Maximum number of calls of a connected program's async function at the same time."""


async def judge_for(ask: Ask, function: Reward) -> None:
    """Judge the run's requests until `ask` raises; an async function judges up to MOST_CALLS samples at once.

    If the function raises, or an async one runs past the limit, the sample gets a Score with the reason and fails. It does not
    score 0: a call may be late because it waited for other calls.
    """
    caller, held, done = uuid.uuid4().hex, set[Member](), asyncio.Queue[Scores]()
    places = asyncio.Semaphore(MOST_CALLS)

    async def score(request: ScoreRequest, index: int, text: str) -> Score:
        limit = asyncio.timeout(request.timeout_s)
        try:
            async with places:
                given = function(request.prompt, text)
                if inspect.isawaitable(given):
                    async with limit:
                        given = await given
            reward = as_number(given)
        except (Exception, asyncio.CancelledError) as error:  # the boundary: whatever a user's function raises
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            said = f"the caller's reward: {type(error).__name__}: {shown(error)}"
            if limit.expired():
                said = f"the caller's reward ran past reward.timeout_s ({request.timeout_s:g} s)"
            return Score(index, 0.0, error=said, error_kind=kind_of(error), trace=trace_of(error))
        return Score(index, reward, {"caller": reward})

    async def judge(request: ScoreRequest) -> None:
        async with asyncio.TaskGroup() as scoring:
            members = zip(request.indices, request.texts, strict=True)
            tasks = [scoring.create_task(score(request, *member), name="rewards") for member in members]
        scores = tuple([task.result() for task in tasks])
        done.put_nowait(Scores(request.group_id, request.attempt, scores, purpose=request.purpose))

    async def tell() -> None:
        while True:
            answers = [await done.get()]
            answers += [done.get_nowait() for _ in range(done.qsize())]
            await ask(Judged(caller, tuple(answers), wants=False))
            held.difference_update((answer.purpose, answer.group_id, answer.scores[0].index) for answer in answers)

    async with asyncio.TaskGroup() as judging:
        judging.create_task(tell(), name="rewards")
        while True:
            for request in await ask(Judged(caller, held=tuple(held))):
                first = (request.purpose, request.group_id, request.indices[0])
                if first not in held:
                    held.add(first)
                    judging.create_task(judge(request), name="rewards")
