"""The service and what a program drives itself; one function a figure. All runs are the quickstart, on a short warm-up.

`session_vs_run`: steps a second as a loop over a `Session`, against a `Run` of the same config, in turns, three pairs a round.
The spread is that of the pairs.

`kept_vs_not`: CPU seconds of all processes of a run for one of its generators', of a run that writes no events, seconds and
samples, over those of one that writes them, in turns; both cores are busy, so this is what is lost in steps a second. Generators
keep nothing: how fast the machine is at the time, which changes by a quarter, cancels out. The spread is that of the pairs.

`read_vs_alone`: a daemon's run while 50 readers hold its stream, each slower than the run, against nobody, in turns of 20 steps
of the same run. Daemon and controller take more CPU seconds with readers. The ratio is 1 minus that, as a share of what daemon
and run take together. All are divided by the CPU seconds of the generators, so that the machine's pace cancels out. Both cores
are busy, so the share is what is lost in steps a second. What the readers themselves take is not counted.
`read_vs_alone_rate` is that of steps with readers over steps without, by the clock. The spread is that of the pairs.

`step_in_stream_s`: from the end of a step to its report at a reader of the daemon; median of 50. `step_on_page_s`: to its
figures on the page, in a Chromium on the same cores, of the same run. `first_chart_s`: from the address of a run of 10,000 steps
to its charts; median of the rounds. `timeline_frame_ms`: from a key to the window drawn, of a timeline of a million
spans. These three are left out where there is no Chromium or no playwright (`make browser`).

`adoption_s`: three live runs, the daemon killed by SIGKILL; from the start of the next one until it has adopted all and is ready,
Python's own start included. The daemon is told that it has 64 cores, so that three runs fit. `lost_or_repeated` counts their
steps that are not in steps.jsonl exactly once.
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
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType

import aiohttp
import psutil

from asyncrl.client import Run
from asyncrl.config.load import dump_config, load_config
from asyncrl.config.run import RunConfig
from asyncrl.control.launch.controller_process import find_controllers
from asyncrl.errors import AsyncRLError
from asyncrl.observe.steps import STEPS_FILE, StepReport, read_lines
from asyncrl.serve.client import Server
from asyncrl.serve.daemon import URL_FILE
from asyncrl.serve.records import TOKEN_FILE
from asyncrl.session import Session
from benchmarks.controller import follow
from benchmarks.harness import BenchResult, Ratio, ratio
from benchmarks.service_page import can_look, first_chart_s, step_on_page_s, timeline_frame_ms, write_long_run, write_many_spans

ROUNDS = 3
NUM_STEPS = 60
SKIPPED_STEPS = 10
"""At the start of a run, while pipelines fill."""
KEPT_STEPS = 110
NUM_READERS = 50
READ_BYTES, READ_PAUSE_S = 4096, 0.5
"""8 kB a second; the run writes 50."""
WINDOW_STEPS, SETTLE_STEPS = 20, 5
PAIRS = 6
"""Of windows, for each round."""
NUM_ADOPTED = 3
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
    for figure in (session_vs_run, kept_vs_not, read_vs_alone, adopted):
        with tempfile.TemporaryDirectory(prefix="asyncrl-bench-", ignore_cleanup_errors=True) as folder:
            try:
                asyncio.run(figure(Path(folder), rounds or ROUNDS, figures, ratios))
            finally:
                for pid in [pid for run_folder in Path(folder, "runs").glob("*") for pid in find_controllers(run_folder)]:
                    os.kill(pid, signal.SIGKILL)  # its processes end with it
    return BenchResult("service", figures, ratios)


async def session_vs_run(folder: Path, rounds: int, figures: dict[str, float], ratios: dict[str, Ratio]) -> None:
    """Measure both sides in turns, the first of which alternates."""
    sides: dict[str, list[float]] = {"run": [], "session": []}
    for number in range(3 * rounds):
        for side in sorted(sides, reverse=number % 2 == 0):
            config = _quickstart(folder, f"{side}-{number}", {"num_steps": KEPT_STEPS})
            sides[side].append(await (_of_run if side == "run" else _of_session)(config))
    figures["run_rate"] = statistics.median(sides["run"])
    _enter("session_vs_run", sides["session"], sides["run"], figures, ratios, 0.9)


async def kept_vs_not(folder: Path, rounds: int, figures: dict[str, float], ratios: dict[str, Ratio]) -> None:
    """Measure both sides in turns, the first of which alternates."""
    sides: dict[str, list[float]] = {"kept": [], "bare": []}
    for number in range(2 * rounds):
        for side in sorted(sides, reverse=number % 2 == 0):
            more = {"num_steps": KEPT_STEPS, "observe.samples": 32 if side == "kept" else 0}
            sides[side].append(1 / await _cpu_for_generators(_quickstart(folder, f"{side}-{number}", more), side))
    _enter("kept_vs_not", sides["kept"], sides["bare"], figures, ratios)


async def read_vs_alone(folder: Path, rounds: int, figures: dict[str, float], ratios: dict[str, Ratio]) -> None:
    """Measure windows of one run with readers and without; and how late steps come where nobody else reads."""
    sides: dict[str, list[float]] = {"alone": [], "read": []}
    serving: dict[str, list[float]] = {"alone": [], "read": []}
    whole, late_s = list[float](), list[float]()
    async with _daemon(folder) as server:
        await server.submit("quickstart", name="read", set=SETTINGS | {"num_steps": LONG})
        await _reach(server, ["read"], SKIPPED_STEPS)
        for number in range(2 * PAIRS * rounds):
            side = "read" if number % 4 in {1, 2} else "alone"
            async with _readers(folder, "read", NUM_READERS if side == "read" else 0):
                times, late, (serves_s, all_s, generators_s) = await _window(server, "read", folder / "runs" / "read")
            sides[side].append(WINDOW_STEPS / (times[-1] - times[0]))
            serving[side].append(serves_s / generators_s)
            if side == "alone":
                late_s += late
                whole.append(all_s / generators_s)
        if can_look():
            figures["step_on_page_s"] = await step_on_page_s(*_address(folder), folder / "runs" / "read")
            write_long_run(folder / "long", _quickstart(folder, "long"))
            figures["first_chart_s"] = await first_chart_s(folder / "long", rounds)
            write_many_spans(folder / "long")
            figures["timeline_frame_ms"] = await timeline_frame_ms(folder / "long", rounds)
            for name, goal in (("step_on_page_s", 1.0), ("first_chart_s", 1.0), ("timeline_frame_ms", 100.0)):
                ratios[name] = ratio(figures[name], goal, at_least=False)
        else:
            print("no playwright, or no Chromium: the page is not measured; `make browser` brings both", file=sys.stderr)
    more = [(read - alone) / statistics.median(whole) for read, alone in zip(serving["read"], serving["alone"], strict=True)]
    _enter("read_vs_alone", [1 - share for share in more], [1.0] * len(more), figures, ratios)
    figures["read_vs_alone_rate"] = statistics.median(
        read / alone for read, alone in zip(sides["read"], sides["alone"], strict=True)
    )
    figures["step_in_stream_s"] = statistics.median(late_s[:50])
    ratios["step_in_stream_s"] = ratio(figures["step_in_stream_s"], 1.0, at_least=False)


def _cpu_s(run_folder: Path) -> tuple[float, float, float]:
    """Return the CPU seconds that daemon and controller, they and all of the run, and its generators have taken."""
    daemon = next(one for one in psutil.Process().children() if "daemon" in one.cmdline())
    controllers = [psutil.Process(pid) for pid in find_controllers(run_folder)]
    workers = [child for one in controllers for child in one.children(recursive=True)]
    serves_s, workers_s, generators_s = (
        sum(sum(one.cpu_times()[:2]) for one in some)
        for some in ([daemon, *controllers], workers, [one for one in workers if "generator" in " ".join(one.cmdline())])
    )
    return serves_s, serves_s + workers_s, generators_s


async def _window(server: Server, name: str, run_folder: Path) -> tuple[list[float], list[float], tuple[float, ...]]:
    """Return when steps of a run were done, from now on but for the first, how late each came, and CPU seconds between them."""
    times, late_s, before = list[float](), list[float](), tuple[float, ...]()
    first = (await server.show(name)).version + SETTLE_STEPS
    async with server.connect(name) as client:
        async for report in client.steps(first):
            times.append(report.time_s)
            late_s.append(time.time() - report.time_s)  # noqa: TID251 - a report's clock is the wall's
            before = before or _cpu_s(run_folder)
            if len(times) > WINDOW_STEPS:
                break
    return times, late_s, tuple(now - then for now, then in zip(_cpu_s(run_folder), before, strict=True))


async def adopted(folder: Path, rounds: int, figures: dict[str, float], ratios: dict[str, Ratio]) -> None:
    """Kill the daemon of live runs, and start the next, over and over; then count the runs' steps."""
    names, took_s = [f"run-{number}" for number in range(NUM_ADOPTED)], list[float]()
    async with _daemon(folder, "kill") as server:
        for name in names:
            await server.submit("quickstart", name=name, set=SETTINGS | {"num_steps": LONG, "algorithm.groups_per_step": 8})
        await _reach(server, names, SKIPPED_STEPS)
    for _ in range(rounds):
        begun_s = time.perf_counter()
        async with _daemon(folder, "kill") as server:
            await _ready(folder)
            took_s.append(time.perf_counter() - begun_s)
            begun = [await server.show(name) for name in names]
            await _reach(server, names, max(record.version for record in begun) + SKIPPED_STEPS)
    wrong = sum(record.attempts for record in begun) - NUM_ADOPTED
    for name in names:
        done = Counter(report.step for report in read_lines(folder / "runs" / name / STEPS_FILE, StepReport))
        wrong += sum(done[step] != 1 for step in range(max(done) + 1))
    figures["adoption_s"] = statistics.median(took_s)
    ratios["adoption_s"] = ratio(max(took_s), 5.0, at_least=False)
    ratios["lost_or_repeated"] = ratio(wrong, 0, at_least=False)


