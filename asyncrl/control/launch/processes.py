"""Which processes a run wants, what each is started with, and the launcher of this machine.

All of it follows from the config. The learner is one process here: its rank 0, which starts the others.

Every launcher (tests/unit/control/launch/test_processes.py; test_supervisor.py with a double):
- `start` returns once the process has a pid. It does not wait until the process is useful.
- `wait` returns the exit code once the process, and everything that it started, is gone. Any number of callers may wait.
- `terminate` and `kill` act on this process and its descendants only, return at once, and do nothing after its end.

A local child has a session of its own, so a Ctrl-C at the terminal does not reach it. Its standard input is a pipe that only this
process holds open: the child ends when it reads end of file (process_main.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from asyncrl.config.learner import ScratchModel
from asyncrl.config.run import RunConfig
from asyncrl.control.lifecycle.events import ProcessPlan
from asyncrl.control.placement.limits import generator_environment
from asyncrl.control.placement.memory import number_of_model
from asyncrl.errors import LaunchError
from asyncrl.generate.factory import ENGINE_MODULES
from asyncrl.packing.pack import CostModel, RankPlan
from asyncrl.schema.control import ProcessKind

GLIBC_TUNABLES = (
    "glibc.cpu.x86_non_temporal_threshold=0x10000:glibc.malloc.mmap_threshold=0x2000000:glibc.malloc.trim_threshold=0x10000000"
)
"""glibc copies 64 KiB and more past the caches, and keeps up to 256 MiB of freed blocks of under 32 MiB. Others ignore it."""


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
    """For OpenMP and MKL; set before the process's Python starts."""
    env: Mapping[str, str] = field(default_factory=dict)
    """On top of the launcher's own environment."""


class ProcessHandle(Protocol):
    """A started process."""

    @property
    def pid(self) -> int:
        """Return its process id on the machine it runs on."""
        ...

    async def wait(self) -> int:
        """Return its exit code once it is gone; negative for a signal."""
        ...

    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""
        ...

    def kill(self) -> None:
        """End it and its descendants (SIGKILL)."""
        ...


class Launcher(Protocol):
    """Starts processes."""

    async def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Start one process.

        Raises:
            LaunchError: It could not be started at all (no such program, no memory, no room on any machine).
        """
        ...


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """Starts subprocesses."""

    environment: Mapping[str, str] | None = None
    """Of its children; None: this process's own, as it is at their start."""

    async def start(self, spec: ProcessSpec, pass_fds: Sequence[int] = ()) -> LocalProcess:
        """Start one process, which gets these file descriptors too; see `Launcher.start`."""
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        log_fd = os.open(spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=log_fd,
                stderr=log_fd,
                env=child_environment(os.environ if self.environment is None else self.environment, spec),
                start_new_session=True,
                pass_fds=pass_fds,
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
        self.pid = process.pid
        """Also the id of its group."""

    async def wait(self) -> int:
        """Return its exit code once it is gone and the rest of its group was killed."""
        code = await self._process.wait()
        kill_group(self.pid)
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
            kill_group(self.pid)


def kill_group(pid: int) -> None:
    """Send SIGKILL to the process group that this process leads, or led."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies alone
        os.killpg(pid, signal.SIGKILL)


def child_environment(base: Mapping[str, str], spec: ProcessSpec) -> dict[str, str]:
    """Return the environment of a stage's process: `base`, its share of cores, and what the spec adds.

    Passive waiting matters: OpenMP threads that spin at a barrier take the core from the process they wait for. So does
    GLIBC_TUNABLES. glibc derives the threshold of large copies from the size of the cache, which in a virtual machine may be that
    of the whole host; copies of weights then go through the caches, at half the speed. And it gives a step's activations back to
    the system after every step, which clears each page of them for the next one: a tenth of a small learner's CPU.
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

    The learner (unless outside code is it), reward workers where rules score here, inference workers where models do, generators.
    """
    plan = [ProcessPlan("learner", "learner")] if config.learner.kind == "builtin" else []
    if config.has_rules and not config.reward.is_caller:
        plan += [ProcessPlan(f"reward-{number}", "reward") for number in range(config.reward.num_workers)]
    if config.needs_inference:
        plan += [ProcessPlan(f"inference-{number}", "inference") for number in range(config.inference.num_workers)]
    plan += [ProcessPlan(f"generator-{number}", "generator") for number in range(config.generate.num_workers)]
    return plan


def plan_ranks(config: RunConfig) -> RankPlan:
    """Return how a step is spread over the learner's ranks, its costs by the model's hidden size.

    A pretrained model's is read from its folder; where that does not say, only linear layers count.
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
    """Return which kinds of processes are forked (fork_server.py), those that compute on a CPU, and what each imports."""
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
    command = (sys.executable, "-P", "-m", "asyncrl.pipeline", kind, name, str(run_folder), str(incarnation))
    log_path, env = run_folder / "logs" / f"{name}.log", generator_environment(config) if kind == "generator" else {}
    return ProcessSpec(name, kind, incarnation, command, log_path, num_threads(config, kind), env)
