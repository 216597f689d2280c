"""Run every method at every lag with every seed, and write results.json, RESULTS.md and the pictures.

`python experiments/off_policy/run.py` is the whole table, under an hour on 2 cores; `--subset` what CI runs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import msgspec
from cell import Cell, Outcome, make_model, run_cell
from methods import METHODS, SUBSET
from report import write_report

HERE = Path(__file__).parent
LAGS = (0, 1, 2, 4, 8, 16)


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subset", action="store_true", help="two methods, lags 0 and 16, one seed")
    parser.add_argument("--methods", default="", help="comma-separated; default: all")
    parser.add_argument("--lags", default=",".join(map(str, LAGS)))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--into", type=Path, default=None, help="a results.json whose runs of other methods and lags stay")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE)
    arguments = parser.parse_args()
    methods = [name for name in arguments.methods.split(",") if name] or list(METHODS)
    lags = [int(lag) for lag in arguments.lags.split(",")]
    seeds = range(arguments.seeds)
    if arguments.subset:
        methods, lags, seeds = list(SUBSET), [0, 16], range(1)
    cells = [Cell(method, lag, seed, arguments.steps) for seed in seeds for lag in lags for method in methods]
    started_s = time.monotonic()
    kept = msgspec.json.decode(arguments.into.read_bytes(), type=list[Outcome]) if arguments.into else []
    kept = [outcome for outcome in kept if outcome.cell not in cells]
    arguments.out.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for outcome in run_cells(cells, arguments.jobs):
        outcomes.append(outcome)
        print(f"{len(outcomes)}/{len(cells)} {_line(outcome)}", flush=True)
        if len(outcomes) == len(cells) or len(outcomes) % len(methods) == 0:
            in_order = sorted([*kept, *outcomes], key=lambda outcome: (outcome.cell.method, outcome.cell.lag, outcome.cell.seed))
            (arguments.out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(in_order), indent=1))
    write_report([*kept, *outcomes], arguments.out, time.monotonic() - started_s)


def run_cells(cells: list[Cell], jobs: int) -> Iterator[Outcome]:
    """Run all cells, `jobs` at a time, each on one thread, and yield them as they end; all start from the same model."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-off-policy-") as name:
        folder = Path(name)
        make_model(folder)
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            futures = [pool.submit(run_cell, cell, METHODS[cell.method], folder) for cell in cells]
            for future in as_completed(futures):
                yield future.result()


def _line(outcome: Outcome) -> str:
    cell, curve = outcome.cell, " ".join(f"{value:.2f}" for value in outcome.accuracy)
    measured = f"kl {outcome.kl_max:.3g} ess {outcome.ess_min:.2f}"
    return f"{cell.method} lag {cell.lag} seed {cell.seed}: {curve} {measured} {outcome.fault} {outcome.seconds:.0f} s"


if __name__ == "__main__":
    main()
