"""A sweep's results as a Markdown table and a picture. All numbers come from results.jsonl; no other file is read.

Means over seeds have 95 % bootstrap intervals. Comparisons are paired by seed: the same prompts in the same order, the same
version 0. A cell that never reached the bar counts as the longest in the file, which underestimates its true time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.folders import replacing
from asyncrl.sweep.grid import RESULTS_FILE, SIGNIFICANT, Metric
from asyncrl.sweep.results import read_results, value_of
from asyncrl.sweep.statistics import MOST_EXACT, bootstrap_interval, holm, sign_flip_p

METRICS: dict[Metric, tuple[str, int]] = {
    "seconds_to_bar": ("seconds to {bar:g}", 1), "samples_to_bar": ("samples to {bar:g}", 0),
    "accuracy": ("held-out accuracy", 3), "reward": ("reward, last {window} steps", 3),
}  # fmt: skip
"""Title and number of decimals."""


def _shown(metric: Metric) -> tuple[str, int]:
    return METRICS.get(metric, (f"`{metric}`", 3))


COLOURS = ("#2868b8", "#3f9b6c", "#d1495b", "#f0b95b", "#7a5195", "#20a4a4", "#6b7280", "#b4338a")
GRID_POINTS = 80


class Results:
    """The lines of a results file: arms in the order of the plan, each arm's cells by seed."""

    def __init__(self, given: Path) -> None:
        self.path = given / RESULTS_FILE if given.is_dir() else given
        self.lines = read_results(self.path)
        if not self.lines:
            raise ConfigError(f"{self.path} has no results yet; `asyncrl sweep run` makes them")
        self.plan, codes = self.lines[-1].plan, {line.code.files for line in self.lines}
        if len(codes) > 1:
            raise ConfigError(f"{self.path} mixes results of different code: {', '.join(sorted(codes))}")
        if len({line.plan.measures for line in self.lines}) > 1:
            raise ConfigError(f"{self.path} mixes results that were measured by different bars, windows or metrics")
        by_seed = sorted(self.lines, key=lambda line: line.seed)
        arms = {arm: [line for line in by_seed if line.arm == arm] for arm in self.plan.arms}
        self.arms = {arm: lines for arm, lines in arms.items() if lines}
        made = [line.outcome for line in self.lines]
        self._longest = {"seconds_to_bar": max(one.train_s for one in made), "samples_to_bar": max(one.samples for one in made)}

    def values(self, arm: str, metric: Metric) -> dict[int, float]:
        """Return an arm's values by seed; seeds without a value are left out."""
        found: dict[int, float] = {}
        for line in self.arms.get(arm, []):
            value = value_of(line.outcome, metric)
            value = self._longest.get(metric) if value is None and line.outcome.steps else value
            found |= {} if value is None else {line.seed: value}
        return found

    def title(self, metric: Metric) -> str:
        """Return the title of a metric."""
        return _shown(metric)[0].format(bar=self.plan.bar, window=self.plan.window)


