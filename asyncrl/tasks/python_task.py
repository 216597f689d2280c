"""A user's own task, named by `module:function` or `file.py:function` in the config."""

from __future__ import annotations

from asyncrl.config.tasks import PythonTask
from asyncrl.config.user_code import TASK_ARGUMENTS, load_function
from asyncrl.errors import ConfigError
from asyncrl.tasks.task import TaskData


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
