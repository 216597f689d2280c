"""Processes anywhere on a Ray cluster: one actor each, in placement groups. The one place that talks to Ray, with ray_host.py.

Who does what: Ray knows the nodes, finds the one that has what a process asks for, notices when it is lost, and finds (or, with
its autoscaler, makes) another. Whether and when a process is started again our own lifecycle decides, as on one machine: actors
never restart by themselves, so a death is seen, counted, and answered once.

Invariants:
- What a run begins with is one placement group, placed as a whole or not at all; a process keeps its bundle over its deaths, and
  Ray moves a bundle whose node is lost. Each generator that joins later has a group of its own, which goes when it does.
- An actor ends with its owner, the process that called `start`, and its child with it.
- `wait` returns LOST where actor or node are gone; a node that was merely cut off is met by the channels, which let in one
  incarnation of a name and no older one.
- Data, weights and keys never pass through Ray.

Called by pipeline.py (a run's stages) and by client.py (the controller's own process).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from asyncrl.config.launch import ProcessNeeds, RayEnvironment, RayLaunch
from asyncrl.config.launch_rules import needs_of
from asyncrl.config.run import RunConfig
from asyncrl.control.launcher import ProcessSpec
from asyncrl.control.life_events import ProcessPlan
from asyncrl.control.ray_host import ProcessHost, Started, StartOrder, digest_of, why_not_shared
from asyncrl.errors import LaunchError
from asyncrl.schema.control import ProcessKind

log = logging.getLogger(__name__)

LOST = -9
"""Exit code of a process whose actor or node is gone."""
SAY_SO_AFTER_S = 10.0
"""A process that has no place for this long is worth a line in the log."""
LOOK_AGAIN_S = 0.25
"""Between questions to an actor that Ray cannot reach and has not yet given up."""
REACH_S = 5.0
"""For a cluster's head to take a connection."""
PROBE_S = 60.0
"""For every node to say whether it sees the run's folder."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an actor goes."""

    group: PlacementGroup
    bundle: int
    is_own: bool
    """The group was made for this process and goes with it."""


class RayLauncher:
    """Starts the processes of one run on a cluster; see `Launcher`."""

    def __init__(
        self,
        launch: RayLaunch,
        run_folder: Path,
        needs_for: Callable[[ProcessKind], ProcessNeeds],
        planned: Sequence[ProcessPlan],
    ) -> None:
        """Know what to place; nothing is asked of Ray before `open`.

        Args:
            launch: Of the run's config.
            run_folder: On storage that every node sees.
            needs_for: What a process of a kind asks of its node.
            planned: What the run begins with.
        """
        self._launch = launch
        self._run_folder = run_folder
        self._needs_for = needs_for
        self._bundles = {item.name: number for number, item in enumerate(planned)}
        self._kinds = [item.kind for item in planned]
        self._group: PlacementGroup | None = None

    @classmethod
    def of_run(cls, config: RunConfig, run_folder: Path, planned: Sequence[ProcessPlan]) -> RayLauncher:
        """Return the launcher of a run's stages."""
        assert isinstance(config.launch, RayLaunch)
        return cls(config.launch, run_folder, partial(needs_of, config), planned)

    async def open(self) -> None:
        """Connect, and see that every node sees the run's folder.

        Raises:
            LaunchError: No cluster answers, or nodes do not see the folder; the message names them.
        """
        await connect(self._launch.address)
        await _check_nodes(self._run_folder)

    async def start(self, spec: ProcessSpec) -> RayProcess:
        """Start one process wherever there is room, waiting until there is; see `Launcher.start`."""
        needs = self._needs_for(spec.kind)
        place = self._place(spec, needs)
        strategy = PlacementGroupSchedulingStrategy(place.group, placement_group_bundle_index=place.bundle)
        return await _start_in(strategy, spec, self._run_folder, needs, release=partial(_release, place))

    def _place(self, spec: ProcessSpec, needs: ProcessNeeds) -> _Place:
        number = self._bundles.get(spec.name)
        if number is None:
            return _Place(self._new_group([needs]), 0, is_own=True)
        if self._group is None:
            self._group = self._new_group([self._needs_for(kind) for kind in self._kinds])
        return _Place(self._group, number, is_own=False)

    def _new_group(self, needs: list[ProcessNeeds]) -> PlacementGroup:
        return placement_group(
            [bundle_of(each) for each in needs],
            strategy=self._launch.strategy,
            bundle_label_selector=[dict(each.labels) for each in needs],
        )


