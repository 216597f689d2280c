"""A run on Ray's own cluster of several nodes on this machine, each with a loopback address of its own: what dies comes back.

One cluster for all tests here. Nodes are killed outright (SIGKILL to the node's Ray processes), the controller by its actor.
"""

import asyncio
import logging
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

import asyncrl
from asyncrl.config.load import parse_config
from asyncrl.config.run import ProcessNeeds, RayLaunch
from asyncrl.control.launch.processes import ProcessSpec, is_live
from asyncrl.control.lifecycle.events import ProcessPlan
from asyncrl.errors import LaunchError, RunLostError
from asyncrl.observe.steps import read_steps
from asyncrl.schema.status import RunStatus
from tests.integration import conftest as kit

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

from asyncrl.control.launch.ray import LOST, RayProcess, open_launcher  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]

ROLE = "asyncrl/role"
NODE = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_timeout_ms": 10_000,
          "health_check_failure_threshold": 3}  # fmt: skip


@dataclass
class Nodes:
    """The cluster, its nodes by address."""

    cluster: Any
    by_address: dict[str, Any] = field(default_factory=dict)
    made: int = 2

    def add(self, role: str) -> str:
        self.made += 1
        address = f"127.0.0.{self.made}"
        self.by_address[address] = self.cluster.add_node(
            node_ip_address=address, labels={ROLE: role}, resources={role: 1}, **NODE
        )
        return address

    def kill(self, address: str) -> None:
        self.cluster.remove_node(self.by_address.pop(address), allow_graceful=False)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A head that scores, one node that generates, one that trains."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    head = NODE | {"node_ip_address": "127.0.0.2", "labels": {ROLE: "rewards"}, "_system_config": HEALTH}
    made = Nodes(Cluster(initialize_head=True, head_node_args=head))
    try:
        made.add("engine")
        made.add("trainer")
        yield made
    finally:
        ray.shutdown()
        made.cluster.shutdown()


@pytest.fixture(autouse=True)
def no_process_left(tmp_path: Path) -> Iterator[None]:
    """Ray's processes live on between these tests; none of the run's may."""
    yield
    kit.assert_gone(kit.processes_of(tmp_path))


# -- the launcher's contract, over Ray -------------------------------------------------------------------------------------