def write_report(given: Path) -> str:
    """Write the report beside the results, RESULTS.md for results.jsonl, and return it.

    Raises:
        ConfigError: There are no results, or they are of different code, bars, windows or metrics.
    """
    results = Results(given)
    plan, lines = results.plan, results.lines
    codes = sorted({f"{line.code.version} {line.code.commit}".strip() for line in lines})
    machines, dates = sorted({line.machine for line in lines}), sorted(line.ended[:10] for line in lines)
    missing = len(plan.arms) * len(plan.seeds) - len(lines)
    about = [f"{len(lines)} cells, {len(plan.seeds)} seeds", f"code {', '.join(codes)}", *machines]
    about += [dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"]
    about += [f"**{missing} cells are missing**"] if missing > 0 else []
    metrics = [metric for metric in METRICS if plan.bar is not None or not metric.endswith("_to_bar")]
    metrics += [metric for metric in plan.metrics if metric not in METRICS]
    columns = ["arm", "cells", *map(results.title, metrics), "steps/s", "learner idle", "generators idle", "staleness (max)"]
    text = [f"# {plan.name}", "", "; ".join(about) + ".", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for arm, of_arm in results.arms.items():
        made = [line.outcome for line in of_arm]
        row = [arm, str(len(made)), *(_mean_with_interval(results, arm, metric) for metric in metrics)]
        row += [_mean([one.steps / one.train_s for one in made if one.train_s], ".1f")]
        row += [_mean([one.learner_idle for one in made], ".0%"), _mean([one.generators_idle for one in made], ".0%")]
        oldest = max((one.staleness_max for one in made if one.staleness_max is not None), default=None)
        row += [_mean([one.staleness_mean for one in made], ".2f") + ("" if oldest is None else f" ({oldest})")]
        text.append(f"| {' | '.join(row)} |")
    notes = ["Mean over seeds [95 % bootstrap interval]."]
    notes += ["A cell that did not reach the bar counts as the longest of all cells."] if plan.bar is not None else []
    notes += ["Cells ran on different machines: their times are not comparable."] if len(machines) > 1 else []
    for number, what in (
        (sum(line.attempts > 1 for line in lines), "were interrupted and resumed; the time between is not counted"),
        (sum(line.jobs > 1 for line in lines), "ran beside others, so their times say little"),
    ):
        notes += [f"{number} cells {what}."] if number else []
    faults = [f"{line.arm} seed {line.seed} failed: {line.outcome.fault}." for line in lines if line.outcome.fault]
    text += ["", " ".join([*notes, *faults]), "", *_comparison_lines(results), ""]
    name = "RESULTS.md" if results.path.name == RESULTS_FILE else f"{results.path.stem}.md"
    (results.path.parent / name).write_text("\n".join(text), encoding="utf-8")
    return "\n".join(text)


def _comparison_lines(results: Results) -> list[str]:
    """Return the comparison of every arm with the baseline, for every metric of the plan."""
    made: list[tuple[str, Metric, list[float]]] = []
    without = [results.title(each) for each in results.plan.metrics if not any(results.values(arm, each) for arm in results.arms)]
    told = [f"Not compared, as no cell has a value: {', '.join(without)}."] if without else []
    for metric in results.plan.metrics:
        of_base = results.values(results.plan.baseline, metric)
        for arm in results.arms:
            values = results.values(arm, metric)
            differences = [value - of_base[seed] for seed, value in values.items() if seed in of_base]
            made += [(arm, metric, differences)] if differences and arm != results.plan.baseline else []
    if not made:
        return told or ["Nothing to compare: no seed has both the baseline and another arm."]
    p_values = [sign_flip_p(differences) for *_, differences in made]
    text = [
        f"Against `{results.plan.baseline}`, paired by seed. p: two-sided, by permutation of signs (exact up to {MOST_EXACT} "
        f"pairs); corrected: by Holm, over these {len(made)}.",
        "", "| arm | by | pairs | difference | p | p, corrected | |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for (arm, metric, differences), p, family_p in zip(made, p_values, holm(p_values), strict=True):
        (low, high), mean, digits = bootstrap_interval(differences), float(np.mean(differences)), _shown(metric)[1]
        verdict = "not told apart" if family_p >= SIGNIFICANT else "higher" if mean > 0 else "lower"
        shown = f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}] | {p:.4f} | {family_p:.4f}"
        text.append(f"| {arm} | {results.title(metric)} | {len(differences)} | {shown} | {verdict} |")
    smallest_p = min(1.0, len(made) * 2.0 ** (1 - max(len(differences) for *_, differences in made)))
    if smallest_p >= SIGNIFICANT:
        text += ["", f"With so few seeds nothing can be told apart: the smallest corrected p is {smallest_p:.2f}."]
    return [*text, *([""] if told else []), *told]


def _mean(values: Sequence[float | None], style: str) -> str:
    known = [value for value in values if value is not None]
    return f"{np.mean(known):{style}}" if known else "-"


def _mean_with_interval(results: Results, arm: str, metric: Metric) -> str:
    known, digits = list(results.values(arm, metric).values()), _shown(metric)[1]
    if not known:
        return "-"
    low, high = bootstrap_interval(known)
    unreached = sum(getattr(line.outcome, metric) is None for line in results.arms[arm]) if metric.endswith("_to_bar") else 0
    return f"{np.mean(known):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]" + (f", {unreached} not" if unreached else "")


def write_picture(given: Path) -> Path:
    """Write a PNG beside the results: curves over seconds and samples, and for each arm the first metric and idle shares.

    Raises:
        ConfigError: As `write_report`.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import, and only a picture needs it

    results = Results(given)
    judged = all(len(line.outcome.evals) > 2 for line in results.lines)
    figure = Figure(figsize=(15, 4.4), layout="constrained")
    *over, by_arm = figure.subplots(1, 3)
    for column, (axes, label) in enumerate(zip(over, ("seconds of training", "samples trained"), strict=True)):
        for number, (arm, lines) in enumerate(results.arms.items()):
            curves = [line.outcome.evals if judged else line.outcome.curve for line in lines]
            _draw_band(axes, [np.array(curve) for curve in curves if curve], column, COLOURS[number % len(COLOURS)], arm)
        axes.set_xlabel(label)
        axes.set_ylabel("held-out accuracy" if judged else "mean reward")
        axes.grid(alpha=0.3)
        if results.plan.bar is not None and not judged:
            axes.axhline(results.plan.bar, color="#1f2933", lw=1, ls=(0, (4, 3)))
    over[0].legend(frameon=False, fontsize=8)
    labels, metric = [], results.plan.metrics[0]
    for place, (arm, lines) in enumerate(results.arms.items()):
        if values := list(results.values(arm, metric).values()):
            by_arm.bar(place, np.mean(values), color=COLOURS[place % len(COLOURS)], width=0.6)
            by_arm.plot([place, place], bootstrap_interval(values), color="#1f2933", lw=1.6)
        idle = [_mean([getattr(line.outcome, name) for line in lines], ".0%") for name in ("learner_idle", "generators_idle")]
        labels.append(f"{arm}\nidle: {', '.join(idle)}")
    by_arm.set_xticks(range(len(labels)), labels, rotation=20, ha="right", fontsize=8)
    by_arm.set_ylabel(results.title(metric))
    picture = results.path.with_suffix(".png")
    with replacing(picture) as file:
        figure.savefig(file, dpi=110, format="png", facecolor="white", metadata={"Software": None})
    return picture


def _draw_band(axes: Any, curves: Sequence[NDArray[np.float64]], column: int, colour: str, label: str) -> None:  # noqa: ANN401 - matplotlib's
    """Draw the mean over seeds with its interval, up to the end of the shortest seed."""
    if not curves:
        return
    grid = np.linspace(max(one[0, column] for one in curves), min(one[-1, column] for one in curves), GRID_POINTS)
    values_SG = np.stack([np.interp(grid, one[:, column], one[:, 2]) for one in curves])
    low, high = np.array([bootstrap_interval(values_S, repeats=1000) for values_S in values_SG.T]).T
    axes.fill_between(grid, low, high, color=colour, alpha=0.2, lw=0)
    axes.plot(grid, values_SG.mean(axis=0), color=colour, lw=1.8, label=f"{label} ({len(curves)})")