class RayProcess:
    """A child of an actor somewhere; see `ProcessHandle`."""

    def __init__(self, name: str, actor: Any, started: Started, release: Callable[[], None]) -> None:  # noqa: ANN401 - Ray's
        self.node = started.node
        """Address of the node it runs on."""
        self._name = name
        self._actor = actor
        self._pid = started.pid
        self._release = release
        self._code: int | None = None

    @property
    def pid(self) -> int:
        """Return its process id on its own node."""
        return self._pid

    async def wait(self) -> int:
        """Return its exit code, or LOST, once it is gone and its place is free."""
        while self._code is None:
            try:
                code = await _answer(self._actor.wait.remote())
            except ActorUnavailableError:
                await asyncio.sleep(LOOK_AGAIN_S)
            except RayError as error:
                log.warning("%s on node %s is lost: %s", self._name, self.node, _first_line(error))
                self._end(LOST)
            else:
                self._end(code)
        return self._code

    def terminate(self) -> None:
        """Ask it to end; nothing where it is gone."""
        if self._code is None:
            self._actor.terminate.remote()

    def kill(self) -> None:
        """End it and its group; nothing where it is gone."""
        if self._code is None:
            self._actor.kill.remote()

    def _end(self, code: int) -> None:
        if self._code is None:
            self._code = code
            self._release()


async def start_beside(launch: RayLaunch, spec: ProcessSpec, run_folder: Path) -> RayProcess:
    """Start a process in an actor on this very node: the controller, beside whoever owns the run.

    Its HTTP API is on loopback, and when the owner's node goes there is nobody left who would start it again.

    Raises:
        LaunchError: No cluster answers, or the process could not be started.
    """
    await connect(launch.address, launch.environment)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return await _start_in(here, spec, run_folder, ProcessNeeds(num_cpus=0, num_gpus=0))


async def connect(address: str, environment: RayEnvironment | None = None) -> None:
    """Be a driver of the cluster, unless this process is one already.

    It takes a second, so a thread does it; Ray takes SIGTERM for itself all the same, and gives it back here.

    Args:
        address: As RayLaunch says.
        environment: Of everything this driver starts; None: as whoever started this process arranged it (ray_host.py).

    Raises:
        LaunchError: No cluster answers.
    """
    if not ray.is_initialized():
        await asyncio.to_thread(_connect, address, environment or RayEnvironment())
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.getsignal(number))


def _connect(address: str, environment: RayEnvironment) -> None:
    asked = {name: value for name, value in msgspec.to_builtins(environment).items() if value}
    logging.getLogger("ray._private.worker").setLevel(logging.ERROR)
    try:
        _reach(address)
        ray.init(address=address, runtime_env=asked or None, log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"no Ray cluster at launch.address {address!r} ({_first_line(error)}): run on a node of one "
            "(`ray start --head`, or `ray job submit`), or give HOST:PORT"
        ) from error


