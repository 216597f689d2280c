"""Processes of this machine: subprocesses with a session of their own, logging to a file, tied to this process by their stdin.

Invariants: a child is in its own session (a Ctrl-C at the terminal does not reach it); its stdin is a pipe that only this process
holds open (its end is end of file for the child, see parent_watch.py); when its `wait` returns, its whole process group is gone.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping

from asyncrl.control.launcher import ProcessSpec
from asyncrl.errors import LaunchError

STREAM_BEYOND = "glibc.cpu.x86_non_temporal_threshold=0x10000"
"""Copies of 64 KiB and more are written past the caches; what other C libraries and processors do not know they ignore."""


class LocalLauncher:
    """Starts subprocesses."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """Give children this environment; None: this process's own, as it is at their start."""
        self._environment = environment

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        """Start one process; see `Launcher.start`."""
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        log_fd = os.open(spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=log_fd,
                stderr=log_fd,
                env=child_environment(os.environ if self._environment is None else self._environment, spec),
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"cannot start {spec.name} ({' '.join(spec.command)}): {error.strerror}") from error
        finally:
            os.close(log_fd)
        return LocalProcess(process)


class LocalProcess:
    """A subprocess and everything in its process group."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Return its process id, which is also its group's."""
        return self._process.pid

    async def wait(self) -> int:
        """Return its exit code once it is gone and its group has been swept."""
        code = await self._process.wait()
        self._signal_group(signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        return code

    def terminate(self) -> None:
        """Send SIGTERM to the process alone: it ends its own helpers."""
        if self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL to the whole group."""
        if self._process.returncode is None:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return
        except PermissionError:  # macOS says so of a group that holds only a zombie
            return


def child_environment(base: Mapping[str, str], spec: ProcessSpec) -> dict[str, str]:
    """Return the environment of a stage's process: `base`, its share of cores, and what the spec adds.

    Passive waiting matters: OpenMP threads that spin at a barrier take the core from the process they wait for. So does
    STREAM_BEYOND: glibc derives it from the cache that it is told of, which in a virtual machine may be the whole host's; copies
    of weights then go through the caches, at half the speed.
    """
    threads = str(spec.num_threads)
    share = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
    }
    quiet = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    copies = {"GLIBC_TUNABLES": base.get("GLIBC_TUNABLES") or STREAM_BEYOND}
    return {**base, **share, **quiet, **copies, **spec.env}
