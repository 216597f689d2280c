"""A generator at a quarter of the speed, and one that dies again and again, beside generators that are all alike.

`python experiments/faulty_generators/run.py [--seeds 5]`; a line of results.jsonl a run, RESULTS.md and results.png from all of
them. `--report` makes these two again and runs nothing. Every run has three generators of its own and one that joins: as fast as
they are, four times slower (`slow`), or as fast, while one of the run's own is killed every ten seconds (`dying`). No models: see
../without_models.toml.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import asyncrl
from asyncrl.control.lifecycle.supervisor import read_pids
from asyncrl.observe.steps import read_events
from asyncrl.sweep.statistics import bootstrap_interval

HERE = Path(__file__).parent
ARMS = ("even", "slow", "dying")
NUM_STEPS, SKIPPED = 120, 20
"""The first steps, while the one that joins is not there yet, count for nothing."""
KILL_EVERY_S = 10.0
SLOW_TOKEN_S = 0.016
STEPS_TO_JOIN = 60
"""A run whose fourth generator has not come by then is not measured."""


async def measure(arm: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run once; return what came of it."""
    overrides = {
        "name": f"{arm}-{seed}", "folder": str(folder), "seed": seed, "num_steps": 100_000, "generate.num_workers": 3,
        "placement.most_joining_generators": 1, "supervision.backoff_s": 0.1, "supervision.max_deaths": 1000,
    }  # fmt: skip
    config = asyncrl.load_config(HERE.parent / "without_models.toml", overrides)
    async with asyncrl.Run(config) as run:
        slower = ["--set", f"generate.engine.token_latency_s={SLOW_TOKEN_S}"] if arm == "slow" else []
        command = [sys.executable, "-m", "asyncrl", "join", str(run.run_folder), *slower]
        guest = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            reports = await follow(run, arm)
        finally:
            with contextlib.suppress(ProcessLookupError):
                guest.kill()
            await guest.wait()
        status = await run.status()
    counted = reports[SKIPPED:]
    times = [(event.kind, event.time_s) for event in read_events(run.run_folder) if event.subject == "generator-0"]
    gone = [later - death for (kind, death), (_, later) in itertools.pairwise(times) if kind == "death"]
    return {
        "arm": arm, "seed": seed, "steps_per_s": (len(counted) - 1) / (counted[-1].time_s - counted[0].time_s),
        "staleness": float(np.mean([report.staleness_mean for report in counted])),
        "deaths": sum(process.deaths for process in status.processes),
        "seconds_to_restart": float(np.mean(gone)) if gone else None,
        "failed_groups": status.groups.get("failed", 0),
    }  # fmt: skip


async def measure_all(seed: int) -> list[dict[str, Any]]:
    """Run the arms beside each other: without models one takes a fifth of a core."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-faulty-", ignore_cleanup_errors=True) as folder:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(measure(arm, seed, Path(folder))) for arm in ARMS]
    return [task.result() for task in tasks]


async def follow(run: asyncrl.Run, arm: str) -> list[asyncrl.StepReport]:
    """Return the reports of NUM_STEPS steps behind the one at which the fourth generator was there."""
    reports: list[asyncrl.StepReport] = []
    async with asyncio.TaskGroup() as group:
        killing = group.create_task(kill_again_and_again(run)) if arm == "dying" else None
        is_there = False
        async for report in run.steps():
            if not is_there:
                is_there = (await run.status()).guests["here"] == 1
                if report.step > STEPS_TO_JOIN:
                    raise SystemExit("the fourth generator did not come")
                continue
            reports.append(report)
            if len(reports) == NUM_STEPS:
                break
        if killing is not None:
            killing.cancel()
    return reports


async def kill_again_and_again(run: asyncrl.Run) -> None:
    """Kill generator-0 every KILL_EVERY_S seconds."""
    while True:
        await asyncio.sleep(KILL_EVERY_S)
        with contextlib.suppress(KeyError, ProcessLookupError):
            os.kill(read_pids(run.run_folder)["generator-0"].pid, signal.SIGKILL)


def report(rows: list[dict[str, Any]]) -> str:
    """Return the table."""
    lines = [
        "# Generators that are slow, or die", "",
        f"Made by `python experiments/faulty_generators/run.py`; {len(rows)} runs, means over seeds [95 % interval].", "",
        "| arm | seeds | steps/s | over `even`, same seed | staleness | deaths | wait before a restart, s |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    even = {row["seed"]: row["steps_per_s"] for row in rows if row["arm"] == "even"}
    for arm in ARMS:
        of_arm = [row for row in rows if row["arm"] == arm]
        if not of_arm:
            continue
        shares = [row["steps_per_s"] / even[row["seed"]] for row in of_arm if row["seed"] in even]
        (low, high), again = (
            bootstrap_interval(shares),
            [row["seconds_to_restart"] for row in of_arm if row["seconds_to_restart"]],
        )
        lines.append(
            f"| {arm} | {len(of_arm)} | {np.mean([row['steps_per_s'] for row in of_arm]):.2f} | {np.mean(shares):.2f} "
            f"[{low:.2f}, {high:.2f}] | {np.mean([row['staleness'] for row in of_arm]):.2f} | "
            f"{sum(row['deaths'] for row in of_arm)} | "
            f"{f'{np.mean(again):.1f}' if again else '-'} |"
        )
    lost = sum(row["failed_groups"] for row in rows)
    return "\n".join([*lines, "", f"Groups that failed, over all runs: {lost}."]) + "\n"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the steps a second of every arm: a point a seed, and the mean with its interval."""
    figure = Figure(figsize=(5.5, 2.6), layout="constrained")
    axes = figure.subplots()
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in rows)]
    for place, arm in enumerate(arms):
        values = [row["steps_per_s"] for row in rows if row["arm"] == arm]
        (low, high), mean = bootstrap_interval(values), float(np.mean(values))
        axes.barh(place, mean, 0.6, color=f"C{place}", alpha=0.5)
        axes.errorbar(mean, place - 0.15, xerr=[[mean - low], [high - mean]], color="black", capsize=5, lw=1.5)
        axes.plot(values, np.full(len(values), place + 0.12), "o", color=f"C{place}", mec="black", mew=0.5, ms=4)
    axes.set_yticks(range(len(arms)), arms)
    axes.invert_yaxis()
    axes.set_xlabel("steps a second; a point is a seed, the line is the 95 % interval of the mean", fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    """Run the seeds that are not there whole, and write table and picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--report", action="store_true", help="only write RESULTS.md and results.png from results.jsonl")
    path, told = HERE / "results.jsonl", parser.parse_args()
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    for seed in range(0 if told.report else told.seeds):
        if {row["arm"] for row in rows if row["seed"] == seed} == {*ARMS}:
            continue
        made = asyncio.run(measure_all(seed))
        rows = [row for row in rows if row["seed"] != seed] + made
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(*made, sep="\n", flush=True)
    (HERE / "RESULTS.md").write_text(report(rows), encoding="utf-8")
    draw(rows, HERE / "results.png")
    print(report(rows))


if __name__ == "__main__":
    main()