@pytest.fixture
async def start(nodes: Nodes, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    (tmp_path / "config.toml").write_text("")
    needs = ProcessNeeds(labels={ROLE: "engine"})
    launch = RayLaunch(address=nodes.cluster.address)
    launcher = await open_launcher(launch, tmp_path, lambda _: needs, [ProcessPlan("child-0", "generator")])
    started: list[RayProcess] = []

    async def start_one(program: str, name: str = "child-0", incarnation: int = 1) -> RayProcess:
        command = (sys.executable, "-c", program)
        spec = ProcessSpec(name, "generator", incarnation, command, tmp_path / "logs" / f"{name}.log", 2)
        started.append(await launcher.start(spec))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        await process.wait()


SLEEP = "import sys; print('up', flush=True); sys.stdin.read()"


async def test_a_child_of_an_actor_is_like_a_local_one(start: Callable[..., Any], tmp_path: Path) -> None:
    program = "import os, sys; print(os.environ['OMP_NUM_THREADS'], os.environ['ASYNCRL_NODE_ADDRESS']); sys.exit(7)"
    process = await start(program)
    assert await process.wait() == 7
    process.terminate()
    process.kill()
    assert await process.wait() == 7
    assert (tmp_path / "logs" / "child-0.log").read_text().split() == ["2", process.node]
    again = await start(SLEEP, incarnation=2)
    joining = await start(SLEEP, name="child-1")
    again.terminate()
    joining.kill()
    assert [await again.wait(), await joining.wait()] == [-signal.SIGTERM, -signal.SIGKILL]


async def test_a_child_ends_with_its_actor(start: Callable[..., Any]) -> None:
    process = await start("from asyncrl.control.launch.process_main import watch_parent; watch_parent().join()")
    child = psutil.Process(process.pid)
    ray.kill(process._actor)
    assert await process.wait() == LOST
    await asyncio.to_thread(child.wait, 30)


async def test_a_node_that_does_not_see_the_run_folder_is_named(nodes: Nodes, start: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "config.toml").unlink()
    with pytest.raises(FileNotFoundError):
        await start(SLEEP)
    from asyncrl.control.launch.ray import why_not_shared

    refusal = await asyncio.to_thread(ray.get, ray.remote(why_not_shared).remote(str(tmp_path), "other", "127.0.0.9"))
    assert "node 127.0.0.9 does not see the run's folder" in refusal


# -- whole runs --------------------------------------------------------------------------------------------------------------


def on_ray(folder: Path, nodes: Nodes, **overrides: Any) -> dict[str, Any]:
    """A run whose processes go where their labels say; one learner and one generator fill a node of theirs."""
    launch = {"kind": "ray", "address": nodes.cluster.address, "reward": {"labels": {ROLE: "rewards"}}}
    launch |= {
        kind: {"labels": {ROLE: role}, "resources": {role: 1}} for kind, role in (("learner", "trainer"), ("generator", "engine"))
    }
    settings = {"launch": launch, "supervision__stall_timeout_s": 300.0} | kit.NO_EVALUATION | kit.NO_MODELS
    return kit.tiny_settings(folder, **settings | overrides)


def places(run_folder: Path) -> dict[str, str]:
    """Address of the node that each process was last started on."""
    said = (run_folder / "logs" / "controller.log").read_text()
    return dict(re.findall(r"(\S+) is on node (\S+) \(pid", said))


def states(status: RunStatus) -> dict[str, str]:
    return {process.name: process.state for process in status.processes}


async def test_generators_come_and_go_with_their_nodes_and_a_run_whose_controller_is_lost_is_resumed(nodes, tmp_path) -> None:
    """Slow engines: the learner waits, so more generators are wanted than there is room for, until a node joins; none leaves."""
    settings = on_ray(tmp_path, nodes, num_steps=100_000)
    settings["launch"]["elastic"] = {"max_generators": 2, "decide_every_s": 1.5, "patience": 1,
                                     "learner_idle_above": 0.02, "slots_used_below": 0.01}  # fmt: skip
    run = asyncrl.Run(settings)
    with pytest.raises(RunLostError):
        async with run:
            await generators_come_and_go(run, nodes)
    while is_live(run.run_folder):  # its actor is gone, and it ends by itself
        await asyncio.sleep(0.1)
    async with asyncrl.Run(resume=run.run_folder) as resumed:
        from_step = (await resumed.status()).version
        await kit.status_where(resumed, lambda status: status.version > from_step + 4, from_step)
        status = await resumed.drain()
    assert status.phase == "stopped", status.reason
    kit.assert_balanced(status)
    assert len(kit.trained_groups(run.run_folder)) == status.version * 4


async def generators_come_and_go(run: asyncrl.Run, nodes: Nodes) -> None:
    """Until the controller is lost."""
    wanted = await kit.status_where(run, lambda status: "generator-1" in states(status))
    first = places(run.run_folder)
    assert {first["learner"], first["reward-0"], first["generator-0"]} == {"127.0.0.4", "127.0.0.2", "127.0.0.3"}
    assert states(wanted)["generator-1"] == "starting"
    joined = nodes.add("engine")
    status = await kit.status_where(run, lambda status: states(status)["generator-1"] == "ready", wanted.version)
    assert places(run.run_folder)["generator-1"] == joined
    nodes.kill(first["generator-0"])
    status = await kit.status_where(run, lambda status: states(status)["generator-0"] != "ready", status.version)
    lost_at = status.version
    await kit.status_where(run, lambda status: status.version > lost_at + 2, lost_at)
    ray.kill(run._controller._process._actor)
    await kit.status_where(run, lambda status: status.version > lost_at + 1000, lost_at)


async def test_a_guest_joins_and_a_run_that_loses_its_learner_s_node_goes_on_from_its_checkpoint(
    nodes: Nodes, tmp_path: Path, beside: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """By the command line, both: `asyncrl run` is a driver of its own, with the runtime environment of its config."""
    settings = on_ray(tmp_path, nodes, num_steps=100_000, placement={"most_joining_generators": 1})
    settings["launch"]["environment"] = {"env_vars": {"ASYNCRL_TEST_SAYS": "hello"}}
    config = parse_config(settings)
    kit.written(config, tmp_path / "config.toml")
    run_folder = tmp_path / config.name

    owner = beside(*kit.ASYNCRL, "run", tmp_path / "config.toml", "--plain")
    while not read_steps(run_folder):
        assert owner.poll() is None, (tmp_path / "beside-0.log").read_text()
        await asyncio.sleep(0.2)
    for name, pid in kit.recorded_pids(run_folder).items():
        assert psutil.Process(pid).environ().get("ASYNCRL_TEST_SAYS") == "hello", name
    guest = beside(*kit.ASYNCRL, "join", run_folder)
    async with asyncrl.connect(run_folder) as run:
        first = (await run.status()).version
        status = await kit.status_where(run, lambda status: kit.samples_by(run_folder, "joined-%") >= 16, first)
        assert (status.guests["came"], status.guests["here"]) == (1, 1)
        lost = places(run_folder)["learner"]
        nodes.kill(lost)
        nodes.add("trainer")
        status = await kit.status_where(run, lambda status: places(run_folder)["learner"] != lost, status.version)
        await kit.status_where(run, lambda later: later.version > status.version + 4, status.version)
        status = await run.drain()
    assert status.phase == "stopped", status.reason
    assert (owner.wait(60), guest.wait(60)) == (3, 0), "it was drained before its last step"
    kit.assert_balanced(status)
    assert len(kit.trained_groups(run_folder)) == status.version * 4


async def test_no_cluster_is_said_with_what_to_do(tmp_path: Path) -> None:
    ray.shutdown()
    settings = kit.tiny_settings(tmp_path, launch={"kind": "ray", "address": "127.0.0.9:1"})
    with pytest.raises(LaunchError, match="ray start --head"):
        async with asyncrl.Run(settings):
            pass
