"""`asyncrl view`: the daemon's pages for runs where they lie, finished, copied or live. Read-only, on loopback.

It owns no run: it looks at their files, and answers what takes no orders. Its records are in a folder that goes with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl.client import is_live
from asyncrl.clock import SystemClock
from asyncrl.config.load import read_toml
from asyncrl.errors import ConfigError
from asyncrl.observe.steps import read_evals, read_events, read_steps
from asyncrl.schema.status import RunStatus
from asyncrl.serve.daemon import listen
from asyncrl.serve.guard import Guard, new_token
from asyncrl.serve.keeper import Keeper
from asyncrl.serve.queue import Machine
from asyncrl.serve.records import Outcome, Records, RunRecord
from asyncrl.serve.routes import Service

LOOK_S = 1.0
"""Between looks at runs that are live."""


async def view_runs(folders: Sequence[Path], port: int, say: Callable[[str], None]) -> None:
    """Serve the pages of runs until SIGTERM or SIGINT; `say` is told the address, with a token behind `#`, which no log gets.

    Raises:
        ConfigError: Two folders have the same name.
        LaunchError: The port is taken.
    """
    names = [folder.resolve().name for folder in folders]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"runs are told apart by the names of their folders, and two are {', '.join(sorted(twice))}")
    ending, loop, clock = asyncio.Event(), asyncio.get_running_loop(), SystemClock()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, ending.set)
    with tempfile.TemporaryDirectory() as aside, contextlib.closing(Records(Path(aside))) as records:
        records.elsewhere = {name: folder.resolve() for name, folder in zip(names, folders, strict=True)}
        keeper = Keeper(records, Machine(), clock)
        for number, name in enumerate(names):
            _look(keeper, name, number)
        service = Service(records, keeper, Guard(records, {"127.0.0.1"}, clock), clock, read_only=True)
        runner = service.runner()
        await runner.setup()
        try:
            await listen(runner, "127.0.0.1", port)
            token = new_token(records, "you", "operator", clock)
            say(f"http://127.0.0.1:{runner.addresses[0][1]}/#token={token}")
            while not ending.is_set():
                for record in [record for record in records.runs.values() if record.state == "live"]:
                    await asyncio.to_thread(_look, keeper, record.id, record.number)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ending.wait(), LOOK_S)
            service.draining = True
        finally:
            await runner.cleanup()


def _look(keeper: Keeper, name: str, number: int) -> None:
    """Note what a run's files say of it."""
    folder = keeper.records.run_folder(name)
    live = is_live(folder)
    steps, evals, events = read_steps(folder), read_evals(folder), list(read_events(folder))
    last = next((event for event in reversed(events) if event.kind == "phase"), None)
    num_steps, version = read_toml(folder / "config.toml").get("num_steps", 0), steps[-1].version if steps else -1
    failed = last is not None and last.subject == "failed"
    outcome: Outcome = "" if live else "failed" if failed else "done" if version >= num_steps else "stopped"
    record = RunRecord(
        id=name, number=number, state="live" if live else "ended", outcome=outcome, reason=last.text if last else "",
        version=version, num_steps=num_steps, started_s=events[0].time_s if events else 0.0,
        ended_s=events[-1].time_s if events and not live else 0.0,
        accuracy_before=evals[0].accuracy if evals else None, accuracy_after=evals[-1].accuracy if evals else None,
    )  # fmt: skip
    keeper.records.runs[name] = record
    keeper.statuses.pop(name, None)
    if live:
        phase = last.subject if last else "starting"
        keeper.statuses[name] = RunStatus(name=name, run_folder=str(folder), phase=phase, version=version, num_steps=num_steps)
