"""A user's own function, named in a config: `package.module:function`, or `path/to/file.py:function`.

Loading runs the user's module, as an import does.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from asyncrl.errors import ConfigError, LearnerError, kind_of

Inputs = TypeVar("Inputs")
Config = TypeVar("Config")
T = TypeVar("T")

TASK_ARGUMENTS = ("seed",)
REWARD_ARGUMENTS = ("prompt", "text")
MATHS_ARGUMENTS = ("inputs", "config")
"""Arguments of a user's own loss, advantage or correction."""


def load_function(path: str, field: str, arguments: Sequence[str] = ()) -> Callable[..., Any]:
    """Import the function that `path` names.

    Args:
        path: `module:function`, searched for in the working directory too, or `file.py:function`.
        field: The config field, for messages.
        arguments: Names of the positional arguments of the call; if empty, the signature is not checked.

    Returns:
        The function.

    Raises:
        ConfigError: The path has another form, the module cannot be imported, or it has no function of that name that takes
            the arguments.
    """
    module_name, colon, function_name = path.rpartition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(f"{field} takes module:function or file.py:function, got {path!r}")
    module = _load_module(module_name, f"{field} {path!r}")
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if function is None or not callable(function):
        known = ", ".join(name for name in vars(module) if not name.startswith("_") and callable(getattr(module, name)))
        raise ConfigError(f"{field} {path!r}: {module_name} has no function {function_name!r}; it has {known or 'none'}")
    if arguments:
        try:
            # The signature of a decorator's wrapper, not of the wrapped function: the wrapper is called.
            signature = inspect.signature(function, follow_wrapped=False)
        except ValueError:  # a built-in function without a signature
            return function
        try:
            signature.bind(*arguments)
        except TypeError as error:
            called = f"is called with ({', '.join(arguments)}) and takes {signature}"
            raise ConfigError(f"{field} {path!r} {called}: {error}") from error
    return function


def load_own(path: str, field: str, kind: type[T], fault_in: Callable[[Inputs, T], str]) -> Callable[[Inputs, object], T]:
    """Import a user's own loss, advantage or correction, and return a function that calls it and checks its answer.

    An exception from the function and an answer of the wrong form become a LearnerError that names the path: a restart would
    fail the same way, so the run stops. An out-of-memory error is raised unchanged.

    Args:
        path: `module:function` or `file.py:function`.
        field: The config field, for messages.
        kind: The type that it must return.
        fault_in: Takes (inputs, answer); returns the fault of the answer, or an empty string.

    Raises:
        ConfigError: The path names no function that takes two arguments.
    """
    function = load_function(path, field, MATHS_ARGUMENTS)

    def call(inputs: Inputs, config: object) -> T:
        try:
            answer: T = function(inputs, config)
        except Exception as error:  # the boundary: whatever a user's function raises
            if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
                raise
            raise LearnerError(f"{field} {path!r} raised {kind_of(error)}: {error}") from error
        return answer

    return checked(call, f"{field} {path!r}", kind, fault_in)


def checked(
    function: Callable[[Inputs, Config], T], what: str, kind: type[T], fault_in: Callable[[Inputs, T], str]
) -> Callable[[Inputs, Config], T]:
    """Return a function that calls a user's function and, for a wrong answer, raises a LearnerError that begins with `what`."""

    def call(inputs: Inputs, config: Config) -> T:
        answer = function(inputs, config)
        if not isinstance(answer, kind):
            raise LearnerError(f"{what} must return {kind.__module__}.{kind.__name__}, got {type(answer).__name__}")
        if fault := fault_in(inputs, answer):
            raise LearnerError(f"{what}: {fault}")
        return answer

    return call


def wrong_shape(name: str, array: object, expected: tuple[int, ...], axes: str) -> str:
    """Return the fault of an array's type or shape, or an empty string."""
    shape = getattr(array, "shape", None)
    if shape is None:
        return f"{name} must be an array {axes}, got {type(array).__name__}"
    return "" if tuple(shape) == expected else f"{name} must have shape {axes} = {list(expected)}, got {list(shape)}"


def takes_batches(function: Callable[..., Any]) -> bool:
    """Return whether a reward function takes several samples at once: its first arguments are named `prompts` and `texts`."""
    try:
        names = list(inspect.signature(function, follow_wrapped=False).parameters)
    except ValueError:
        return False
    return names[:2] == ["prompts", "texts"]


def _load_module(name: str, where: str) -> ModuleType:
    """Import a module by its name, or from its file; an error begins with `where`."""
    file = Path(name)
    is_file, own_name = name.endswith(".py"), f"asyncrl_user_{file.stem}"
    if is_file and not file.is_file():
        raise ConfigError(f"{where}: there is no file {file}")
    try:
        if not is_file:
            if (working_directory := str(Path.cwd())) not in sys.path:
                sys.path.append(working_directory)
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(own_name, file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[own_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:  # the boundary: whatever a user's module raises
        said = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        places = "" if is_file else "; looked for in the working directory, PYTHONPATH and the environment's packages"
        raise ConfigError(f"{where}: {name} cannot be imported: {said}{places}") from error
    return module
