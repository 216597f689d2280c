"""The service and what a program drives itself; one function a figure. All runs are the quickstart, on a short warm-up.

`session_vs_run`: steps a second as a loop over a `Session`, against a `Run` of the same config, in turns.

`read_vs_alone`: steps a second of a daemon's run while 50 readers hold its stream, each slower than the run, against nobody, in
turns of 20 steps of the same run. The readers are on the same cores, and cost little. The spread is that of the pairs.

`step_in_stream_s`: from the end of a step to its report at a reader of the daemon; median of 50.

`adoption_s`: a live run, the daemon killed by SIGKILL; from the start of the next one until it has adopted the run and is ready,
Python's own start included. `lost_or_repeated` counts its steps that are not in steps.jsonl exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp

from asyncrl.client import Run
from asyncrl.config.load import load_config
from asyncrl.config.run import RunConfig
from asyncrl.control.launch.controller_process import find_controllers
from asyncrl.errors import AsyncRLError
from asyncrl.observe.steps import STEPS_FILE, StepReport, read_lines
from asyncrl.serve.client import Server
from asyncrl.serve.daemon import URL_FILE
from asyncrl.serve.records import TOKEN_FILE
from asyncrl.session import Session
from benchmarks.harness import BenchResult, Ratio, ratio

ROUNDS = 3
NUM_STEPS = 60
SKIPPED_STEPS = 10
"""At the start of a run, while pipelines fill."""
NUM_READERS = 50
READ_BYTES, READ_PAUSE_S = 4096, 0.5
"""8 kB a second; the run writes 50."""
WINDOW_STEPS, SETTLE_STEPS = 20, 5
PAIRS = 6
"""Of windows, for each round."""
LONG = 100_000
"""Steps of a run that is told to end."""
SETTINGS = {
    "num_steps": NUM_STEPS, "checkpoint.every_steps": 0, "learner.learning_rate": 1e-4, "eval.at_start": False,
    "eval.at_end": False, "model.warm_start": {"steps": 60, "batch_size": 64, "learning_rate": 2e-3},
}  # fmt: skip
"""Of the quickstart, but for how long it is: answers of the right length are enough, and nothing is evaluated."""


def run(rounds: int = 0) -> BenchResult:
    """Run the benchmark; `rounds` 0 means 3."""
    figures: dict[str, float] = {}
    ratios: dict[str, Ratio] = {}
    for figure in (session_vs_run, read_vs_alone, adopted):
        with tempfile.TemporaryDirectory(prefix="asyncrl-bench-", ignore_cleanup_errors=True) as folder:
            try:
                asyncio.run(figure(Path(folder), rounds or ROUNDS, figures, ratios))
            finally:
                for pid in [pid for run_folder in Path(folder, "runs").glob("*") for pid in find_controllers(run_folder)]:
                    os.kill(pid, signal.SIGKILL)  # its processes end with it
    return BenchResult("service", figures, ratios)


async def session_vs_run(folder: Path, rounds: int, figures: dict[str, float], ratios: dict[str, Ratio]) -> None:
    """Measure both sides in turns."""
    sides: dict[str, list[float]] = {"run": [], "session": []}
    for number in range(rounds):
        for side, measure in (("run", _of_run), ("session", _of_session)):
            sides[side].append(await measure(_quickstart(folder, f"{side}-{number}")))
    middle = {side: statistics.median(values) for side, values in sides.items()}
    figures |= {f"{side}_steps_per_s": value for side, value in middle.items()}
    ratios["session_vs_run"] = ratio(middle["session"] / middle["run"], 0.9)


async def read_vs_alone(folder: Path, rounds: int, figures: dict[str, float], ratios: dict[str, Ratio]) -> None:
    """Measure windows of one run with readers and without; and how late steps come where nobody else reads."""
    sides: dict[str, list[float]] = {"alone": [], "read": []}
    late_s = list[float]()
    async with _daemon(folder) as server:
        await server.submit("quickstart", name="read", set=SETTINGS | {"num_steps": LONG})
        await _reach(server, "read", SKIPPED_STEPS)
        for number in range(2 * PAIRS * rounds):
            side = "read" if number % 4 in {1, 2} else "alone"
            async with _readers(folder, "read", NUM_READERS if side == "read" else 0):
                times, late = await _window(server, "read")
            sides[side].append(WINDOW_STEPS / (times[-1] - times[0]))
            late_s += late if side == "alone" else []
    pairs = sorted(read / alone for read, alone in zip(sides["read"], sides["alone"], strict=True))
    low, middle, high = statistics.quantiles(pairs, n=4, method="inclusive")
    figures |= {"read_vs_alone_quarter_below": low, "read_vs_alone_quarter_above": high}
    figures["read_vs_alone_steps_per_s"] = statistics.median(sides["read"])
    ratios["read_vs_alone"] = ratio(middle, 0.99)
    figures["step_in_stream_s"] = statistics.median(late_s[:50])
    ratios["step_in_stream_s"] = ratio(figures["step_in_stream_s"], 1.0, at_least=False)


async def _window(server: Server, name: str) -> tuple[list[float], list[float]]:
    """Return when steps of a run were done, from now on but for the first, and how late each came."""
    times, late_s = list[float](), list[float]()
    first = (await server.show(name)).version + SETTLE_STEPS
    async with server.connect(name) as client:
        async for report in client.steps(first):
            times.append(report.time_s)
            late_s.append(time.time() - report.time_s)  # noqa: TID251 - a report's clock is the wall's
            if len(times) > WINDOW_STEPS:
                break
    return times, late_s


async def adopted(folder: Path, rounds: int, figures: dict[str, float], ratios: dict[str, Ratio]) -> None:
    """Kill the daemon of a live run, and start the next, over and over; then count the run's steps."""
    took_s = list[float]()
    async with _daemon(folder, "kill") as server:
        await server.submit("quickstart", name="run", set=SETTINGS | {"num_steps": LONG, "algorithm.groups_per_step": 8})
        await _reach(server, "run", SKIPPED_STEPS)
    for _ in range(rounds):
        begun_s = time.perf_counter()
        async with _daemon(folder, "kill") as server:
            await _ready(folder)
            took_s.append(time.perf_counter() - begun_s)
            begun = await server.show("run")
            await _reach(server, "run", begun.version + SKIPPED_STEPS)
    done = Counter(report.step for report in read_lines(folder / "runs" / "run" / STEPS_FILE, StepReport))
    wrong = begun.attempts - 1 + sum(done[step] != 1 for step in range(max(done) + 1))
    figures["adoption_s"] = statistics.median(took_s)
    ratios["adoption_s"] = ratio(max(took_s), 5.0, at_least=False)
    ratios["lost_or_repeated"] = ratio(wrong, 0, at_least=False)