def _enter(
    name: str, side: list[float], other: list[float], figures: dict[str, float], ratios: dict[str, Ratio], goal: float = 0.99
) -> None:
    """Enter the median of the ratios of pairs, and their middle half as the spread."""
    pairs = sorted(one / two for one, two in zip(side, other, strict=True))
    low, middle, high = statistics.quantiles(pairs, n=4, method="inclusive")
    figures |= {f"{name}_quarter_below": low, f"{name}_quarter_above": high, f"{name}_rate": statistics.median(side)}
    ratios[name] = ratio(middle, goal)


def _quickstart(folder: Path, name: str, more: Mapping[str, int] = MappingProxyType({})) -> RunConfig:
    return load_config("quickstart", {**SETTINGS, "name": name, "folder": str(folder), **more})


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


async def _cpu_for_generators(config: RunConfig, kind: str) -> float:
    """Return a run's CPU seconds over its generators'; `bare`: it keeps nothing but its steps. The first steps do not count."""
    run_folder, looks = Path(config.folder, config.name), list[tuple[int, float, float]]()

    async def look(pid: int) -> None:
        while True:
            await asyncio.sleep(0.1)
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
                root = psutil.Process(pid)
                cpu_s = [(process.cpu_times(), " ".join(process.cmdline())) for process in [root, *root.children(recursive=True)]]
                whole_s, generators_s = (
                    sum(times.user + times.system for times, command in cpu_s if part in command) for part in ("", "generator")
                )
                looks.append(((run_folder / STEPS_FILE).read_bytes().count(b"\n"), whole_s, generators_s))

    (run_folder / "logs").mkdir(parents=True)
    (run_folder / "config.toml").write_text(dump_config(config), encoding="utf-8")
    async with _started(kind, run_folder, "end") as process, asyncio.TaskGroup() as group:
        looking = group.create_task(look(process.pid))
        await follow(run_folder, process)
        looking.cancel()
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
    inside = [each for each in looks if SKIPPED_STEPS <= each[0] < config.num_steps]
    return (inside[-1][1] - inside[0][1]) / (inside[-1][2] - inside[0][2])


