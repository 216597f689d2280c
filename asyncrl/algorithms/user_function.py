"""A user's own loss, advantage or correction: called like ours, and told apart from a fault of ours where it fails.

Invariants: that it takes two arguments is seen before anything is started; what it raises, and what it returns that is not what
ours return, is a LearnerError with its path in it: a restart would meet the same end, so the run stops. Running out of memory is
handed on as it is. No torch. Called by algorithms/losses.py, advantages.py and corrections.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from asyncrl.config.user_code import load_function
from asyncrl.errors import LearnerError

Inputs = TypeVar("Inputs")
T = TypeVar("T")

ARGUMENTS = ("inputs", "config")


def load_own(path: str, field: str, kind: type[T], fault_in: Callable[[Inputs, T], str]) -> Callable[[Inputs, object], T]:
    """Import a user's function, and return what calls it and looks at its answer.

    Args:
        path: `module:function` or `file.py:function`.
        field: The config field, for messages.
        kind: What it returns.
        fault_in: (inputs, answer) to what is wrong with the answer; empty: nothing.

    Raises:
        ConfigError: The path leads to no function of two arguments.
    """
    function = load_function(path, field, ARGUMENTS)

    def call(inputs: Inputs, config: object) -> T:
        try:
            answer = function(inputs, config)
        except Exception as error:  # the boundary: whatever a user's function raises
            if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
                raise
            raise LearnerError(f"{field} {path!r} raised {type(error).__name__}: {error}") from error
        if not isinstance(answer, kind):
            raise LearnerError(f"{field} {path!r} must return {kind.__module__}.{kind.__name__}, got {type(answer).__name__}")
        if fault := fault_in(inputs, answer):
            raise LearnerError(f"{field} {path!r}: {fault}")
        return answer

    return call


def wrong_shape(name: str, array: object, expected: tuple[int, ...], axes: str) -> str:
    """Return what is wrong with an array's type or shape; empty: nothing."""
    shape = getattr(array, "shape", None)
    if shape is None:
        return f"{name} must be an array {axes}, got {type(array).__name__}"
    return "" if tuple(shape) == expected else f"{name} must have shape {axes} = {list(expected)}, got {list(shape)}"
