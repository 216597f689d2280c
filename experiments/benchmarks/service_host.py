"""What service.py starts: a daemon that is told of 64 cores, or a run's controller, with all that it writes or without.

`python -m benchmarks.service_host daemon|kept|bare FOLDER`. It imports no more than a daemon does, as its start is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from unittest.mock import patch

from asyncrl.clock import SystemClock
from asyncrl.config.load import load_config
from asyncrl.control.launch.lease import own_by_input
from asyncrl.control.reporter import Reporter
from asyncrl.pipeline import run_controller
from asyncrl.serve.daemon import ServeOptions, serve
from asyncrl.serve.machine import Machine


async def host(kind: str, folder: Path) -> None:
    """Be it until it ends."""
    with contextlib.ExitStack() as patches:
        if kind == "daemon":
            there = Machine(cores=64, memory_bytes=1 << 50)
            patches.enter_context(patch("asyncrl.serve.daemon.machine", return_value=there))
            await serve(ServeOptions(folder, port=0))
            return
        if kind == "bare":
            for method in ("note_second", "note_event"):
                patches.enter_context(patch.object(Reporter, method))
        config = load_config(folder / "config.toml")
        await run_controller(config, folder, SystemClock(), await own_by_input())


if __name__ == "__main__":
    asyncio.run(host(sys.argv[1], Path(sys.argv[2])))