def _steps_per_s(times: list[float]) -> float:
    return (len(times) - 1 - SKIPPED_STEPS) / (times[-1] - times[SKIPPED_STEPS])


@contextlib.asynccontextmanager
async def _started(kind: str, folder: Path, leave: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start service_host.py; leaving, it is killed, or told to end."""
    command, log = (sys.executable, "-m", "benchmarks.service_host", kind, str(folder)), folder / f"{kind}.log"
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, stdout=file, stderr=file)
    try:
        yield process
    finally:
        if process.returncode is None:
            (process.kill if leave == "kill" else process.terminate)()
        await process.wait()


@contextlib.asynccontextmanager
async def _daemon(folder: Path, leave: str = "end") -> AsyncIterator[Server]:
    """Have a daemon of 64 cores, which leaves its runs alive."""
    (folder / URL_FILE).unlink(missing_ok=True)
    async with _started("daemon", folder, leave) as process:
        while not (folder / URL_FILE).exists():
            if process.returncode is not None:
                raise AsyncRLError((folder / "daemon.log").read_text(errors="replace")[-2000:])
            await asyncio.sleep(0.02)
        async with Server(*_address(folder)) as server:
            yield server


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


async def _reach(server: Server, names: list[str], version: int) -> None:
    """Wait until runs are live and have done so many steps."""
    for name in names:
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
