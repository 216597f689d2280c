"""Be the controller of a run, whose processes of some kinds live elsewhere: `netns_controller.py RUN_FOLDER NAMESPACE KIND...`.

Started inside its own namespace by test_networks.py; all other processes are beside it.
"""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from asyncrl.clock import SystemClock
from asyncrl.config.load import load_config
from asyncrl.control.launch.process_main import own_by_input, set_up_logging
from asyncrl.control.launch.processes import LocalLauncher, LocalProcess, ProcessSpec
from asyncrl.pipeline import run_controller


class AcrossLauncher:
    """Starts processes of these kinds in another namespace, all else here."""

    def __init__(self, namespace: str, *kinds: str) -> None:
        self._local = LocalLauncher()
        self._namespace, self._kinds = namespace, kinds

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        if spec.kind in self._kinds:
            spec = replace(spec, command=("ip", "netns", "exec", self._namespace, *spec.command))
        return await self._local.start(spec)


async def main(run_folder: Path, namespace: str, *kinds: str) -> bool:
    set_up_logging("controller", "INFO")
    config = load_config(run_folder / "config.toml")
    return await run_controller(config, run_folder, SystemClock(), await own_by_input(), AcrossLauncher(namespace, *kinds))


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:])) else 1)
