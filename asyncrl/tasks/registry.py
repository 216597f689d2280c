"""Task builders by the config's kind. A new task is one file, one config struct and one row here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncrl.config.tasks import AdditionTask, JsonlTask, PreferencesTask, PythonTask, ReasoningGymTask, TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.tasks.addition import build_addition
from asyncrl.tasks.json_lines import build_jsonl, build_preferences
from asyncrl.tasks.reasoning_gym import build_reasoning_gym
from asyncrl.tasks.task import TaskData
from asyncrl.user_code import TASK_ARGUMENTS, load_function


def build_python(config: PythonTask, seed: int) -> TaskData:
    """Call the user's function with the run's seed.

    Raises:
        ConfigError: The path names no function, it raised, or it returned something other than a usable TaskData.
    """
    task = load_function(config.path, "task.path", TASK_ARGUMENTS)(seed)
    if not isinstance(task, TaskData):
        raise ConfigError(f"task.path {config.path!r} must return asyncrl.tasks.task.TaskData, got {type(task).__name__}")
    if not task.train:
        raise ConfigError(f"task.path {config.path!r} returned no prompts to train on")
    return task


BUILDERS: dict[type[TaskConfig], Callable[[Any, int], TaskData]] = {
    AdditionTask: build_addition,
    ReasoningGymTask: build_reasoning_gym,
    JsonlTask: build_jsonl,
    PreferencesTask: build_preferences,
    PythonTask: build_python,
}


def build_task(config: TaskConfig, seed: int) -> TaskData:
    """Build the task a run is configured with.

    Args:
        config: Any variant of `[task]`.
        seed: The run's seed; decides the split and the shots.

    Returns:
        The same task for the same arguments, in every process.

    Raises:
        ConfigError: The task cannot be built as configured; the message names the field.
    """
    return BUILDERS[type(config)](config, seed)
