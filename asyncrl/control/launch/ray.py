"""Processes anywhere on a Ray cluster: one actor each, in placement groups. The one file that talks to Ray.

Ray knows the nodes, finds one that has what a process asks for, notices when a node is lost, and finds (or, with its autoscaler,
makes) another. Whether and when a process is started again our own lifecycle decides, as on one machine: actors never restart by
themselves, so a death is seen and counted once.

The actor starts the very command that the local launcher would, with the local launcher, so that logs, exit codes, signals,
threads and the end of the process group are the same on one machine and on a hundred. Our code does not run in the actor itself:
a stage that dies of a signal leaves an actor that can report it.

Invariants:
- What a run begins with is one placement group, placed as a whole or not at all. A process keeps its bundle over its deaths, and
  Ray moves a bundle whose node is lost. Each generator that is added later has a group of its own, which goes with it.
- An actor ends with its owner, the process that called `start`, and its child with it, whose standard input it holds open.
- `wait` returns LOST where actor or node are gone. A node that was merely cut off is met by the channels, which let in one
  incarnation of a name and no older one.
- Data, weights and keys never pass through Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import ray
import ray.util
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from asyncrl.config.load import NODE_ADDRESS
from asyncrl.config.run import ProcessNeeds, RayEnvironment, RayLaunch
from asyncrl.control.launch.processes import LocalLauncher, LocalProcess, ProcessSpec
from asyncrl.control.lifecycle.events import LOST, ProcessPlan
from asyncrl.errors import LaunchError, first_line
from asyncrl.schema.control import ProcessKind

log = logging.getLogger(__name__)

SAY_SO_AFTER_S = 10.0
"""A process that has no place for this long gets a line in the log."""
LOOK_AGAIN_S = 0.25
"""Between questions to an actor that Ray cannot reach and has not yet given up."""
REACH_S = 5.0
"""For a cluster's head to take a connection."""
PROBE_S = 60.0
"""For every node to say whether it sees the run's folder."""
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray's own variable: what a driver among our children takes as its job's runtime environment."""


@dataclass(frozen=True, slots=True)
class Started:
    """What became of a request to start a process."""

    pid: int = 0
    node: str = ""
    refusal: str = ""
    """Why there is no process; empty where there is one."""


class ProcessHost:
    """The actor: holds one child from its start to its end."""

    _process: LocalProcess | None = None

    async def start(self, spec: ProcessSpec, folder: str, run_folder: str, digest: str) -> Started:
        """Start the child with this node's own Python; see `Launcher.start`.

        Args:
            spec: Of the process.
            folder: Its working directory, where the node has it; Ray's runtime environment comes first.
            run_folder: Of the run.
            digest: Of RUN/config.toml. A node that reads another one does not see this run's folder.
        """
        address = ray.util.get_node_ip_address()
        if refusal := why_not_shared(run_folder, digest, address):
            return Started(node=address, refusal=refusal)
        context = ray.get_runtime_context()
        runtime = dict(context.runtime_env)
        if not runtime.get("working_dir"):
            with contextlib.suppress(OSError):
                os.chdir(folder)
        # Without what Ray tells its workers. Only the controller is a driver, and may prove who it is.
        kept = "RAY_AUTH_" if spec.kind == "controller" else "-"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_") or name.startswith(kept)}
        ours = {NODE_ADDRESS: address, "RAY_ADDRESS": context.gcs_address, JOB_CONFIG: json.dumps({"runtime_env": runtime})}
        spec = replace(spec, command=(sys.executable, *spec.command[1:]), env={**spec.env, **ours})
        try:
            self._process = await LocalLauncher(environment).start(spec)
        except LaunchError as error:
            return Started(node=address, refusal=str(error))
        return Started(self._process.pid, address)

    async def wait(self) -> int:
        """Return the child's exit code once it and its group are gone."""
        assert self._process is not None
        return await self._process.wait()

    async def end(self, *, at_once: bool) -> None:
        """Ask the child to end, or end it and its group."""
        if self._process is not None:
            (self._process.kill if at_once else self._process.terminate)()