def _reach(address: str) -> None:
    """Raise OSError at once where nobody listens at HOST:PORT: Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), REACH_S).close()


async def _check_nodes(run_folder: Path) -> None:
    """Ask every node, by a task of its own, whether it sees the run's folder.

    Raises:
        LaunchError: Some do not.
    """
    look, digest = ray.remote(why_not_shared), digest_of(run_folder)
    nodes = [(node["NodeID"], node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]]
    asked = [
        look.options(num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(
            str(run_folder), digest, address
        )
        for node_id, address in nodes
    ]
    refusals = []
    for answer, (_, address) in zip(asked, nodes, strict=True):
        try:
            async with asyncio.timeout(PROBE_S):
                refusals.append(await _answer(answer))
        except (RayError, TimeoutError) as error:
            log.warning("node %s does not say whether it sees the run's folder: %s", address, _first_line(error))
    blind = [refusal for refusal in refusals if refusal]
    if blind:
        raise LaunchError("; ".join(blind))


async def _start_in(
    strategy: Any,  # noqa: ANN401 - Ray's
    spec: ProcessSpec,
    run_folder: Path,
    needs: ProcessNeeds,
    release: Callable[[], None] = lambda: None,
) -> RayProcess:
    """Make an actor and have it start its child; whatever goes wrong leaves neither.

    Raises:
        LaunchError: The actor died, or says why it cannot.
    """
    host = ray.remote(ProcessHost).options(scheduling_strategy=strategy, max_restarts=0, max_task_retries=0, **_options_of(needs))
    actor = host.remote()

    def end() -> None:
        ray.kill(actor)
        release()

    try:
        answer = asyncio.wrap_future(actor.start.remote(_order(spec, run_folder)).future())
        started = await _patiently(answer, spec.name, needs)
    except RayError as error:
        end()
        raise LaunchError(f"cannot start {spec.name}: {_first_line(error)}") from error
    except BaseException:
        end()
        raise
    if started.refusal:
        end()
        raise LaunchError(f"cannot start {spec.name}: {started.refusal}")
    log.info("%s is on node %s (pid %d)", spec.name, started.node, started.pid)
    return RayProcess(spec.name, actor, started, end)


async def _patiently(answer: asyncio.Future[Started], name: str, needs: ProcessNeeds) -> Started:
    """Await an actor's first answer; say so where it has no place for long."""
    done, _ = await asyncio.wait({answer}, timeout=SAY_SO_AFTER_S)
    if not done:
        wanted = {**bundle_of(needs), **needs.labels}
        free = {kind: amount for kind, amount in ray.available_resources().items() if ":" not in kind}
        log.warning("%s waits for a node with %s; free on the whole cluster: %s", name, wanted, free)
    return await answer


def _order(spec: ProcessSpec, run_folder: Path) -> StartOrder:
    python, *arguments = spec.command
    assert python == sys.executable, f"only Python programs are started on other nodes, not {python}"
    return StartOrder(
        spec.name, spec.kind, spec.incarnation, tuple(arguments), str(spec.log_path), spec.num_threads, dict(spec.env),
        folder=os.getcwd(), run_folder=str(run_folder), digest=digest_of(run_folder),
    )  # fmt: skip


def bundle_of(needs: ProcessNeeds) -> dict[str, float]:
    """Return what Ray reserves for a process; a bundle must hold something, so one that needs nothing takes a sliver of a CPU."""
    named = {"CPU": needs.num_cpus, "GPU": needs.num_gpus or 0.0, "memory": needs.memory_gib * (1 << 30), **needs.resources}
    return {name: amount for name, amount in named.items() if amount} or {"CPU": 0.001}


def _options_of(needs: ProcessNeeds) -> Mapping[str, Any]:
    """Return the same as options of an actor."""
    bundle = bundle_of(needs) if needs.num_cpus or needs.num_gpus or needs.resources else {}
    ours = {"num_cpus": bundle.pop("CPU", 0), "num_gpus": bundle.pop("GPU", 0), "memory": bundle.pop("memory", None)}
    return {**{name: value for name, value in ours.items() if value is not None}, "resources": bundle}


def _release(place: _Place) -> None:
    if place.is_own:
        remove_placement_group(place.group)


async def _answer(reference: Any) -> Any:  # noqa: ANN401 - Ray's
    return await asyncio.wrap_future(reference.future())


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
