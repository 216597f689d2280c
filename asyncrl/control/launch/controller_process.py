"""The controller's process as its owner holds it: started, found by its endpoint file, ended.

It is a child of the owner, or, with `launch.kind = "ray"`, the child of an actor on the owner's node. That of a detached run is
nobody's child, and goes on without its owner. A controller that is lost is not started again: `asyncrl resume` goes on from its
ledger.

Invariant: `api.json` is never that of an earlier controller once `start` has returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from asyncrl.config.run import RayLaunch, RunConfig
from asyncrl.control.launch.process_main import PID_FILE
from asyncrl.control.launch.processes import LocalLauncher, ProcessHandle, ProcessSpec, child_environment
from asyncrl.errors import LaunchError, RunLostError
from asyncrl.schema.status import ApiEndpoint

STOP_TIMEOUT_S = 60.0
LOOK_S = 0.02
"""Between looks for api.json."""


@dataclass(eq=False)
class ControllerProcess:
    """The controller of one run, held by its owner."""

    config: RunConfig
    run_folder: Path
    code: int | None = None
    """Its exit code once it is gone."""
    _process: ProcessHandle | None = None
    _waiting: asyncio.Task[None] | None = None

    async def start(self, environment: Mapping[str, str] | None = None) -> None:
        """Start it; `endpoint` returns once it answers.

        Args:
            environment: Of a detached one, which goes on without this process; laid over this process's own.

        Raises:
            RunLostError: It was killed as it began.
            LaunchError: It could not be started, no Ray cluster answers, or a run on Ray is to be detached.
        """
        (self.run_folder / "api.json").unlink(missing_ok=True)
        launch, name, detached = self.config.launch, "controller", () if environment is None else ("detached",)
        command = (sys.executable, "-P", "-m", "asyncrl.pipeline", name, name, str(self.run_folder), *detached)
        spec = ProcessSpec(
            "controller", "controller", 1, command, self.run_folder / "logs" / "controller.log", env=environment or {}
        )
        if environment is not None:
            if isinstance(launch, RayLaunch):
                raise LaunchError(
                    "a run on Ray cannot be detached, as Ray ends it with its driver: use `ray job submit` (docs/scale.md)"
                )
            await asyncio.to_thread(_start_detached, spec)
            watching = self._watch(int((self.run_folder / PID_FILE).read_text(encoding="utf-8")))
        else:
            if isinstance(launch, RayLaunch):
                from asyncrl.control.launch.ray import start_beside  # noqa: PLC0415 - only runs on Ray need Ray

                self._process = await start_beside(launch, spec, self.run_folder)
            else:
                self._process = await LocalLauncher().start(spec)
            watching = self._wait(self._process)
        self._waiting = asyncio.get_running_loop().create_task(watching, name="controller-wait")

    async def endpoint(self) -> ApiEndpoint | None:
        """Return where it answers, waiting until it does; None once it is gone."""
        while self.code is None:
            if endpoint := read_endpoint(self.run_folder):
                return endpoint
            await asyncio.sleep(LOOK_S)
        return None

    async def end(self, *, late: bool = False) -> None:
        """Ask it to end (SIGTERM), wait, and kill it where it stays. A detached one is let go, or killed where it is late."""
        if self._waiting is None:
            return
        if self._process is None:
            if late:
                kill_controllers(self.run_folder)
            self._waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._waiting
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.shield(self._waiting)
        except TimeoutError:
            self._process.kill()
            await self._waiting
        self._process = None

    async def _wait(self, process: ProcessHandle) -> None:
        self.code = await process.wait()

    async def _watch(self, pid: int) -> None:
        while psutil.pid_exists(pid):  # noqa: ASYNC110 - nobody's child cannot be waited for
            await asyncio.sleep(LOOK_S)
        self.code = -1


def _start_detached(spec: ProcessSpec) -> None:
    """Start a process that leaves a child behind, and wait until it has.

    Raises:
        RunLostError: It was killed.
        LaunchError: It could not be started.
    """
    spec.log_path.parent.mkdir(parents=True, exist_ok=True)
    with spec.log_path.open("ab") as log:
        try:
            code = subprocess.run(  # noqa: S603 - our own command
                spec.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=child_environment(os.environ, spec),
                start_new_session=True, check=False,
            ).returncode  # fmt: skip
        except OSError as error:
            raise LaunchError(f"cannot start {spec.name} ({' '.join(spec.command)}): {error.strerror}") from error
    if code:
        kind = RunLostError if code < 0 else LaunchError
        raise kind(f"{spec.name} ended with exit code {code} as it began; see {spec.log_path}")


def read_endpoint(run_folder: Path) -> ApiEndpoint | None:
    """Return what `api.json` says, or None where there is none."""
    try:
        return msgspec.json.decode((run_folder / "api.json").read_bytes(), type=ApiEndpoint)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None  # any other error says nothing of the run: no descriptor is free, say


def is_live(run_folder: Path) -> bool:
    """Return whether a controller of this run answers and is alive, on this machine.

    Its pid may have been given to another program since, or to another run's process, so its command line is read too.
    """
    endpoint = read_endpoint(run_folder)
    try:
        return endpoint is not None and _is_controller(psutil.Process(endpoint.pid).cmdline(), run_folder)
    except psutil.Error:
        return False


def find_controllers(run_folder: Path) -> list[int]:
    """Return the pids of this run's controllers on this machine, also of one that does not answer yet."""
    table = psutil.process_iter(["pid", "cmdline"])
    return [process.pid for process in table if _is_controller(process.info["cmdline"] or [], run_folder)]


def kill_controllers(run_folder: Path) -> None:
    """Kill this run's controllers on this machine; their processes end as their standard input does."""
    for pid in find_controllers(run_folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def until_gone(run_folder: Path, timeout_s: float) -> bool:
    """Wait until no controller of the run answers and lives; False where one still does after `timeout_s`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while is_live(run_folder):  # noqa: ASYNC110 - nobody's child cannot be waited for
                await asyncio.sleep(0.05)
            return True
    return False


def _is_controller(command: list[str], run_folder: Path) -> bool:
    *_, kind, _name, folder = command[:7] if len(command) > 6 else ("", "", "")
    return "asyncrl.pipeline" in command and kind == "controller" and folder == str(run_folder.resolve())
