"""The grid of sweep.toml beside `asyncrl simulate` of the same numbers; writes SIMULATED.md.

The simulation is given what the config says (tokens, slots, seconds a step) and nothing that was measured. Figures leave out the
first fifth of the steps, while pipelines fill.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from asyncrl.plan.simulator.engine import simulate
from asyncrl.plan.simulator.scenario import WARM_UP, Distribution, Scenario, fixed
from asyncrl.sweep.grid import load_sweep
from asyncrl.sweep.results import Outcome, read_results

HERE = Path(__file__).parent


def main() -> None:
    """Simulate every arm and write the table."""
    sweep = load_sweep(HERE)
    results, lines, errors = read_results(sweep.results), list[str](), list[tuple[float, float]]()
    configs = {cell.arm: cell.config for cell in sweep.cells}
    for arm in sweep.plan.arms:
        made = [line.outcome for line in results if line.arm == arm]
        if not made:
            raise SystemExit(f"{sweep.results} has nothing of {arm}: run the sweep first")
        config, engine = configs[arm], configs[arm].generate.engine
        scenario = Scenario(
            num_workers=config.generate.num_workers, num_slots=engine.num_slots, decode_s=engine.token_latency_s,
            lengths=Distribution("lognormal", (engine.mean_tokens, engine.sigma, config.generate.sampling.max_new_tokens)),
            groups_per_step=config.algorithm.groups_per_step, group_size=config.algorithm.group_size,
            max_staleness=config.buffer.max_staleness, step_s=fixed(config.learner.fake_step_s), num_steps=config.num_steps,
        )  # fmt: skip
        told, real, staleness = (
            simulate(scenario),
            fmean(map(steps_per_s, made)),
            fmean(one.values["staleness/mean"] for one in made),
        )
        errors.append((told.steps_per_s / real - 1, told.mean_staleness - staleness))
        lines.append(
            f"| {config.generate.num_workers} | {config.buffer.max_staleness} | {real:.2f} | {told.steps_per_s:.2f} | "
            f"{errors[-1][0]:+.0%} | {staleness:.2f} | {told.mean_staleness:.2f} | {errors[-1][1]:+.2f} |"
        )
    worst = max(abs(speed) for speed, _ in errors), max(abs(staleness) for _, staleness in errors)
    text = [
        "# Real beside simulated", "", "Made by `python experiments/generators/compare.py` from results.jsonl.", "",
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
