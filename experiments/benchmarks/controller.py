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
import dataclasses
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from asyncrl.buffer.ledger.reader import LedgerReader
from asyncrl.clock import SystemClock
from asyncrl.config.load import dump_config, load_config
from asyncrl.control.launch.process_main import Ownership
from asyncrl.control.launch.processes import LocalLauncher, LocalProcess, ProcessSpec
from asyncrl.errors import RunError
from asyncrl.packing.pack import pack_step
from asyncrl.pipeline import run_controller
from asyncrl.schema.codec import encode
from asyncrl.schema.samples import Prompt, Sample, ScoredGroup, ScoredSample
from benchmarks.fake_cluster import MEASURED_FROM, MEASURED_TO, PROMPT_TOKENS, RESULT_FILE
from benchmarks.harness import BenchResult, in_process, medians, ratio
from benchmarks.samples import random_sample

WITHOUT_MODELS = Path(__file__).parents[1] / "without_models.toml"
SIZES = (8, 64, 256)
ROUNDS, RECORDED_PAIRS = 2, 4
BARE_TOKENS = (4, 1000)
GOALS = {"cpu_growth": 1.3, "cpu_vs_bare_4": 3.0, "cpu_vs_bare_1000": 1.5, "recorded_cpu": 1.02, "lost": 0.0}
GROUPS_PER_STEP, GROUP_SIZE, TOKENS_PER_ROW = 256, 8, 4096
NUM_TOKENS, BARE_BATCH, MAX_STALENESS, RUN_TIMEOUT_S = 256, 64, 2, 120.0
CPU = "cpu_s_per_1000_samples"


def run(rounds: int = 0) -> BenchResult:
    """Measure every size in turn, `rounds` times."""
    measured = [one_round() for _ in range(rounds or ROUNDS)]
    middle = medians(measured) | {"lost": sum(row["lost"] for row in measured)}
    middle["cpu_growth"] = middle[f"{CPU}_{SIZES[-1]}"] / middle[f"{CPU}_{SIZES[0]}"]
    ratios = {name: ratio(middle.pop(name), goal, at_least=False) for name, goal in GOALS.items()}
    return BenchResult("controller", middle, ratios)


def one_round() -> dict[str, float]:
    """Return the figures of a round."""
    sizes = {size: in_process(measure, size) for size in SIZES}
    row = {f"{name}_{size}": value for size, figures in sizes.items() for name, value in figures.items()}
    for num_tokens in BARE_TOKENS:
        figures, bare = in_process(measure, SIZES[0], num_tokens), [bare_cpu_s(num_tokens) for _ in range(3)]
        cpu_us, bare_us = 1000 * figures[CPU], 1e6 * statistics.mean(bare[1:])
        row |= {f"cpu_us_of_{num_tokens}_tokens": cpu_us, f"bare_cpu_us_of_{num_tokens}_tokens": bare_us}
        row |= {f"cpu_vs_bare_{num_tokens}": cpu_us / bare_us, f"lost_groups_{num_tokens}": figures["lost_groups"]}
    spent = dict.fromkeys(("off", "decisions"), 0.0)
    for record in tuple(spent) * RECORDED_PAIRS:
        spent[record] += in_process(measure, SIZES[0], NUM_TOKENS, record)[CPU]
    row["recorded_cpu"] = spent["decisions"] / spent["off"]
    return row | {"lost": sum(value for name, value in row.items() if name.startswith("lost_groups"))}


def bare_cpu_s(num_tokens: int) -> float:
    """Return the CPU seconds a sample that decoding, one table and packing take."""
    sample, num_samples = random_sample(num_tokens, PROMPT_TOKENS), GROUPS_PER_STEP * GROUP_SIZE
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Sample)
    frames = [
        encoder.encode(msgspec.structs.replace(sample, group_id=number // GROUP_SIZE, index=number % GROUP_SIZE))
        for number in range(num_samples)
    ]
    with (
        tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder,
        contextlib.closing(sqlite3.connect(Path(folder) / "bare.sqlite", isolation_level=None)) as connection,
    ):
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


def measure(num_workers: int, num_tokens: int = NUM_TOKENS, record: str = "off") -> dict[str, float]:
    """Host one run to its end and return its figures; in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        folder = Path(name)
        config = load_config(WITHOUT_MODELS, {
            "num_steps": MEASURED_TO + MAX_STALENESS + 2,  # samples of later steps are still made in the last that is measured
            "generate.num_workers": num_workers, "generate.sampling.max_new_tokens": num_tokens, "reward.num_workers": 1,
            "generate.engine.num_slots": 64, "generate.engine.max_sequence_tokens": 2048,
            "algorithm.groups_per_step": GROUPS_PER_STEP, "algorithm.group_size": GROUP_SIZE,
            "packing.tokens_per_row": TOKENS_PER_ROW, "buffer.max_staleness": MAX_STALENESS, "buffer.ahead": "as_allowed",
            "observe.record": record,
        })  # fmt: skip
        (folder / "config.toml").write_text(dump_config(config), encoding="utf-8")
        owner = Ownership()
        owner.nobody.set()
        running = run_controller(config, folder, SystemClock(), owner, FakeClusterLauncher(folder))
        if not asyncio.run(asyncio.wait_for(running, RUN_TIMEOUT_S)):
            raise RunError(f"the run with {num_workers} generators failed; what it said is on standard error")
        (from_s, from_cpu_s), (to_s, to_cpu_s) = msgspec.json.decode((folder / RESULT_FILE).read_bytes())
        ledger = LedgerReader(folder)
        lost = ledger.issued() - sum(state.groups for state in ledger.counts())
    samples = (MEASURED_TO - MEASURED_FROM) * GROUPS_PER_STEP * GROUP_SIZE
    return {
        "samples_per_s": samples / (to_s - from_s),
        CPU: 1000 * (to_cpu_s - from_cpu_s) / samples,
        "busy_cores": (to_cpu_s - from_cpu_s) / (to_s - from_s),
        "lost_groups": float(lost),
    }


class FakeClusterLauncher:
    """Starts one process, whatever it is asked for: the fake cluster, which is everyone."""

    def __init__(self, run_folder: Path) -> None:
        self._command = (sys.executable, "-m", "benchmarks.fake_cluster", str(run_folder))
        self._cluster: asyncio.Task[LocalProcess] | None = None

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        """Return the cluster, which is started with the first of them."""
        if self._cluster is None:
            cluster = dataclasses.replace(spec, command=self._command, env={"PYTHONPATH": os.pathsep.join(sys.path)})
            self._cluster = asyncio.get_running_loop().create_task(LocalLauncher().start(cluster))
        return await self._cluster
