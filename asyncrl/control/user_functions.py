"""The functions that a config names, imported and looked at before a run is started, in a process of their own.

That process sees modules as the run's processes will, and what an import takes (memory, threads, a GPU) goes with it: neither the
program that starts a run nor the controller holds a user's code. Where Ray makes an environment for the run there is nothing to
see here, and what is wrong shows once the run is started. Called by control/preview.py and client.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import msgspec

from asyncrl.algorithms.user_function import ARGUMENTS
from asyncrl.config.corrections import PythonCorrection
from asyncrl.config.launch import has_own_environment
from asyncrl.config.reward import PythonReward
from asyncrl.config.run import RunConfig
from asyncrl.config.tasks import PythonTask
from asyncrl.config.user_code import REWARD_ARGUMENTS, TASK_ARGUMENTS, load_function
from asyncrl.errors import ConfigError

IMPORT_TIMEOUT_S = 300.0
_WRONG = 2


class UserFunction(msgspec.Struct, frozen=True):
    """One function and how it is called."""

    path: str
    field: str
    arguments: tuple[str, ...]


def user_functions(config: RunConfig) -> list[UserFunction]:
    """Return the functions that the processes of this run will import."""
    found = [UserFunction(config.task.path, "task.path", TASK_ARGUMENTS)] if isinstance(config.task, PythonTask) else []
    found += [
        UserFunction(function.path, "reward path", REWARD_ARGUMENTS)
        for function in config.reward.functions
        if isinstance(function, PythonReward)
    ]
    if config.learner.kind == "builtin":
        algorithm = config.algorithm
        maths = [("algorithm.advantage", algorithm.advantage), ("algorithm.loss", algorithm.loss)]
        maths += [
            ("algorithm.corrections.path", item.path) for item in algorithm.corrections if isinstance(item, PythonCorrection)
        ]
        found += [UserFunction(path, field, ARGUMENTS) for field, path in maths if ":" in path]
    return found


def check_user_functions(config: RunConfig) -> None:
    """Import every function the config names, in a process that ends with that.

    Raises:
        ConfigError: One cannot be imported, or does not take what it is called with.
    """
    functions = user_functions(config)
    if not functions or has_own_environment(config.launch):
        return
    named = ", ".join(function.path for function in functions)
    command = (sys.executable, "-m", "asyncrl.control.user_functions", msgspec.json.encode(functions).decode())
    with tempfile.TemporaryFile() as output:  # no pipe: a process that an import starts could hold it open
        try:
            done = subprocess.run(  # noqa: S603 - our own interpreter
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=IMPORT_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"importing {named} has not ended after {IMPORT_TIMEOUT_S:.0f} s") from error
        output.seek(0)
        said = output.read().decode(errors="replace").strip()
    if done.returncode:
        if done.returncode == _WRONG and said:
            raise ConfigError(said.splitlines()[-1])
        raise ConfigError(f"importing {named} ended the process with exit code {done.returncode}: {said[-2000:]}")


def main(functions_json: str) -> int:
    """Import them; the first fault is the last line that is said."""
    try:
        for function in msgspec.json.decode(functions_json, type=list[UserFunction]):
            load_function(function.path, function.field, function.arguments)
    except ConfigError as error:
        sys.stdout.flush()
        print("\n" + " ".join(str(error).splitlines()), file=sys.stderr)  # noqa: T201 - its parent reads it
        return _WRONG
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that an import began, and libraries that break at exit, are no fault of the functions
