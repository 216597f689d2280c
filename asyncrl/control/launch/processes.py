"""Which processes a run needs, how each is started, the launcher for this machine, and the owner's handle of a controller.

The needed processes follow from the config. The learner is one process here: its rank 0, which starts the other ranks.

Invariants of every launcher (tests/unit/control/launch/test_processes.py; test_supervisor.py with a double):
- `start` returns once the process has a pid. It does not wait until the process is useful.
- `wait` returns the exit code once the process, and everything that it started, is gone. Any number of callers may wait.
- `terminate` and `kill` act on this process and its descendants only, return at once, and do nothing after its end.

A local child has a session of its own, so a Ctrl-C at the terminal does not reach it. Its standard input is a pipe that only this
process holds open: the child ends when it reads end of file (process_main.py).

The controller is a child of the run's owner, or, with `launch.kind = "ray"`, the child of an actor on the owner's node. The
controller of a detached run has no parent and continues without its owner. A lost controller is not restarted: `asyncrl resume`
continues from its ledger. Once `ControllerProcess.start` has returned, `api.json` is never that of an earlier controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from asyncrl.config.learner import ScratchModel
from asyncrl.config.run import RunConfig
from asyncrl.control.launch.process_main import PID_FILE
from asyncrl.control.lifecycle.events import ProcessPlan
from asyncrl.control.placement.limits import generator_environment
from asyncrl.control.placement.memory import number_of_model
from asyncrl.errors import LaunchError, RunLostError
from asyncrl.generate.rollout import ENGINE_MODULES
from asyncrl.packing.pack import CostModel, RankPlan
from asyncrl.schema.control import ProcessKind
from asyncrl.schema.status import ApiEndpoint

STOP_TIMEOUT_S = 60.0
"""How long a controller has to end once it is asked to."""
PIPELINE = ("-m", "asyncrl.pipeline")
"""What Python runs for each process of a run."""
LOOK_S = 0.02
"""Time between two checks for api.json."""
GLIBC_TUNABLES = (
    "glibc.cpu.x86_non_temporal_threshold=0x10000:glibc.malloc.mmap_threshold=0x2000000:glibc.malloc.trim_threshold=0x10000000"
)
"""Makes glibc copy 64 KiB and more without the caches, and keep up to 256 MiB of freed blocks under 32 MiB. Other C libraries
ignore it."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Everything a launcher needs to know about one incarnation of a process."""

    name: str
    """Unique within the run and stable over restarts."""
    kind: ProcessKind
    incarnation: int
    """1 at the first start."""
    command: tuple[str, ...]
    log_path: Path
    """Standard output and error are appended here."""
    num_threads: int = 1
    """Threads of OpenMP and MKL; set before the process's Python starts."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to the launcher's own environment."""


class ProcessHandle(Protocol):
    """A started process."""

    pid: int
    """Its pid on the machine where it runs."""
    node: str
    """The machine where it runs; empty: this one."""

    async def wait(self) -> int:
        """Return its exit code once it is gone; negative for a signal, LOST if unknown."""

    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""

    def kill(self) -> None:
        """End it and its descendants (SIGKILL)."""


class Launcher(Protocol):
    """Starts processes."""

    async def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Start one process.

        Raises:
            LaunchError: It could not be started at all (no such program, no memory, no room on any machine).
        """


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """Starts subprocesses."""

    environment: Mapping[str, str] | None = None
    """Environment of its children; None: this process's environment at their start."""

    async def start(self, spec: ProcessSpec, pass_fds: Sequence[int] = ()) -> LocalProcess:
        """Start one process, which also inherits these file descriptors; see `Launcher.start`."""
        process = await _spawn(spec, os.environ if self.environment is None else self.environment, pass_fds=pass_fds)
        code = asyncio.get_running_loop().create_task(_end_of(process), name=f"end-of-{spec.name}")
        return LocalProcess(process.pid, code)


