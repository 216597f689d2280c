"""The input and result of a reward function, and functions that rewards share. Every reward imports it; it imports none."""

from __future__ import annotations

import importlib
import math
import re
from collections import deque
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any, cast

import msgspec
import re2  # type: ignore[import-untyped]

from asyncrl.errors import ConfigError, RewardError
from asyncrl.schema.samples import FinishReason, Prompt


class RewardInput(msgspec.Struct, frozen=True):
    """One completion, and its prompt."""

    prompt: Prompt
    text: str
    """The decoded completion, without special tokens."""
    finish_reason: FinishReason
    num_tokens: int
    index: int = 0
    """Its index in its group."""


class Judgement(msgspec.Struct, frozen=True):
    """The result for one sample; from a scoring process to the pool."""

    reward: float = 0.0
    """The weighted sum."""
    parts: dict[str, float] = {}
    """Every value by name, unweighted."""
    late: tuple[int, ...] = ()
    """Functions that ran out of time and therefore score 0."""
    number: int = 0
    """Number of the sample among those that the process received, from 1."""
    error: str = ""
    kind: str = ""
    """Type and place of the error (`errors.kind_of`)."""
    trace: str = ""
    seconds: float = 0.0
    out_of_memory: bool = False
    """There is no reward, and the process ends, since it may still hold the memory."""


MOST_SHOWN_CHARS = 200
"""Maximum number of characters of a text for a function's exception or result."""
RewardFunction = Callable[[RewardInput], "float | Awaitable[float]"]
"""Judges one sample; sync or async. An exception makes the sample fail, with that reason."""


Pattern = re.Pattern[Any]
"""A pattern compiled by RE2, which matches UTF-8; for a `str` it also computes character positions, three times slower."""


def linear_pattern(pattern: str) -> Pattern:
    """Compile with RE2, `.` matching newlines too; raise re2.error if RE2 does not support the pattern."""
    options = re2.Options()
    options.dot_nl, options.log_errors = True, False
    return cast("Pattern", re2.compile(pattern, options))


def compile_pattern(pattern: str, field: str) -> Pattern:
    """Compile a pattern so that it runs in linear time (RE2); `.` matches newlines too.

    Raises:
        ConfigError: It is not a regular expression, or has lookaround or backreferences, with which a completion could make the
            judge run without end; the message names `field`.
    """
    try:
        # Python's end of text is RE2's \z; as RE2 has no \Z, the two cannot be confused.
        return linear_pattern(re.sub(r"(?<!\\)((?:\\\\)*)\\Z", r"\1\\z", pattern))
    except re2.error as refused:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{field}: {pattern!r} is not a regular expression: {error}") from error
        raise ConfigError(
            f"{field}: {pattern!r} cannot run in linear time: lookaround and backreferences are not supported; write it without "
            "them, or judge by a python reward"
        ) from refused


def compile_extract(pattern: str, field: str) -> Pattern | None:
    """Compile an extraction pattern, which must have a group; None if it is empty. Raises as `compile_pattern`."""
    if not pattern:
        return None
    compiled = compile_pattern(pattern, field)
    if compiled.groups < 1:
        raise ConfigError(f"{field}: {pattern!r} has no group; put the answer in parentheses, as in r'<answer>(.*?)</answer>'")
    return compiled


def extract_answer(text: str, pattern: Pattern | None) -> str | None:
    """Return the answer in a completion, stripped.

    Args:
        text: The completion.
        pattern: Its first group in the last match is the answer; None: the whole text is the answer.

    Returns:
        The answer, or None without a match.
    """
    if pattern is None:
        return text.strip()
    last = deque(pattern.finditer(text.encode("utf-8", "replace")), maxlen=1)
    return last[0][1].decode("utf-8", "replace").strip() if last and last[0][1] is not None else None


def matches_whole(text: str, pattern: Pattern) -> bool:
    """Return whether a whole text matches."""
    return pattern.fullmatch(text.encode("utf-8", "replace")) is not None


def import_optional(module: str, kind: str) -> ModuleType:
    """Import an optional package that only one reward needs.

    Raises:
        RewardError: It is not installed; the message names the extra to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise RewardError(f"reward {kind} needs the package {error.name}: pip install 'asyncrl[tasks]'") from error


def as_number(value: object) -> float:
    """Convert the result of a user's function to a number.

    Raises:
        TypeError: It is not a number. Text and bytes, which `float` would accept, are not numbers.
        ValueError: It is not finite.
        BaseException: An exception of the value's own method.
    """
    if not (hasattr(type(value), "__float__") or hasattr(type(value), "__index__")):
        raise TypeError(f"it must be a finite number, got {shown(value)}")
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError(f"it must be a finite number, got {number}")
    return number


def shown(value: object) -> str:
    """Return an exception or result of a user's function as text that can be sent: bounded, and without lone surrogates."""
    try:
        text = str(value) if isinstance(value, BaseException) else repr(value)
    except BaseException:  # noqa: BLE001 - the value's own method, or an integer of too many digits
        text = f"a value of {type(value).__name__} that cannot be shown"
    return text[:MOST_SHOWN_CHARS].encode("utf-8", "replace").decode()
