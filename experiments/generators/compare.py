"""The grid of sweep.toml beside `asyncrl simulate`; writes SIMULATED.md.

What takes how long is measured in one run, that of POINT; everything else comes from the config. The other arms are predicted. Where
that run's folder is there, point.json is written from it; without it, point.json is what was committed. Figures leave out the first
fifth of the steps, while pipelines fill.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from asyncrl.plan.simulator.engine import simulate
from asyncrl.plan.simulator.measured import scenario_of_run
from asyncrl.plan.simulator.scenario import WARM_UP, Distribution, Scenario, fixed
from asyncrl.sweep.grid import load_sweep
from asyncrl.sweep.results import Outcome, read_results

HERE = Path(__file__).parent
POINT = "num_workers=1-max_staleness=0-seed0"


@dataclass(frozen=True)
class Times:
    """Seconds, of one run."""

    decode_s: float
    sequence_s: float
    step_s: float
    reward_s: float
    sync_s: float
    swap_s: float
    hop_s: float


def times_of(run_folder: Path) -> Times:
    """Return what one run took for each thing that it did."""
    seen = scenario_of_run(run_folder)
    means = (seen.step_s.mean, seen.reward_s.mean, seen.sync_s.mean)
    return Times(seen.decode_s, seen.sequence_s, *means, seen.swap_s, seen.hop_s)


def main() -> None:
    """Simulate every arm and write the table."""
    sweep, point = load_sweep(HERE), HERE / "point.json"
    if (HERE / "cells" / POINT).is_dir():
        point.write_text(json.dumps(asdict(times_of(HERE / "cells" / POINT)), indent=1) + "\n", encoding="utf-8")
    times = Times(**json.loads(point.read_text(encoding="utf-8")))
    results, lines, errors = read_results(sweep.results), list[str](), list[tuple[float, float]]()
    configs = {cell.arm: cell.config for cell in sweep.cells}
    for arm in sweep.plan.arms:
        made = [line.outcome for line in results if line.arm == arm]
        if not made:
            raise SystemExit(f"{sweep.results} has nothing of {arm}: run the sweep first")
        config, engine = configs[arm], configs[arm].generate.engine
        scenario = Scenario(
            num_workers=config.generate.num_workers, num_slots=engine.num_slots,
            lengths=Distribution("lognormal", (engine.mean_tokens, engine.sigma, config.generate.sampling.max_new_tokens)),
            groups_per_step=config.algorithm.groups_per_step, group_size=config.algorithm.group_size,
            max_staleness=config.buffer.max_staleness, num_steps=config.num_steps, decode_s=times.decode_s,
            sequence_s=times.sequence_s, step_s=fixed(times.step_s), reward_s=fixed(times.reward_s), sync_s=fixed(times.sync_s),
            swap_s=times.swap_s, hop_s=times.hop_s,
        )  # fmt: skip
        told, real = simulate(scenario), fmean(map(steps_per_s, made))
        staleness = fmean(one.values["staleness/mean"] for one in made)
        errors.append((told.steps_per_s / real - 1, told.mean_staleness - staleness))
        lines.append(
            f"| {config.generate.num_workers} | {config.buffer.max_staleness} | {real:.2f} | {told.steps_per_s:.2f} | "
            f"{errors[-1][0]:+.0%} | {staleness:.2f} | {told.mean_staleness:.2f} | {errors[-1][1]:+.2f} |"
        )
    worst = max(abs(speed) for speed, _ in errors), max(abs(staleness) for _, staleness in errors)
    inputs = ", ".join(f"{name} {1000 * value:.2f} ms" for name, value in asdict(times).items())
    text = [
        "# Real beside simulated", "", "Made by `python experiments/generators/compare.py` from results.jsonl and point.json.", "",
        f"Measured in one run ({POINT}): {inputs}.", "",
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