@dataclass(slots=True)
class RayLauncher:
    """Starts the processes of one run on a cluster; see `Launcher`. Nothing is asked of Ray before the first."""

    launch: RayLaunch
    run_folder: Path
    """On storage that every node sees."""
    needs_for: Callable[[ProcessKind], ProcessNeeds]
    planned: Sequence[ProcessPlan]
    """What the run begins with."""
    _group: PlacementGroup | None = None

    async def start(self, spec: ProcessSpec) -> RayProcess:
        """Start one process wherever there is room, waiting until there is; see `Launcher.start`."""
        number = next((number for number, item in enumerate(self.planned) if item.name == spec.name), None)
        group = self._group if number is not None else None
        if group is None:
            kinds = [spec.kind] if number is None else [item.kind for item in self.planned]
            needs = [self.needs_for(kind) for kind in kinds]
            bundles, labels = [bundle_of(each) for each in needs], [dict(each.labels) for each in needs]
            group = placement_group(bundles, strategy=self.launch.strategy, bundle_label_selector=labels)
        if number is not None:
            self._group = group
        release = partial(remove_placement_group, group) if number is None else None
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number or 0)
        return await _start_in(strategy, spec, self.run_folder, self.needs_for(spec.kind), release)


@dataclass(eq=False)
class RayProcess:
    """A child of an actor somewhere; see `ProcessHandle`."""

    pid: int
    """On its own node."""
    node: str
    _name: str
    _actor: Any
    _release: Callable[[], None]
    _code: int | None = None

    async def wait(self) -> int:
        """Return its exit code, or LOST, once it is gone and its place is free."""
        while self._code is None:
            try:
                code = await asyncio.wrap_future(self._actor.wait.remote().future())
            except ActorUnavailableError:
                await asyncio.sleep(LOOK_AGAIN_S)
                continue
            except RayError as error:
                log.warning("%s on node %s is lost: %s", self._name, self.node, first_line(error))
                code = LOST
            if self._code is None:  # several callers may wait
                self._code = code
                self._release()
        return self._code

    def terminate(self) -> None:
        """Ask it to end; nothing where it is gone."""
        if self._code is None:
            self._actor.end.remote(at_once=False)

    def kill(self) -> None:
        """End it and its group; nothing where it is gone."""
        if self._code is None:
            self._actor.end.remote(at_once=True)


async def open_launcher(
    launch: RayLaunch, run_folder: Path, needs_for: Callable[[ProcessKind], ProcessNeeds], planned: Sequence[ProcessPlan]
) -> RayLauncher:
    """Connect, see that every node sees the run's folder, and return the launcher of the run's stages; arguments as there.

    Raises:
        LaunchError: No cluster answers, or nodes do not see the folder; the message names them.
    """
    await connect(launch.address)
    look, digest = ray.remote(why_not_shared), digest_of(run_folder)
    asked: dict[str, asyncio.Future[str]] = {}
    for node in ray.nodes():
        if node["Alive"]:
            address = node["NodeManagerAddress"]
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asking = look.options(num_cpus=0, max_retries=0, scheduling_strategy=there)
            asked[address] = asyncio.wrap_future(asking.remote(str(run_folder), digest, address).future())
    if blind := await refusals_of(asked, PROBE_S):
        raise LaunchError("; ".join(blind))
    return RayLauncher(launch, run_folder, needs_for, planned)


async def refusals_of(asked: Mapping[str, asyncio.Future[str]], timeout_s: float) -> list[str]:
    """Return why nodes, by address, cannot work for a run; one that has not said so after `timeout_s` is logged and let be."""
    await asyncio.wait(asked.values(), timeout=timeout_s)
    refusals = []
    for address, answer in asked.items():
        error = TimeoutError(f"no answer within {timeout_s:g} s") if answer.cancel() else answer.exception()
        if error is not None:
            log.warning("node %s does not say whether it sees the run's folder: %s", address, first_line(error))
        elif refusal := answer.result():
            refusals.append(refusal)
    return refusals


async def start_beside(launch: RayLaunch, spec: ProcessSpec, run_folder: Path) -> RayProcess:
    """Start a process in an actor on this very node: the controller, whose HTTP API is on loopback, beside the run's owner.

    Raises:
        LaunchError: No cluster answers, or the process could not be started.
    """
    await connect(launch.address, launch.environment)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return await _start_in(here, spec, run_folder, ProcessNeeds(num_cpus=0, num_gpus=0))


def _about_token() -> str:
    """Return what to do for a cluster that asks for a token, if this process has one and does not send it."""
    has_one = Path("~/.ray/auth_token").expanduser().exists() and "RAY_AUTH_MODE" not in os.environ
    return "; if the cluster asks for a token, `export RAY_AUTH_MODE=token` first" if has_one else ""


