"""`asyncrl bench controller`: what one sample costs the controller, with 8, 64 and 256 generators.

The controller is the real one, in a process of its own: its own Unix socket, the ledger on disk, admission, scores asked for and
taken in, steps packed and sent. All other processes of the run are one (fake_cluster.py), which takes no time over anything: what
is seen is the controller's own back-pressure. Every size has the same steps; the first are left out while the pipeline fills.

`cpu_growth`: the controller's CPU seconds a sample with the most generators over those with the fewest; medians over rounds in
which all sizes take their turn. Its threads count (the ledger's, the wire's encryption), and so does what it does for versions,
heartbeats and reports.

`cpu_vs_bare_4` and `_1000`: the same figure for samples of 4 and of 1,000 tokens with 8 generators, over that of a bare loop for
the same samples in the same round: decode with msgspec, insert into SQLite in batches, pack. The bare loop has no socket, asks no
reward workers, checks nothing and can repeat nothing. It runs three times in a round, the first to warm up. `rounds` 0 means 2.

`recorded_cpu`: the same figure with `observe.record = "decisions"` over that without, samples of 256 tokens, 8 generators, four
pairs of runs in a round: one pair alone tells no 5 % from noise.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.client import connect
from asyncrl.clock import SystemClock
from asyncrl.config.load import dump_config, load_config, parse_config
from asyncrl.control.launch.controller_process import read_endpoint
from asyncrl.control.launch.process_main import own_by_input, set_up_logging
from asyncrl.control.launch.processes import LocalLauncher, LocalProcess, ProcessSpec
from asyncrl.errors import LaunchError
from asyncrl.packing.tensors import pack_step
from asyncrl.pipeline import run_controller
from asyncrl.schema.codec import encode
from asyncrl.schema.samples import Prompt, Sample, ScoredGroup, ScoredSample
from benchmarks.fake_cluster import MEASURED_TO, PROMPT_TOKENS, RESULT_FILE, Mark
from benchmarks.harness import BenchResult, medians, ratio
from benchmarks.samples import random_sample

SIZES = (8, 64, 256)
ROUNDS = 2
GROWTH_GOAL = 1.3
RECORDED_GOAL, RECORDED_PAIRS = 1.02, 4
NUM_TOKENS = 256
VS_BARE_GOALS = {4: 3.0, 1000: 1.5}
"""By tokens of a sample."""
GROUPS_PER_STEP, GROUP_SIZE, TOKENS_PER_ROW = 256, 8, 4096
BARE_BATCH = 64
MAX_STALENESS = 2
CPU, LOST = "cpu_s_per_1000_samples", "lost_groups"
START_TIMEOUT_S = 30.0
RUN_TIMEOUT_S = 120.0


def run(rounds: int = 0) -> BenchResult:
    """Measure every size in turn, `rounds` times."""
    measured: list[dict[str, float]] = []
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-bench-"))
    try:
        for number in range(rounds or ROUNDS):
            row: dict[str, float] = {}
            for size in SIZES:
                figures = asyncio.run(measure(folder / f"controller-{size}-{number}", size))
                row |= {f"{name}_{size}": value for name, value in figures.items()}
            for num_tokens in VS_BARE_GOALS:
                figures = asyncio.run(measure(folder / f"tokens-{num_tokens}-{number}", SIZES[0], num_tokens))
                bare = [bare_cpu_s(folder / f"bare-{num_tokens}-{number}-{turn}", num_tokens) for turn in range(3)]
                bare_us = 1e6 * sum(bare[1:]) / len(bare[1:])
                row |= {f"cpu_us_of_{num_tokens}_tokens": 1000 * figures[CPU], f"bare_cpu_us_of_{num_tokens}_tokens": bare_us}
                row |= {f"cpu_vs_bare_{num_tokens}": 1000 * figures[CPU] / bare_us, f"lost_groups_{num_tokens}": figures[LOST]}
            spent = dict.fromkeys(("off", "decisions"), 0.0)
            for record in tuple(spent) * RECORDED_PAIRS:
                path = folder / f"record-{record}-{number}"
                spent[record] += asyncio.run(measure(path, SIZES[0], record=record))[CPU]
                shutil.rmtree(path)
            row["recorded_cpu"] = spent["decisions"] / spent["off"]
            measured.append(row)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    middle = medians(measured)
    growth = middle[f"{CPU}_{SIZES[-1]}"] / middle[f"{CPU}_{SIZES[0]}"]
    ratios = {"cpu_growth": ratio(round(growth, 3), GROWTH_GOAL, at_least=False)}
    for num_tokens, goal in VS_BARE_GOALS.items():
        ratios[f"cpu_vs_bare_{num_tokens}"] = ratio(round(middle.pop(f"cpu_vs_bare_{num_tokens}"), 2), goal, at_least=False)
    ratios["recorded_cpu"] = ratio(round(middle.pop("recorded_cpu"), 3), RECORDED_GOAL, at_least=False)
    lost = sum(value for row in measured for name, value in row.items() if name.startswith(LOST))
    ratios["lost"] = ratio(lost, 0, at_least=False)
    return BenchResult("controller", middle, ratios)


def bare_cpu_s(folder: Path, num_tokens: int) -> float:
    """Return the CPU seconds a sample that decoding, one table and packing take."""
    sample = random_sample(num_tokens, PROMPT_TOKENS)
    num_samples = GROUPS_PER_STEP * GROUP_SIZE
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Sample)
    frames = [
        encoder.encode(msgspec.structs.replace(sample, group_id=number // GROUP_SIZE, index=number % GROUP_SIZE))
        for number in range(num_samples)
    ]
    folder.mkdir()
    with contextlib.closing(sqlite3.connect(folder / "bare.sqlite", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = normal")
        connection.execute("CREATE TABLE samples (key INTEGER PRIMARY KEY, reward REAL, body BLOB)")
        begun_s, scored = time.process_time(), []
        for start in range(0, num_samples, BARE_BATCH):
            rows = []
            for frame in frames[start : start + BARE_BATCH]:
                decoded = decoder.decode(frame)
                scored.append(ScoredSample(decoded, float(decoded.index % 2)))
                rows.append((decoded.group_id << 20 | decoded.index, float(decoded.index % 2), frame))
            connection.execute("BEGIN")
            connection.executemany("INSERT INTO samples VALUES (?, ?, ?)", rows)
            connection.execute("COMMIT")
        groups = [
            ScoredGroup(number, Prompt(f"p{number}"), tuple(scored[number * GROUP_SIZE : (number + 1) * GROUP_SIZE]))
            for number in range(GROUPS_PER_STEP)
        ]
        encode(pack_step(0, groups, tokens_per_row=TOKENS_PER_ROW, temperature=1.0))
        return (time.process_time() - begun_s) / num_samples


async def measure(run_folder: Path, num_workers: int, num_tokens: int = NUM_TOKENS, record: str = "off") -> dict[str, float]:
    """Host one run to its end and return its figures.

    Raises:
        LaunchError: The controller did not come up; RunError where its run failed.
    """
    (run_folder / "logs").mkdir(parents=True)
    config = parse_config(_settings(run_folder, num_workers, num_tokens) | {"observe": {"record": record}})
    (run_folder / "config.toml").write_text(dump_config(config), encoding="utf-8")
    command = (sys.executable, "-m", "benchmarks.controller", str(run_folder))
    with (run_folder / "logs" / "controller.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log)
    try:
        async with asyncio.timeout(RUN_TIMEOUT_S):
            lost = await follow(run_folder, process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
    before, after = msgspec.json.decode((run_folder / RESULT_FILE).read_bytes(), type=list[Mark])
    samples = (after.step - before.step) * GROUPS_PER_STEP * GROUP_SIZE
    wall_s, cpu_s = after.wall_s - before.wall_s, after.cpu_s - before.cpu_s
    return {
        "samples_per_s": samples / wall_s,
        CPU: 1000 * cpu_s / samples,
        "busy_cores": cpu_s / wall_s,
        LOST: float(lost),
    }


async def follow(run_folder: Path, process: asyncio.subprocess.Process) -> int:
    """Wait until the run has ended; return how many groups are in no state."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while read_endpoint(run_folder) is None:
            if process.returncode is not None:
                raise LaunchError((run_folder / "logs" / "controller.log").read_text(errors="replace")[-2000:])
            await asyncio.sleep(0.05)
    async with connect(run_folder) as live:
        async for _ in live.steps(first=1 << 60):
            pass
        groups = dict((await live.status()).groups)
    return abs(groups.pop("issued") - sum(groups.values()))


