"""`asyncrl bench ledger`: what the ledger writes to the disk for what it is given, from /proc/self/io.

- `long`: samples of 1,024 tokens, as fast as it takes them. `bytes_written_per_payload` is over the encoded samples.
- `short`: steps of 64 groups of 4 samples of 4 tokens, one every 0.15 s, all of their life: issued, generated, scored, taken,
  trained, forgotten. `mb_written_per_step` is of the later half of the steps.

Log and file both count, and so does what is written twice. `wal_mb` is the longest that the write-ahead log was.
"""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import psutil

from asyncrl.buffer.ledger import records as rec
from asyncrl.buffer.ledger.store import SqliteLedger
from asyncrl.schema.codec import encode
from asyncrl.schema.samples import Prompt, Samples, Score, Scores
from benchmarks.harness import BenchResult, medians, ratio
from benchmarks.samples import random_sample

ROUNDS = 3
NUM_LONG, LONG_TOKENS = 4000, 1024
NUM_STEPS, GROUPS_PER_STEP, GROUP_SIZE, STEP_S = 40, 64, 4, 0.15
GOALS = {"bytes_written_per_payload": 2.0, "mb_written_per_step": 1.0, "wal_mb": 32.0}


def run(rounds: int = 0) -> BenchResult:
    """Measure and return medians; `rounds` 0 means 3."""
    middle = medians([_long() | _short() for _ in range(rounds or ROUNDS)])
    found = middle | {"wal_mb": max(middle["long_wal_mb"], middle["short_wal_mb"])}
    return BenchResult("ledger", middle, {name: ratio(found[name], goal, at_least=False) for name, goal in GOALS.items()})


def _long() -> dict[str, float]:
    sample = random_sample(LONG_TOKENS, 64)
    groups = [
        Samples.of([msgspec.structs.replace(sample, group_id=group_id, index=index) for index in range(8)])
        for group_id in range(NUM_LONG // 8)
    ]
    with TemporaryDirectory(prefix="asyncrl-") as folder, closing(SqliteLedger(Path(folder, "ledger.sqlite"))) as ledger:
        written, started_s = _written_bytes(), time.perf_counter()
        for each in groups:
            ledger.write((rec.IssuedRecord(each.group_id, Prompt(f"p{each.group_id}"), "g", 0, 8, 0.0),))
            ledger.write((rec.SamplesRecord(each, (((0, LONG_TOKENS),),) * 8, 0.0),))
        ledger.sync()
        wall_s, wal_mb = time.perf_counter() - started_s, _wal_mb(ledger)
    return {
        "long_samples_per_s": NUM_LONG / wall_s,
        "bytes_written_per_payload": (_written_bytes() - written) / sum(len(encode(each)) for each in groups),
        "long_wal_mb": wal_mb,
    }


def _short() -> dict[str, float]:
    sample, params = random_sample(4, 8), rec.StepParams(0, 4096, 1.0)
    written, wal_mb, begun_s = 0, 0.0, time.perf_counter()
    with TemporaryDirectory(prefix="asyncrl-") as folder, closing(SqliteLedger(Path(folder, "ledger.sqlite"))) as ledger:
        for step in range(NUM_STEPS):
            written = _written_bytes() if step == NUM_STEPS // 2 else written
            group_ids = tuple(range(step * GROUPS_PER_STEP, (step + 1) * GROUPS_PER_STEP))
            for count, group_id in enumerate(group_ids):
                prompt = Prompt(f"p{group_id}", "1 + 1 =", answer="2")
                ledger.write((rec.IssuedRecord(group_id, prompt, "g", step, GROUP_SIZE, 0.0),))
                members = [msgspec.structs.replace(sample, group_id=group_id, index=index) for index in range(GROUP_SIZE)]
                ledger.write((rec.SamplesRecord(Samples.of(members), (((step, 4),),) * GROUP_SIZE, 0.0),))
                scores = tuple(Score(index, 1.0, {"match": 1.0}) for index in range(GROUP_SIZE))
                ledger.write((rec.ScoresRecord(Scores(group_id, 0, scores, "r"), 0.0),))
                ledger.write((rec.MovedRecord(group_id, "scoring", "", 0.0),))
                ledger.write((rec.MovedRecord(group_id, "ready", "", 0.0),))
                time.sleep(max(0.0, begun_s + STEP_S * (step + (count + 1) / GROUPS_PER_STEP) - time.perf_counter()))
            ledger.write((rec.TakenRecord(step, group_ids, params, 0, 0.0), rec.TrainedRecord(step, group_ids, 0.0)))
            if step % 10 == 9:
                ledger.write((rec.ForgetRecord(step - 5),))
            wal_mb = max(wal_mb, _wal_mb(ledger))
    return {"mb_written_per_step": (_written_bytes() - written) / (NUM_STEPS - NUM_STEPS // 2) / 1e6, "short_wal_mb": wal_mb}


def _written_bytes() -> int:
    return int(psutil.Process().io_counters().write_bytes)


def _wal_mb(ledger: SqliteLedger) -> float:
    return Path(f"{ledger.path}-wal").stat().st_size / 1e6
