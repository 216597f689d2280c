"""One run with everything that makes a replay hard, and its replay on all three levels: `python experiments/replay/run.py`.

200 steps of the quickstart under `buffer.policy = "drop"`, with long answers that make groups too old, weights that change while
answers are generated, and two generators. On the way a generator and the learner are killed, and the learning rate and the bound
are changed live. Then `asyncrl replay --samples 100` goes through the
recording: decisions, every version of the weights, drawn samples. At last one recorded event is changed, which has to be named.
Writes RESULTS.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import asyncrl
from asyncrl.control.lifecycle.supervisor import read_pids
from asyncrl.observe.steps import read_events, read_steps

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STEPS, SAMPLES = 200, 100
SETTINGS = [
    f"num_steps={STEPS}", "name=replayed", "observe.record=all", "buffer.policy=drop", "buffer.ahead=as_allowed",
    "buffer.max_staleness=2", "generate.num_workers=2", "generate.engine.num_slots=32", "checkpoint.every_steps=40",
    "eval.at_start=false", "eval.at_end=false", "model.warm_start.until_accuracy=0.2",
]  # fmt: skip
KILLS = {50: "generator-1", 90: "learner"}
CHANGES: dict[int, dict[str, float]] = {120: {"learner.learning_rate": 6e-4}, 150: {"buffer.max_staleness": 1}}


async def disturbed(config: asyncrl.RunConfig) -> Path:
    """Run to the end; kill and change on the way."""
    async with asyncrl.Run(config) as run:
        async for report in run.steps():
            if report.step in KILLS:
                os.kill(pid_of(run.run_folder, KILLS[report.step]), signal.SIGKILL)
            if report.step in CHANGES:
                await run.change(CHANGES[report.step])
        status = await run.wait()
    if status.phase != "stopped":
        raise SystemExit(f"the run ended {status.phase}: {status.reason}")
    return run.run_folder


def pid_of(folder: Path, name: str) -> int:
    """Return the process of a run, as its folder has it."""
    return read_pids(folder)[name].pid


def replay(folder: Path, *arguments: str) -> tuple[int, list[str]]:
    """Return how `asyncrl replay` ended, and what it said."""
    command = [sys.executable, "-m", "asyncrl", "replay", str(folder), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]


def main() -> None:
    """Run, replay, change one event, write RESULTS.md."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-replay-") as scratch:
        config = asyncrl.load_config(ROOT / "configs" / "quickstart.toml", [*SETTINGS, f"folder={scratch}"])
        folder = asyncio.run(disturbed(config))
        events = Counter(event.kind for event in read_events(folder))
        dropped = read_steps(folder)[-1].dropped
        code, said = replay(folder, "--samples", str(SAMPLES))
        copy = Path(scratch) / "changed"
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("checkpoints", "ledger*", "logs"))
        recording = max((copy / "record").glob("decisions-*.bin"), key=lambda path: path.stat().st_size)
        raw = bytearray(recording.read_bytes())
        raw[len(raw) // 2] ^= 1
        recording.write_bytes(raw)
        changed_code, changed_said = replay(copy)
    counted = ", ".join(f"{kind} {events[kind]}" for kind in ("death", "restart", "change", "checkpoint", "swap") if events[kind])
    lines = [
        "# A disturbed run, replayed",
        "",
        f"Made by `python experiments/replay/run.py`, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {platform.machine()}.",
        "",
        f"{STEPS} steps. Events: {counted}. Groups dropped, by reason: {json.dumps(dropped)}.",
        "",
        f"`asyncrl replay RUN --samples {SAMPLES}`, exit status {code}:",
        "",
        *("    " + line.replace(scratch, "RUNS") for line in said),
        "",
        f"One bit of the recording is changed: `asyncrl replay`, exit status {changed_code}:",
        "",
        *("    " + line.replace(scratch, "RUNS") for line in changed_said),
    ]
    (HERE / "RESULTS.md").write_text("\n".join([*lines, ""]), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