def _settings(run_folder: Path, num_workers: int, num_tokens: int) -> dict[str, Any]:
    return {
        "name": run_folder.name,
        "folder": str(run_folder.parent),
        "num_steps": MEASURED_TO + MAX_STALENESS + 2,  # samples of later steps are still made in the last that is measured
        "generate": {"num_workers": num_workers, "sampling": {"max_new_tokens": num_tokens},
                     "engine": {"kind": "fake", "num_slots": 64, "max_sequence_tokens": 2048}},
        "algorithm": {"groups_per_step": GROUPS_PER_STEP, "group_size": GROUP_SIZE},
        "packing": {"tokens_per_row": TOKENS_PER_ROW},
        "reward": {"num_workers": 1},
        "buffer": {"max_staleness": MAX_STALENESS, "ahead": "as_allowed"},
        "eval": {"at_start": False, "at_end": False},
        "checkpoint": {"every_steps": 0},
    }  # fmt: skip


class FakeClusterLauncher:
    """Starts one process, whatever it is asked for: the fake cluster, which is everyone."""

    def __init__(self, run_folder: Path) -> None:
        command = (sys.executable, "-m", "benchmarks.fake_cluster", str(run_folder))
        self._spec = ProcessSpec("cluster", "generator", 1, command, run_folder / "logs" / "cluster.log")
        self._cluster: LocalProcess | None = None
        self._starting = asyncio.Lock()

    async def start(self, spec: ProcessSpec) -> LocalProcess:  # noqa: ARG002 - see Launcher.start
        """Return the cluster, which is started with the first of them."""
        async with self._starting:
            if self._cluster is None:
                self._cluster = await LocalLauncher().start(self._spec)
            return self._cluster


async def host(run_folder: Path) -> bool:
    """Run the real controller to the run's end, or until standard input ends; return whether the end was good."""
    config = load_config(run_folder / "config.toml")
    set_up_logging("controller", config.observe.log_level)
    return await run_controller(config, run_folder, SystemClock(), await own_by_input(), FakeClusterLauncher(run_folder))


if __name__ == "__main__":
    sys.exit(int(not asyncio.run(host(Path(sys.argv[1])))))
