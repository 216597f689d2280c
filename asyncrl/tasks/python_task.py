"""A user's own task, named by `module:function` in the config."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from asyncrl.config.stages import PythonTask
from asyncrl.errors import ConfigError
from asyncrl.tasks.task import TaskData


def build_python(config: PythonTask, seed: int) -> TaskData:
    """Call the user's function with the run's seed.

    Raises:
        ConfigError: The path names no function, it raised, or it returned something other than a usable TaskData.
    """
    task = _function(config.path)(seed)
    if not isinstance(task, TaskData):
        raise ConfigError(f"task.path {config.path!r} must return asyncrl.tasks.task.TaskData, got {type(task).__name__}")
    if not task.train:
        raise ConfigError(f"task.path {config.path!r} returned no prompts to train on")
    return task


def _function(path: str) -> Callable[[int], object]:
    """Import `module:function`; modules in the working directory are found too, after everything installed."""
    module_name, colon, function_name = path.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(f"task.path must be 'module:function', got {path!r}")
    working_directory = str(Path.cwd())
    if working_directory not in sys.path:
        sys.path.append(working_directory)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"task.path {path!r}: cannot import {module_name!r}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"task.path {path!r}: {module_name!r} has no function {function_name!r}")
    return function  # type: ignore[no-any-return]