async def connect(address: str, environment: RayEnvironment | None = None) -> None:
    """Be a driver of the cluster, unless this process is one already.

    Args:
        address: As RayLaunch says.
        environment: Of everything this driver starts; None: as whoever started this process arranged it (JOB_CONFIG).

    Raises:
        LaunchError: No cluster answers.
    """
    if ray.is_initialized():
        return
    asked = {name: value for name, value in msgspec.to_builtins(environment or RayEnvironment()).items() if value}
    try:
        await asyncio.to_thread(_connect, address, asked)
    except (OSError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"no Ray cluster at launch.address {address!r} ({first_line(error)}): run on a node of one "
            f"(`ray start --head`, or `ray job submit`), or give HOST:PORT{_about_token()}"
        ) from error
    # Ray's native code takes these signals for itself, from a thread too; set again they are Python's.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.getsignal(number))


def _connect(address: str, runtime_env: dict[str, Any]) -> None:
    """Connect, which takes a second. Where nobody listens at HOST:PORT raise at once: Ray itself would try for minutes."""
    logging.getLogger("ray._private.worker").setLevel(logging.ERROR)
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), REACH_S).close()
    ray.init(address=address, runtime_env=runtime_env or None, log_to_driver=False, configure_logging=False)


async def _start_in(
    strategy: Any,  # noqa: ANN401 - Ray's
    spec: ProcessSpec,
    run_folder: Path,
    needs: ProcessNeeds,
    release: Callable[[], None] | None = None,
) -> RayProcess:
    """Make an actor and have it start its child; whatever goes wrong leaves neither. `release` gives its place back.

    Raises:
        LaunchError: The actor died, or says why it cannot.
    """
    assert spec.command[0] == sys.executable, f"only Python programs are started on other nodes, not {spec.command[0]}"
    bundle = bundle_of(needs) if needs.num_cpus or needs.num_gpus or needs.resources else {}
    options = {"num_cpus": bundle.pop("CPU", 0), "num_gpus": bundle.pop("GPU", 0), "memory": bundle.pop("memory", None)}
    asked = {**{name: value for name, value in options.items() if value is not None}, "resources": bundle}
    host = ray.remote(ProcessHost).options(scheduling_strategy=strategy, max_restarts=0, max_task_retries=0, **asked)
    actor = host.remote()

    def end() -> None:
        ray.kill(actor)
        if release is not None:
            release()

    with contextlib.ExitStack() as undo:
        undo.callback(end)
        try:
            reference = actor.start.remote(spec, os.getcwd(), str(run_folder), digest_of(run_folder))
            answer: asyncio.Future[Started] = asyncio.wrap_future(reference.future())
            done, _ = await asyncio.wait({answer}, timeout=SAY_SO_AFTER_S)
            if not done:
                wanted = {**bundle_of(needs), **needs.labels}
                free = {kind: amount for kind, amount in ray.available_resources().items() if ":" not in kind}
                log.warning("%s waits for a node with %s; free on the whole cluster: %s", spec.name, wanted, free)
            started = await answer
        except RayError as error:
            raise LaunchError(f"cannot start {spec.name}: {first_line(error)}") from error
        if started.refusal:
            raise LaunchError(f"cannot start {spec.name}: {started.refusal}")
        undo.pop_all()
    log.info("%s is on node %s (pid %d)", spec.name, started.node, started.pid)
    return RayProcess(started.pid, started.node, spec.name, actor, end)


def bundle_of(needs: ProcessNeeds) -> dict[str, float]:
    """Return what Ray reserves for a process; a bundle must hold something, so one that needs nothing takes a sliver of a CPU."""
    named = {"CPU": needs.num_cpus, "GPU": needs.num_gpus or 0.0, "memory": needs.memory_gib * (1 << 30), **needs.resources}
    return {name: amount for name, amount in named.items() if amount} or {"CPU": 0.001}


def digest_of(run_folder: Path) -> str:
    """Return what tells one run's config.toml from another's."""
    return hashlib.blake2b((run_folder / "config.toml").read_bytes(), digest_size=16).hexdigest()


def why_not_shared(run_folder: str, digest: str, address: str) -> str:
    """Return why a node cannot work for a run: it does not see its folder; empty where it does."""
    try:
        seen = digest_of(Path(run_folder))
    except OSError as error:
        seen = str(error.strerror or error)
    if seen == digest:
        return ""
    return (
        f"node {address} does not see the run's folder {run_folder}: launch.kind = 'ray' wants it on storage that every node "
        "mounts under the same path (keys, config, model and checkpoints are there); set `folder` to such a path"
    )
