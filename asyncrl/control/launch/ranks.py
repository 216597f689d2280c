"""A learner's rank other than 0: a child of rank 0's process and of its process group, which ends when that one does.

    python -m asyncrl.control.launch.ranks RANK RUN_FOLDER ADDRESS

The controller does not know it, and it has no connection of its own: rank 0 tells it what to do.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

from asyncrl.config.load import load_run_config
from asyncrl.control.launch import process_main as process
from asyncrl.errors import ConfigError
from asyncrl.observe.log import set_up_logging

log = logging.getLogger("asyncrl")


def start_rank(run_folder: Path, rank: int, address: str) -> subprocess.Popen[bytes]:
    """Start another rank of the learner whose rank 0 this process is, and listens at `address`."""
    command = [sys.executable, "-P", "-m", "asyncrl.control.launch.ranks", str(rank), str(run_folder), address]
    return subprocess.Popen(command, stdin=subprocess.PIPE)  # noqa: S603 - this program itself


def run_rank(rank: int, run_folder: Path, address: str) -> int:
    """Be that rank until rank 0 says stop or is gone; return the exit code."""
    try:
        config = load_run_config(run_folder)
    except ConfigError as error:
        print(f"asyncrl: {error}", file=sys.stderr)  # noqa: T201 - the log is not set up where the config is wrong
        return process.EXIT_FAILED
    set_up_logging(f"learner-{rank}", config.observe.log_level)
    process.ignore_interrupts()
    process.watch_parent()
    try:
        with process.imports_without_gc():
            from asyncrl.learner.ranks.worker import run_rank_worker  # noqa: PLC0415 - torch: not before a config is there

        run_rank_worker(config, run_folder, rank, address)
    except Exception:
        log.exception("rank %d cannot go on", rank)
        return process.EXIT_FAULT
    return process.EXIT_OK


if __name__ == "__main__":
    process.leave(run_rank(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
