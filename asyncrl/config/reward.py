"""Config of reward workers: reward functions (variants by the tag `kind`), and the limits of a scoring process."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from asyncrl.config import (
    FiniteFloat,
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Processes,
    ProcessesOrNone,
    _Stage,
    _Variant,
)


class _Reward(_Variant, frozen=True, kw_only=True):
    """Fields of every reward function."""

    weight: FiniteFloat = 1.0
    name: str = ""
    """Name in metrics; empty: its kind."""


class AnswerMatchReward(_Reward, frozen=True, tag="answer_match"):
    """1 when the extracted answer equals the reference, else 0."""

    mode: Literal["exact", "numeric", "regex", "math"] = "exact"
    """`math` is math-verify; `regex` full-matches the reference as a pattern."""
    extract: str = ""
    """Regex; the first group of its last match is the answer. Empty: the whole completion, stripped."""
    tolerance: NonNegativeFloat | None = None
    """Only for `numeric`: largest allowed difference, relative to max(1, |reference|). None: a whole number must be equal
    exactly, and any other number may differ by 1e-6."""


class FormatCheckReward(_Reward, frozen=True, tag="format_check"):
    """1 when the whole completion matches the pattern, else 0."""

    pattern: str


class CodeExecReward(_Reward, frozen=True, tag="code_exec"):
    """Fraction of the reference's tests that the completion's Python passes, inside a sandbox."""

    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    """`none` runs model-written code with this user's rights; use it only if that is acceptable."""
    cpu_s: PositiveFloat = 5.0
    """CPU time of each test's process; rounded up to whole seconds."""
    wall_s: PositiveFloat = 10.0
    """Wall time of the program with all its tests."""
    memory_bytes: PositiveInt = 1 << 30
    """Address space of each process, and resident memory of all of them together."""
    output_bytes: PositiveInt = 1 << 20
    """Maximum size of one test's standard output, of each file it writes, and of each value it returns."""
    all_or_nothing: bool = False


class ReasoningGymReward(_Reward, frozen=True, tag="reasoning_gym"):
    """The scorer of the reasoning-gym family, strict: 1 if its score is at least `threshold`, else 0."""

    threshold: Fraction = 0.99
    extract: str = r"<answer>(.*?)</answer>"


class OverlongPenalty(_Reward, frozen=True, tag="overlong"):
    """DAPO's soft penalty for long answers: 0 up to max_tokens - buffer_tokens, then linearly down to -1 and not below.

    Source: DAPO (arXiv 2503.14476), equation 13.
    """

    max_tokens: PositiveInt
    """Usually generate.sampling.max_new_tokens, and at most that."""
    buffer_tokens: PositiveInt


class PreferenceReward(_Reward, frozen=True, tag="preference"):
    """1 for the chosen answer of a preferences task, 0 for the rejected one."""


class PythonReward(_Reward, frozen=True, tag="python"):
    """A user's own function `module:function`, plain or async: (prompt, text) -> float; see reward/registry.py."""

    path: str


class CallerReward(_Reward, frozen=True, tag="caller"):
    """A function in a program connected to the run (`Run(config, reward=f)`, docs/python.md); no other function may be given."""


RewardFunctionConfig = (
    AnswerMatchReward
    | FormatCheckReward
    | CodeExecReward
    | ReasoningGymReward
    | OverlongPenalty
    | PreferenceReward
    | PythonReward
    | CallerReward
)


class RewardConfig(_Stage, frozen=True):
    """Reward workers; a reward is the weighted sum of `functions`."""

    num_workers: ProcessesOrNone = 1
    functions: tuple[RewardFunctionConfig, ...] = (AnswerMatchReward(),)
    timeout_s: PositiveFloat = 30.0
    """Time for all rewards of one sample together. The function that exceeds it scores 0 for that sample."""
    concurrency: Processes = 2
    """Number of samples that one worker scores at once, each in its own process."""
    process_memory_bytes: PositiveInt = 4 << 30
    """Maximum data memory of one scoring process. A function that needs more scores 0, and the process is replaced."""

    @property
    def is_caller(self) -> bool:
        """Return whether a connected program scores, instead of reward workers."""
        return any(isinstance(function, CallerReward) for function in self.functions)


def reward_names(config: RewardConfig) -> tuple[str, ...]:
    """Return each function's name: as configured, else its kind, with `_2`, `_3`, ... where the kind repeats."""
    taken, names, tried = {function.name for function in config.functions}, list[str](), Counter[str]()
    for function in config.functions:
        name = function.name
        while not name or (not function.name and name in taken):
            tried[function.kind] += 1
            number = tried[function.kind]
            name = function.kind if number == 1 else f"{function.kind}_{number}"
        taken.add(name)
        names.append(name)
    return tuple(names)
