"""The real controller of a run whose processes are all one crowd; see crowd.py. Wired by pipeline.run_controller like any other.

`python -m asyncrl.bench.controller_host RUN_FOLDER [PROFILE_FILE]`: with a second argument its main thread is profiled. It ends
when its standard input does. Called by bench/controller.py.
"""

from __future__ import annotations

import asyncio
import cProfile
import sys
from pathlib import Path

from asyncrl.clock import SystemClock
from asyncrl.config.load import load_config
from asyncrl.control.launch_local import LocalLauncher, LocalProcess
from asyncrl.control.launcher import ProcessSpec
from asyncrl.control.owner_watch import watch_owner
from asyncrl.observe.log import set_up_logging
from asyncrl.pipeline import run_controller


class CrowdLauncher:
    """Starts one process, whatever it is asked for: the crowd, which is everyone."""

    def __init__(self, run_folder: Path) -> None:
        command = (sys.executable, "-m", "asyncrl.bench.crowd", str(run_folder))
        self._spec = ProcessSpec("crowd", "generator", 1, command, run_folder / "logs" / "crowd.log")
        self._crowd: LocalProcess | None = None
        self._turn = asyncio.Lock()

    async def start(self, spec: ProcessSpec) -> LocalProcess:  # noqa: ARG002 - see Launcher.start
        """Return the crowd, which is started with the first of them."""
        async with self._turn:
            if self._crowd is None:
                self._crowd = await LocalLauncher().start(self._spec)
            return self._crowd


async def host(run_folder: Path) -> bool:
    """Run the controller to the run's end; return whether that was good."""
    config = load_config(run_folder / "config.toml")
    set_up_logging("controller", config.observe.log_level)
    return await run_controller(config, run_folder, SystemClock(), await watch_owner(), CrowdLauncher(run_folder))


def main(run_folder: Path, profile_file: str = "") -> int:
    """Host a controller; return the exit code."""
    if not profile_file:
        return int(not asyncio.run(host(run_folder)))
    with cProfile.Profile() as profile:
        ended_well = asyncio.run(host(run_folder))
    profile.dump_stats(profile_file)
    return int(not ended_well)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
