"""The controller's process as its owner holds it: started, found again by its endpoint, ended.

    LocalController   a child of the owner; when it is lost, so is the owner's hold on the run, which `asyncrl resume` picks up
    RayController     in an actor beside the owner; lost with its actor it is started again, and goes on from its ledger

Invariants: `api.json` is never that of a controller before the one being started; a second controller is never started while the
first is alive (the ledger's lock would refuse it). Called by client.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import psutil

from asyncrl.config.launch import RayLaunch
from asyncrl.config.run import RunConfig, SupervisionConfig
from asyncrl.control.launcher import ProcessSpec
from asyncrl.errors import LaunchError
from asyncrl.schema.status import ApiEndpoint

if TYPE_CHECKING:
    from asyncrl.control.launch_ray import RayProcess

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 60.0
LOOK_S = 0.02
"""Between looks for api.json."""
OLD_ONE_S = 10.0
"""For a controller whose actor is lost to end by itself."""
_DECIDED = frozenset({0, 1})
"""Exit codes of a controller whose run has ended, well or not; with any other it was lost."""


class OwnedController(Protocol):
    """The controller of one run, held by its owner."""

    @property
    def code(self) -> int | None:
        """Return its exit code once it is gone for good."""
        ...

    async def start(self) -> None:
        """Start it; see `endpoint` for when it answers."""
        ...

    async def endpoint(self, before: ApiEndpoint | None = None) -> ApiEndpoint | None:
        """Return where it answers, another than `before`; None once it is gone for good."""
        ...

    async def end(self) -> None:
        """Tell it to go, wait, and kill it where it does not."""
        ...


def controller_of(config: RunConfig, run_folder: Path) -> OwnedController:
    """Return the controller as the config wants it held; nothing is started."""
    if isinstance(config.launch, RayLaunch):
        return RayController(config.launch, config.supervision, run_folder)
    return LocalController(run_folder)


class LocalController:
    """A child process."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder
        self._process: asyncio.subprocess.Process | None = None

    @property
    def code(self) -> int | None:
        """Return its exit code."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Start it with its input held open: the end of that tells it to go."""
        (self._run_folder / "api.json").unlink(missing_ok=True)
        with _log_path(self._run_folder).open("ab") as log_file:
            self._process = await asyncio.create_subprocess_exec(
                *_command(self._run_folder),
                stdin=asyncio.subprocess.PIPE, stdout=log_file, stderr=log_file, start_new_session=True,
            )  # fmt: skip

    async def endpoint(self, before: ApiEndpoint | None = None) -> ApiEndpoint | None:
        """Return where it answers; there is never a second one."""
        if before is not None:
            return None
        endpoint = None
        while self.code is None and (endpoint := read_endpoint(self._run_folder)) is None:  # noqa: ASYNC110 - a file
            await asyncio.sleep(LOOK_S)
        return endpoint

    async def end(self) -> None:
        """Close its input, wait, and kill it where it stays."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            await process.wait()
        self._process = None


class RayController:
    """In an actor on the owner's node, started again when it is lost, as often as `supervision.max_deaths` allows."""

    def __init__(self, launch: RayLaunch, config: SupervisionConfig, run_folder: Path) -> None:
        self._launch = launch
        self._config = config
        self._run_folder = run_folder
        self._process: RayProcess | None = None
        self._watching: asyncio.Task[None] | None = None
        self._code: int | None = None
        self._deaths_s: list[float] = []
        self._ending = False

    @property
    def code(self) -> int | None:
        """Return its exit code, once nobody will start it again."""
        return self._code

    async def start(self) -> None:
        """Start it and stay with it.

        Raises:
            LaunchError: No cluster answers, or its actor could not be made.
        """
        self._process = await self._start_once()
        self._watching = asyncio.get_running_loop().create_task(self._watch(self._process), name="controller-watch")

    async def endpoint(self, before: ApiEndpoint | None = None) -> ApiEndpoint | None:
        """Return where it answers, or the one that takes the place of the one `before`."""
        while self._code is None:
            endpoint = read_endpoint(self._run_folder)
            if endpoint is not None and endpoint != before:
                return endpoint
            await asyncio.sleep(LOOK_S)
        return None

    async def end(self) -> None:
        """Ask it to end (SIGTERM), wait, and kill it where it stays."""
        self._ending = True
        if self._process is None or self._watching is None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.shield(self._watching)
        except TimeoutError:
            self._process.kill()
            await self._watching
        self._process = None

    async def _start_once(self) -> RayProcess:
        from asyncrl.control.launch_ray import start_beside  # noqa: PLC0415 - only runs on Ray need Ray

        (self._run_folder / "api.json").unlink(missing_ok=True)
        spec = ProcessSpec("controller", "controller", 1, _command(self._run_folder), _log_path(self._run_folder))
        return await start_beside(self._launch, spec, self._run_folder)

    async def _watch(self, process: RayProcess) -> None:
        """Stay until a controller has ended by itself, or too many were lost."""
        loop = asyncio.get_running_loop()
        while True:
            code = await process.wait()
            now = loop.time()
            self._deaths_s = [*(at_s for at_s in self._deaths_s if now - at_s <= self._config.death_window_s), now]
            if code in _DECIDED or self._ending or len(self._deaths_s) > self._config.max_deaths:
                self._code = code
                return
            log.warning("the controller is lost (exit code %d): it is started again and goes on from its ledger", code)
            await _until_gone(self._run_folder)
            try:
                self._process = process = await self._start_once()
            except LaunchError as error:
                log.error("%s", error)  # noqa: TRY400 - the message is complete
                self._code = code
                return
            if self._ending:  # said while none was there to hear it
                process.terminate()


def read_endpoint(run_folder: Path) -> ApiEndpoint | None:
    """Return what `api.json` says, or None where there is none."""
    try:
        return msgspec.json.decode((run_folder / "api.json").read_bytes(), type=ApiEndpoint)
    except (OSError, msgspec.DecodeError):
        return None


def live_controller(run_folder: Path) -> int:
    """Return the pid of the run's controller on this machine; 0 where none is alive."""
    endpoint = read_endpoint(run_folder)
    return endpoint.pid if endpoint is not None and _is_controller(endpoint.pid) else 0


def _is_controller(pid: int) -> bool:
    """Whether the pid is a controller of ours; it may have been given to another program since."""
    try:
        return "asyncrl.pipeline" in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False


async def _until_gone(run_folder: Path) -> None:
    """Return once no controller of this run is alive here; one that does not end with its actor is killed by its pid."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(OLD_ONE_S):
            while live_controller(run_folder):  # noqa: ASYNC110 - another process
                await asyncio.sleep(LOOK_S)
    pid = live_controller(run_folder)
    if pid:
        log.warning("the controller (pid %d) did not end with its actor: killing it", pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _command(run_folder: Path) -> tuple[str, ...]:
    return (sys.executable, "-m", "asyncrl.pipeline", "controller", "controller", str(run_folder))


def _log_path(run_folder: Path) -> Path:
    return run_folder / "logs" / "controller.log"