async def _spawn(
    spec: ProcessSpec, environment: Mapping[str, str], stdin: int = asyncio.subprocess.PIPE, pass_fds: Sequence[int] = ()
) -> asyncio.subprocess.Process:
    spec.log_path.parent.mkdir(parents=True, exist_ok=True)
    log_fd = os.open(spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        return await asyncio.create_subprocess_exec(
            *spec.command,
            stdin=stdin,
            stdout=log_fd,
            stderr=log_fd,
            env=child_environment(environment, spec),
            start_new_session=True,
            pass_fds=pass_fds,
        )
    except OSError as error:
        raise LaunchError(f"cannot start {spec.name} ({' '.join(spec.command)}): {error.strerror}") from error
    finally:
        os.close(log_fd)


@dataclass(eq=False)
class LocalProcess:
    """A process of this machine and everything in its process group."""

    pid: int
    """Its pid, which is also the id of its process group."""
    code: asyncio.Future[int]
    """Its exit code once it is gone."""
    on_kill: Callable[[asyncio.Future[int]], None] = lambda _: None
    """Called with `code` after SIGKILL was sent."""
    node: str = ""

    async def wait(self) -> int:
        """Return its exit code once it is gone and the rest of its group was killed."""
        code = await asyncio.shield(self.code)
        kill_group(self.pid)
        return code

    def terminate(self) -> None:
        """Send SIGTERM to the process only; it ends its own child processes."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the whole group."""
        if not self.code.done():
            self._send(signal.SIGKILL)  # one that was forked just now may not lead its group yet
            kill_group(self.pid)
            self.on_kill(self.code)

    def _send(self, number: signal.Signals) -> None:
        if not self.code.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


async def _end_of(process: asyncio.subprocess.Process) -> int:
    code = await process.wait()
    if process.stdin is not None:
        process.stdin.close()
    return code


def kill_group(pid: int) -> None:
    """Send SIGKILL to the process group that this process leads, or led."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies alone
        os.killpg(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Return whether there is such a process, which is not a zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def child_environment(base: Mapping[str, str], spec: ProcessSpec) -> dict[str, str]:
    """Return the environment of a stage's process: `base`, its share of cores, and the variables of the spec.

    Passive waiting matters, because OpenMP threads that spin at a barrier take the core from the process they wait for.
    GLIBC_TUNABLES matters too. glibc derives the threshold for large copies from the cache size, which in a virtual machine may
    be that of the whole host; weights are then copied through the caches, at half the speed. It also returns a step's activations
    to the system after every step, which must clear each page again for the next step: a tenth of a small learner's CPU time.
    """
    threads = str(spec.num_threads)
    return {
        **base,
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "GLIBC_TUNABLES": base.get("GLIBC_TUNABLES") or GLIBC_TUNABLES,
        **spec.env,
    }


# -- what a run wants --------------------------------------------------------------------------------------------------


def plan_processes(config: RunConfig) -> list[ProcessPlan]:
    """Return the run's processes in the order they are started.

    The learner (unless outside code trains), reward workers if rules score, inference workers if models score, generators.
    """
    plan = [ProcessPlan("learner", "learner")] if config.learner.kind == "builtin" else []
    if config.has_rules and not config.reward.is_caller:
        plan += [ProcessPlan(f"reward-{number}", "reward") for number in range(config.reward.num_workers)]
    if config.needs_inference:
        plan += [ProcessPlan(f"inference-{number}", "inference") for number in range(config.inference.num_workers)]
    plan += [ProcessPlan(f"generator-{number}", "generator") for number in range(config.generate.num_workers)]
    return plan


def plan_ranks(config: RunConfig) -> RankPlan:
    """Return how a step is divided over the learner's ranks; costs depend on the model's hidden size.

    A pretrained model's hidden size is read from its folder; if it is missing there, only linear layers count.
    """
    if config.learner.ranks == 1:
        return RankPlan()
    if isinstance(config.model, ScratchModel):
        return RankPlan(config.learner.ranks, CostModel.of_model(config.model.hidden_size))
    hidden_size = number_of_model(config.model.path, "hidden_size")  # the learner says what is wrong with the folder
    return RankPlan(config.learner.ranks, CostModel.of_model(hidden_size) if hidden_size else CostModel())


def stage_modules(config: RunConfig, kind: ProcessKind) -> tuple[str, ...]:
    """Return what a process of this kind imports before it connects to the controller."""
    if kind == "generator":
        return "asyncrl.generate.worker", ENGINE_MODULES[config.generate.engine.kind]
    return ("asyncrl.learner.fake" if kind == "learner" and config.learner.fake_step_s is not None else f"asyncrl.{kind}.worker",)


def forked_modules(config: RunConfig) -> dict[ProcessKind, tuple[str, ...]]:
    """Return the kinds of processes that are forked (fork_server.py), which are those on a CPU, and what each imports."""
    devices: dict[ProcessKind, str] = {}
    if config.learner.kind == "builtin" and config.learner.fake_step_s is None:
        devices["learner"] = config.learner.device
    if config.generate.engine.kind == "transformers":
        devices["generator"] = config.generate.engine.device_name
    if config.needs_inference:
        devices["inference"] = config.inference.device
    is_safe = sys.platform == "linux"  # elsewhere the system's libraries start threads of their own
    return {kind: stage_modules(config, kind) for kind, device in devices.items() if is_safe and device == "cpu"}


def num_threads(config: RunConfig, kind: ProcessKind) -> int:
    """Return how many OpenMP threads a process of this kind may use."""
    if kind == "generator":
        return int(getattr(config.generate.engine, "num_threads", 1))
    return {"learner": config.learner.num_threads, "inference": config.inference.num_threads}.get(kind, 1)


def spec_of(config: RunConfig, run_folder: Path, name: str, kind: ProcessKind, incarnation: int) -> ProcessSpec:
    """Return how a process is started: `python -m asyncrl.pipeline KIND NAME RUN_FOLDER INCARNATION`."""
    command = (sys.executable, "-P", *PIPELINE, kind, name, str(run_folder), str(incarnation))
    log_path, env = run_folder / "logs" / f"{name}.log", generator_environment(config) if kind == "generator" else {}
    return ProcessSpec(name, kind, incarnation, command, log_path, num_threads(config, kind), env)


# -- the controller ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ControllerProcess:
    """The controller of one run, held by its owner."""

    run_folder: Path
    _process: ProcessHandle | None = None
    """None for a detached controller."""
    _waiting: asyncio.Task[object] | None = None
    """Done once the controller is gone."""

    async def start(
        self, launch: Callable[[ProcessSpec], Awaitable[ProcessHandle]] | None, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the controller; `endpoint` returns once it answers.

        Args:
            launch: Starts a process; None: the controller is detached, and continues without this process.
            environment: Variables of a detached controller, in addition to this process's environment.

        Raises:
            RunLostError: The controller was killed while it started.
            LaunchError: The controller could not be started.
        """
        (self.run_folder / "api.json").unlink(missing_ok=True)
        name, detached = "controller", ("detached",) if launch is None else ()
        command = (sys.executable, "-P", *PIPELINE, name, name, str(self.run_folder), *detached)
        spec = ProcessSpec(name, "controller", 1, command, self.run_folder / "logs" / "controller.log", env=environment or {})
        if launch is None:
            leaving = await _spawn(spec, os.environ, stdin=asyncio.subprocess.DEVNULL)  # it leaves the controller behind
            if code := await leaving.wait():
                kind = RunLostError if code < 0 else LaunchError
                raise kind(f"{name} ended with exit code {code} as it began; see {spec.log_path}")
        else:
            self._process = await launch(spec)
        gone = self._until_gone() if self._process is None else self._process.wait()
        self._waiting = asyncio.get_running_loop().create_task(gone, name="controller-wait")

    async def endpoint(self) -> ApiEndpoint | None:
        """Wait until the controller answers, and return its endpoint; None if it is gone."""
        while self._waiting is not None and not self._waiting.done():
            if endpoint := read_endpoint(self.run_folder):
                return endpoint
            await asyncio.sleep(LOOK_S)
        return None

    async def end(self, *, late: bool = False) -> None:
        """Send SIGTERM, wait, and kill the controller if it does not end. A detached one is only released, or killed if late."""
        if self._waiting is None:
            return
        if self._process is None:
            if late:
                kill_controllers(self.run_folder)
            self._waiting.cancel()
            await asyncio.wait({self._waiting})
            return
        self._process.terminate()
        await asyncio.wait({self._waiting}, timeout=STOP_TIMEOUT_S)
        self._process.kill()  # nothing where it is gone
        await self._waiting
        self._process = None

    async def _until_gone(self) -> None:
        pid = int((self.run_folder / PID_FILE).read_text(encoding="utf-8"))
        while is_running(pid):  # noqa: ASYNC110 - nobody's child cannot be waited for
            await asyncio.sleep(LOOK_S)


def read_endpoint(run_folder: Path) -> ApiEndpoint | None:
    """Return the contents of `api.json`, or None if there is none."""
    try:
        return msgspec.json.decode((run_folder / "api.json").read_bytes(), type=ApiEndpoint)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None  # any other error says nothing of the run: no descriptor is free, say


def is_live(run_folder: Path) -> bool:
    """Return whether a controller of this run answers and is alive, on this machine.

    Its pid may belong to another program or another run's process by now, so its command line is read too.
    """
    endpoint = read_endpoint(run_folder)
    try:
        return endpoint is not None and _is_controller(psutil.Process(endpoint.pid).cmdline(), run_folder)
    except psutil.Error:
        return False


def find_controllers(run_folder: Path) -> list[int]:
    """Return the pids of this run's controllers on this machine, also of one that does not answer yet."""
    for _ in range(2):  # a detached controller goes on as a fork of itself: a table that is read meanwhile can have neither
        table = psutil.process_iter(["pid", "cmdline"])
        if found := [process.pid for process in table if _is_controller(process.info["cmdline"] or [], run_folder)]:
            return found
    return []


def kill_controllers(run_folder: Path) -> None:
    """Kill this run's controllers on this machine; their processes end because their standard input closes."""
    for pid in find_controllers(run_folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def until_gone(run_folder: Path, timeout_s: float) -> bool:
    """Wait until no controller of the run is on this machine, not even one that does not answer; return whether that happened."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while await asyncio.to_thread(find_controllers, run_folder):  # noqa: ASYNC110 - nobody's child cannot be waited for
                await asyncio.sleep(0.1)
            return True
    return False


def _is_controller(command: list[str], run_folder: Path) -> bool:
    *_, kind, _name, folder = command[:7] if len(command) > 6 else ("", "", "")
    return PIPELINE[1] in command and kind == "controller" and folder == str(run_folder.resolve())
