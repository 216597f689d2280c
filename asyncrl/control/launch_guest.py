"""From the `asyncrl join` command to a generator's process: this very process, started anew with a generator's environment.

Called by the CLI.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from asyncrl.control.joining import JoinRequest, check_overrides
from asyncrl.control.launch_local import child_environment
from asyncrl.control.launcher import ProcessSpec
from asyncrl.errors import ConfigError


def become_guest(run_folder: str, address: str, keys: str, overrides: tuple[str, ...]) -> NoReturn:
    """Replace this process by one that joins a run; threads and copies behave as in the run's own generators.

    Args:
        run_folder: Of the run; empty where `address` is given.
        address: Of the run.
        keys: File with the run's client keys; empty: the run speaks in plain text.
        overrides: The generator's own settings.

    Raises:
        ConfigError: The settings are not a generator's to make, or keys come without an address.
    """
    check_overrides(overrides)
    if keys and not address:
        raise ConfigError("--keys goes with --address; a run folder has its keys in itself")
    request = JoinRequest(run_folder=run_folder, address=address, keys=keys, overrides=overrides)
    command = (sys.executable, "-m", "asyncrl.pipeline", "join", msgspec.json.encode(request).decode())
    spec = ProcessSpec("join", "generator", 1, command, Path())
    sys.stdout.flush()
    os.execve(sys.executable, command, child_environment(os.environ, spec))  # noqa: S606 - this program itself