def _quickstart(folder: Path, name: str) -> RunConfig:
    return load_config("quickstart", {**SETTINGS, "name": name, "folder": str(folder)})


async def _of_run(config: RunConfig) -> float:
    async with Run(config) as live:
        return _steps_per_s([report.time_s async for report in live.steps()])


async def _of_session(config: RunConfig) -> float:
    times = []
    async with Session(config) as session:
        async for groups in session.batches():
            await session.train_step(groups)
            times.append(time.perf_counter())
    return _steps_per_s(times)


def _steps_per_s(times: list[float]) -> float:
    return (len(times) - 1 - SKIPPED_STEPS) / (times[-1] - times[SKIPPED_STEPS])


@contextlib.asynccontextmanager
async def _daemon(folder: Path, leave: str = "end") -> AsyncIterator[Server]:
    """Have a daemon, which leaves its runs alive; leaving, it is killed, or told to end."""
    (folder / URL_FILE).unlink(missing_ok=True)
    command = (sys.executable, "-m", "asyncrl", "serve", "--folder", str(folder), "--port", "0")
    with (folder / "daemon.log").open("ab") as file:
        process = await asyncio.create_subprocess_exec(*command, stdout=file, stderr=file)
    try:
        while not (folder / URL_FILE).exists():
            if process.returncode is not None:
                raise AsyncRLError((folder / "daemon.log").read_text(errors="replace")[-2000:])
            await asyncio.sleep(0.02)
        async with Server(*_address(folder)) as server:
            yield server
    finally:
        if process.returncode is None:
            (process.kill if leave == "kill" else process.terminate)()
        await process.wait()


def _address(folder: Path) -> tuple[str, str]:
    return (folder / URL_FILE).read_text(encoding="utf-8"), (folder / TOKEN_FILE).read_text(encoding="utf-8").strip()


async def _ready(folder: Path) -> None:
    """Wait until the daemon says that it is."""
    async with aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"{_address(folder)[0]}/readyz") as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.02)


async def _reach(server: Server, name: str, version: int) -> None:
    """Wait until a run is live and has done so many steps."""
    while (record := await server.show(name)).state != "live" or record.version < version:
        if record.state == "ended":
            raise AsyncRLError(record.reason)
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def _readers(folder: Path, name: str, number: int) -> AsyncIterator[None]:
    """Have some read a run's stream, from now on, slowly: plain sockets, so that what is measured is the daemon's work."""
    (url, token), offset = _address(folder), (folder / "runs" / name / STEPS_FILE).stat().st_size
    host, _, port = url.removeprefix("http://").partition(":")
    asked = (
        f"GET /v1/runs/{name}/live?offset={offset} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {token}\r\n"
        "Accept: text/event-stream\r\n\r\n"
    )

    async def read(sockets: list[socket.socket]) -> None:
        while True:
            for one in sockets:
                with contextlib.suppress(BlockingIOError):
                    one.recv(READ_BYTES)
            await asyncio.sleep(READ_PAUSE_S)

    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.create_connection((host, int(port)))) for _ in range(number)]
        for one in sockets:
            one.sendall(asked.encode())
            one.setblocking(False)
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(read(sockets))
            yield
            reading.cancel()
