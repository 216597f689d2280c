"""Simulate runs of 2 to 10,000 generators; write RESULTS.md, results.json and scale.png beside this file, or to `--out`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from asyncrl.plan.simulator.engine import simulate
from asyncrl.plan.simulator.scenario import Distribution, Scenario, fixed

HERE = Path(__file__).parent
SLOTS, GROUP_SIZE, NUM_STEPS = 8, 8, 8
SIZES = (2, 10, 100, 1000, 10_000)
LENGTHS = Distribution("lognormal", (512.0, 0.5, 2048.0))
STEP_S, HOP_S, SWAP_S = 4.0, 0.002, 0.2
VERSION_BYTES, UPLINK_BYTES_PER_S, FANOUT, PART_BYTES = 16e9, 12.5e9, 2, 1 << 20
"""8B in bf16 over 100 Gbit/s."""
COLOURS = {"batch grows": "#20639b", "batch grows, learner feeds all": "#dd8452", "batch stays": "#55a868"}


@dataclass(frozen=True)
class Row:
    """One simulated run."""

    series: str
    generators: int
    steps_per_s: float
    samples_per_s: float
    staleness: float
    learner_idle: float
    slots_used: float
    sync_s: float
    events: int
    seconds: float


def sync_s(generators: int, *, relays: bool) -> float:
    """Return from publish to the last generator's bytes: the learner's uplink carries a copy each, or FANOUT with relays."""
    copy_s = VERSION_BYTES / UPLINK_BYTES_PER_S
    if not relays:
        return generators * copy_s
    depth = 0
    while FANOUT * (FANOUT**depth - 1) // (FANOUT - 1) < generators:
        depth += 1
    return min(generators, FANOUT) * copy_s * (1 + max(0, depth - 1) * FANOUT * PART_BYTES / VERSION_BYTES)


def scenario(series: str, generators: int) -> Scenario:
    """Return a run in which a step trains half of what the slots hold, or what those of 100 generators hold."""
    size = 100 if series == "batch stays" else generators
    return Scenario(
        num_workers=generators,
        num_slots=SLOTS,
        lengths=LENGTHS,
        decode_s=0.02,
        groups_per_step=max(1, size * SLOTS // GROUP_SIZE // 2),
        group_size=GROUP_SIZE,
        max_staleness=4,
        ahead="as_allowed",
        step_s=fixed(STEP_S),
        sync_s=fixed(sync_s(generators, relays="feeds all" not in series)),
        swap_s=SWAP_S,
        hop_s=HOP_S,
        num_steps=NUM_STEPS if generators > 1000 else 3 * NUM_STEPS,
    )


def measure(series: str, generators: int) -> Row:
    started_s, asked = time.process_time(), scenario(series, generators)
    made = simulate(asked)
    (weights_s,) = asked.sync_s.parameters
    return Row(
        series, generators, made.steps_per_s, made.samples_per_s, made.mean_staleness, made.learner_idle,
        made.slots_used, weights_s, made.num_events, time.process_time() - started_s,
    )  # fmt: skip


def report(rows: list[Row]) -> str:
    lines = [
        "# Results",
        "",
        "`python experiments/scale/run.py`; simulated, nothing was measured but the simulation's own CPU time.",
        "",
        "| series | generators | steps/s | samples/s | staleness | learner idle | slots used | weights, s | events | CPU, s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(_line, rows), "", "![scale](scale.png)", ""])


def _line(row: Row) -> str:
    return (
        f"| {row.series} | {row.generators:,} | {row.steps_per_s:.3f} | {row.samples_per_s:,.1f} | {row.staleness:.2f} "
        f"| {row.learner_idle:.2f} | {row.slots_used:.2f} | {row.sync_s:,.1f} | {row.events:,} | {row.seconds:.1f} |"
    )


def draw(rows: list[Row], path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for axis, field, title in zip(
        axes, ("samples_per_s", "staleness", "slots_used"), ("samples/s", "mean staleness", "slots used"), strict=True
    ):
        for series, colour in COLOURS.items():
            mine = [row for row in rows if row.series == series]
            axis.plot([row.generators for row in mine], [getattr(row, field) for row in mine], "o-", color=colour, label=series)
        axis.set_xscale("log")
        axis.set_xlabel("generators")
        axis.set_title(title)
        axis.grid(alpha=0.3)
    axes[0].set_yscale("log")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--most", type=int, default=max(SIZES), help="generators")
    options = parser.parse_args()
    sizes = [size for size in SIZES if size <= options.most]
    rows = []
    for series in COLOURS:
        for size in sizes if series == "batch grows" else [size for size in sizes if size <= 1000]:
            rows.append(measure(series, size))
            print(rows[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    (options.out / "RESULTS.md").write_text(report(rows))
    draw(rows, options.out / "scale.png")


if __name__ == "__main__":
    main()
