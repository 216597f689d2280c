"""Task builders by the config's kind. A new task is one file, one config struct and one row here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncrl.config.tasks import AdditionTask, JsonlTask, PreferencesTask, PythonTask, ReasoningGymTask, TaskConfig
from asyncrl.tasks.addition import build_addition
from asyncrl.tasks.jsonl_task import build_jsonl
from asyncrl.tasks.preferences_task import build_preferences
from asyncrl.tasks.python_task import build_python
from asyncrl.tasks.reasoning_gym_task import build_reasoning_gym
from asyncrl.tasks.task import TaskData

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
