"""The grid of sweep.toml beside `asyncrl simulate`; writes SIMULATED.md.

Of each seed one run, that of POINT, says what takes how long, and how long its answers were; the other arms are predicted from
it. Where those runs' folders are there, points.json is written from them; without them it is read as it was committed. Figures
leave out the first fifth of the steps, while pipelines fill.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from asyncrl.config.run import RunConfig
from asyncrl.plan.simulator.engine import simulate
from asyncrl.plan.simulator.measured import scenario_of_run
from asyncrl.plan.simulator.scenario import WARM_UP, Scenario, fixed, recorded
from asyncrl.sweep.grid import load_sweep
from asyncrl.sweep.results import Outcome, read_results

HERE = Path(__file__).parent
POINT = "num_workers=1-max_staleness=0"


@dataclass(frozen=True)
class Point:
    """What one run was measured to be: seconds, and tokens of each answer in its order."""

    decode_s: float
    sequence_s: float
    step_s: float
    reward_s: float
    sync_s: float
    swap_s: float
    hop_s: float
    lengths: tuple[int, ...]


def point_of(run_folder: Path) -> Point:
    """Return what a run was."""
    seen = scenario_of_run(run_folder)
    step_s, reward_s, sync_s = (fmean(each.values or each.parameters) for each in (seen.step_s, seen.reward_s, seen.sync_s))
    lengths = tuple(map(round, seen.lengths.values))
    return Point(seen.decode_s, seen.sequence_s, step_s, reward_s, sync_s, seen.swap_s, seen.hop_s, lengths)


def scenario_of(point: Point, config: RunConfig) -> Scenario:
    """Return an arm as it would be with what was measured at the point."""
    return Scenario(
        num_workers=config.generate.num_workers, num_slots=config.generate.engine.slots, num_steps=config.num_steps,
        groups_per_step=config.algorithm.groups_per_step, group_size=config.algorithm.group_size,
        max_staleness=config.buffer.max_staleness, ahead=config.buffer.ahead,
        decode_s=point.decode_s, sequence_s=point.sequence_s,
        lengths=recorded(point.lengths), step_s=fixed(point.step_s), reward_s=fixed(point.reward_s), sync_s=fixed(point.sync_s),
        swap_s=point.swap_s, hop_s=point.hop_s,
    )  # fmt: skip


def main() -> None:
    """Simulate every arm and write the table."""
    sweep, file = load_sweep(HERE), HERE / "points.json"
    folders = {seed: HERE / "cells" / f"{POINT}-seed{seed}" for seed in sorted({cell.seed for cell in sweep.cells})}
    if all(folder.is_dir() for folder in folders.values()):
        measured = {seed: asdict(point_of(folder)) for seed, folder in folders.items()}
        file.write_text(json.dumps(measured) + "\n", encoding="utf-8")
    points = {int(seed): Point(**values) for seed, values in json.loads(file.read_text(encoding="utf-8")).items()}
    results, lines, errors = read_results(sweep.results), list[str](), list[tuple[float, float]]()
    configs = {cell.arm: cell.config for cell in sweep.cells}
    for arm in sweep.plan.arms:
        made = [line.outcome for line in results if line.arm == arm]
        if not made:
            raise SystemExit(f"{sweep.results} has nothing of {arm}: run the sweep first")
        config = configs[arm]
        told = [simulate(scenario_of(point, config)) for point in points.values()]
        steps = fmean(one.steps_per_s for one in told), fmean(map(steps_per_s, made))
        staleness = fmean(one.mean_staleness for one in told), fmean(one.values["staleness/mean"] for one in made)
        errors.append((steps[0] / steps[1] - 1, staleness[0] - staleness[1]))
        lines.append(
            f"| {config.generate.num_workers} | {config.buffer.max_staleness} | {steps[1]:.2f} | {steps[0]:.2f} | "
            f"{errors[-1][0]:+.0%} | {staleness[1]:.2f} | {staleness[0]:.2f} | {errors[-1][1]:+.2f} |"
        )
    worst = max(abs(speed) for speed, _ in errors), max(abs(staleness) for _, staleness in errors)
    names = [name for name in Point.__annotations__ if name != "lengths"]
    times = {name: fmean(getattr(point, name) for point in points.values()) for name in names}
    text = [
        "# Real beside simulated", "",
        "Made by `python experiments/generators/compare.py` from results.jsonl and points.json.", "",
        f"Measured in one run of each seed ({POINT}), means: "
        + ", ".join(f"{name} {1000 * value:.2f} ms" for name, value in times.items()) + ".", "",
        "| generators | max_staleness | steps/s, real | simulated | error | mean staleness, real | simulated | error |",
        "|---|---|---|---|---|---|---|---|", *lines, "",
        f"Largest errors: {worst[0]:.0%} of the steps a second, {worst[1]:.2f} versions of staleness.",
    ]  # fmt: skip
    (HERE / "SIMULATED.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    print("\n".join(text))


def steps_per_s(made: Outcome) -> float:
    """Return the steps a second of a run behind its warm-up."""
    curve = made.curve
    first = int(WARM_UP * len(curve))
    steps = made.steps * (len(curve) - first) / len(curve)
    return steps / (curve[-1][0] - curve[first - 1][0])


if __name__ == "__main__":
    main()
