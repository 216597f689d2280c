"""Run every compared method at both lags with every seed, and write results.jsonl, RESULTS.md and curves.png.

`python experiments/off_policy/run.py` is the whole of it, about 40 minutes on 2 cores. What is in results.jsonl is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import msgspec
from cell import Cell, Outcome, make_model, run_cell, settings_of
from methods import BASELINE, COMPARED, METHODS
from report import write_report

HERE = Path(__file__).parent


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default=",".join(COMPARED), help="comma-separated; all there are: methods.py")
    parser.add_argument("--lags", default="2,8")
    parser.add_argument("--seeds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE)
    arguments = parser.parse_args()
    methods, lags = arguments.methods.split(","), [int(lag) for lag in arguments.lags.split(",")]
    if BASELINE not in methods or not {*methods} <= {*METHODS}:
        parser.error(f"--methods wants {BASELINE!r} and others of methods.py, got {arguments.methods!r}")
    cells = [Cell(method, lag, seed, arguments.steps) for seed in range(arguments.seeds) for lag in lags for method in methods]
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = arguments.out / "results.jsonl"
    outcomes = read(results)
    with results.open("ab") as file:
        for outcome in run_cells([cell for cell in cells if cell not in outcomes], arguments.jobs):
            outcomes[outcome.cell] = outcome
            file.write(msgspec.json.encode(outcome) + b"\n")
            file.flush()
            print(f"{len(outcomes)}/{len(cells)} {_line(outcome)}", flush=True)
    write_report([outcomes[cell] for cell in cells], arguments.out)


def read(results: Path) -> dict[Cell, Outcome]:
    """Return what was run with the settings of now; a line that was cut off is none."""
    outcomes = dict[Cell, Outcome]()
    for line in results.read_bytes().splitlines() if results.exists() else ():
        with contextlib.suppress(msgspec.DecodeError):
            outcome = msgspec.json.decode(line, type=Outcome)
            if outcome.cell.method in METHODS and outcome.settings == settings_of(outcome.cell, METHODS[outcome.cell.method]):
                outcomes[outcome.cell] = outcome
    return outcomes


def run_cells(cells: Sequence[Cell], jobs: int) -> Iterator[Outcome]:
    """Run cells, `jobs` at a time, each on one thread, and yield them as they end; all start from the same model."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-off-policy-") as name:
        folder = Path(name)
        if cells:
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
