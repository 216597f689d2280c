"""What runs inside a Ray actor: one process of a run, as a child.

The actor starts the very command that the local launcher would, with the local launcher, so that logs, exit codes, signals,
threads and the sweep of the process group are the same on one machine and on a hundred. Nothing of ours runs in the actor itself:
a stage that dies of a signal, or of memory, leaves an actor that can say so, and Ray's libraries stay out of ours.

Invariants: the child is tied to the actor by its stdin (parent_watch.py), so it ends however the actor ends, and the actor ends
with its owner, Ray sees to that; nothing of the run's data or keys passes through Ray. Made by control/launch_ray.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import ray
import ray.util

from asyncrl.config.load import NODE_ADDRESS
from asyncrl.control.launch_local import LocalLauncher, LocalProcess
from asyncrl.control.launcher import ProcessSpec
from asyncrl.errors import LaunchError
from asyncrl.schema.control import ProcessKind

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray's own variable: what a driver among our children takes as its job's runtime environment."""


@dataclass(frozen=True, slots=True)
class StartOrder:
    """A ProcessSpec on its way to another machine."""

    name: str
    kind: ProcessKind
    incarnation: int
    arguments: tuple[str, ...]
    """The command without the Python that runs it, which is the actor's own."""
    log_path: str
    num_threads: int
    env: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    """Working directory, where the node has it; Ray's runtime environment comes first."""
    run_folder: str = ""
    digest: str = ""
    """Of RUN/config.toml: whoever reads another one does not see this run's folder."""


@dataclass(frozen=True, slots=True)
class Started:
    """What became of a StartOrder."""

    pid: int = 0
    node: str = ""
    """Address."""
    refusal: str = ""
    """Why there is no process; empty where there is one."""


class ProcessHost:
    """The actor: holds one child from its start to its end."""

    def __init__(self) -> None:
        self._process: LocalProcess | None = None

    async def start(self, order: StartOrder) -> Started:
        """Start the child; see `Launcher.start`."""
        address = ray.util.get_node_ip_address()
        refusal = why_not_shared(order.run_folder, order.digest, address)
        if refusal:
            return Started(node=address, refusal=refusal)
        context = ray.get_runtime_context()
        environment = dict(context.runtime_env)
        if not environment.get("working_dir"):
            _go_to(order.folder)
        ours = {
            NODE_ADDRESS: address,
            "RAY_ADDRESS": context.gcs_address,
            JOB_CONFIG: json.dumps({"runtime_env": environment}),
        }
        command = (sys.executable, *order.arguments)
        spec = ProcessSpec(
            order.name, order.kind, order.incarnation, command, Path(order.log_path), order.num_threads, {**order.env, **ours}
        )
        try:
            self._process = await LocalLauncher(_environment(order.kind)).start(spec)
        except LaunchError as error:
            return Started(node=address, refusal=str(error))
        return Started(self._process.pid, address)

    async def wait(self) -> int:
        """Return the child's exit code once it and its group are gone."""
        assert self._process is not None
        return await self._process.wait()

    async def terminate(self) -> None:
        """Ask the child to end."""
        if self._process is not None:
            self._process.terminate()

    async def kill(self) -> None:
        """End the child and its group."""
        if self._process is not None:
            self._process.kill()


def _environment(kind: ProcessKind) -> dict[str, str]:
    """Return the actor's environment without what Ray tells its workers; only the controller, a driver, may prove who it is."""
    kept = "RAY_AUTH_" if kind == "controller" else "-"
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_") or name.startswith(kept)}


def _go_to(folder: str) -> None:
    """Take the owner's working directory where this node has it: configs name files relative to it."""
    with contextlib.suppress(OSError):
        os.chdir(folder)


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
