"""A sweep's results as a Markdown table and as a picture, from results.jsonl alone: no other file is read, no number typed.

Means over seeds with bootstrap intervals of 95 %. Comparisons are paired by seed: the same prompts in the same order, the same
version 0. A cell that never reached the bar counts as the longest of the file, which is less than it would have taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.sweep.grid import Metric
from asyncrl.sweep.results import Outcome, read_results
from asyncrl.sweep.statistics import MOST_EXACT, bootstrap_interval, holm, sign_flip_p

SIGNIFICANT = 0.05
DIGITS = {"seconds_to_bar": 1, "samples_to_bar": 0, "accuracy": 3, "reward": 3}
COLOURS = ("#2868b8", "#3f9b6c", "#d1495b", "#f0b95b", "#7a5195", "#20a4a4", "#6b7280", "#b4338a")
GRID_POINTS = 80

Axes = Any
"""matplotlib's; it carries no types."""


class Results:
    """The lines of a file, by arm in the order of the plan, each arm's by seed."""

    def __init__(self, path: Path) -> None:
        lines = read_results(path)
        if not lines:
            raise ConfigError(f"{path} has no results yet; `asyncrl sweep run` makes them")
        if len({line.code.files for line in lines}) > 1:
            raise ConfigError(f"{path} mixes results of different code: {'; '.join(sorted({str(line.code) for line in lines}))}")
        self.lines, self.plan = lines, lines[-1].plan
        self.arms = {arm: sorted((line for line in lines if line.arm == arm), key=lambda line: line.seed)
                     for arm in self.plan.arms if any(line.arm == arm for line in lines)}  # fmt: skip
        made = [line.outcome for line in lines]
        self._longest = {"seconds_to_bar": max(one.train_s for one in made),
                         "samples_to_bar": float(max(one.samples for one in made))}  # fmt: skip

    def value(self, made: Outcome, metric: Metric) -> float | None:
        """Return a cell's value; None where it has none."""
        value: float | None = getattr(made, metric)
        return self._longest.get(metric) if value is None and (made.steps or metric not in self._longest) else value

    def differences(self, arm: str, metric: Metric) -> list[float]:
        """Return arm minus baseline, for the seeds that both have."""
        of_base = {line.seed: self.value(line.outcome, metric) for line in self.arms.get(self.plan.baseline, [])}
        pairs = [(self.value(line.outcome, metric), of_base.get(line.seed)) for line in self.arms[arm]]
        return [mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None]


class Comparison:
    """An arm against the baseline by one metric."""

    def __init__(self, arm: str, metric: Metric, differences: Sequence[float]) -> None:
        self.arm, self.metric, self.num_pairs = arm, metric, len(differences)
        self.mean = float(np.mean(differences))
        self.interval = bootstrap_interval(differences)
        self.p = sign_flip_p(differences)
        self.family_p = self.p
        """Once all comparisons are known, Holm's."""

    @property
    def verdict(self) -> str:
        """Say what may be claimed."""
        if self.family_p >= SIGNIFICANT:
            return "not told apart"
        return "higher" if self.mean > 0 else "lower"


def compare(results: Results) -> list[Comparison]:
    """Return every arm against the baseline by every metric of the plan, p-values corrected for all of them together."""
    made = [
        Comparison(arm, metric, differences)
        for metric in results.plan.metrics
        for arm in results.arms
        if arm != results.plan.baseline and (differences := results.differences(arm, metric))
    ]
    for comparison, p in zip(made, holm([one.p for one in made]), strict=True):
        comparison.family_p = p
    return made


def write_report(given: Path) -> str:
    """Write RESULTS.md beside a file of results and return it.

    Raises:
        ConfigError: There are no results, or they are of different code.
    """
    path = given / "results.jsonl" if given.is_dir() else given
    text = report_text(path)
    (path.parent / ("RESULTS.md" if path.name == "results.jsonl" else f"{path.stem}.md")).write_text(text, encoding="utf-8")
    return text


def write_picture(given: Path) -> Path:
    """Draw the picture beside a file of results and return its path.

    Raises:
        ConfigError: As `write_report`.
    """
    path = given / "results.jsonl" if given.is_dir() else given
    picture = path.with_suffix(".png")
    draw(path, picture)
    return picture


def report_text(path: Path) -> str:
    """Return the report, Markdown.

    Raises:
        ConfigError: There are no results, or they are of different code.
    """
    results = Results(path)
    plan, lines = results.plan, results.lines
    codes = sorted({f"{line.code.version} {line.code.commit}".strip() for line in lines})
    machines = sorted({line.machine for line in lines})
    dates = sorted(line.ended[:10] for line in lines)
    missing = len(plan.arms) * len(plan.seeds) - len(lines)
    about = [
        f"{len(lines)} cells, {len(plan.seeds)} seeds",
        *([f"**{missing} cells are missing**"] if missing > 0 else []),
        f"code {', '.join(codes)}", *machines, " to ".join(sorted({dates[0], dates[-1]})),
    ]  # fmt: skip
    metrics: list[Metric] = ["accuracy", "reward"]
    heads = {"accuracy": "held-out accuracy", "reward": f"reward, last {plan.window} steps"}
    if plan.bar is not None:
        metrics = ["seconds_to_bar", "samples_to_bar", *metrics]
        heads |= {"seconds_to_bar": f"seconds to {plan.bar:g}", "samples_to_bar": f"samples to {plan.bar:g}"}
    columns = [
        "arm",
        "cells",
        *(heads[metric] for metric in metrics),
        "steps/s",
        "learner idle",
        "generators idle",
        "staleness (max)",
    ]
    text = [f"# {plan.name}", "", "; ".join(about) + ".", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for arm, of_arm in results.arms.items():
        made = [line.outcome for line in of_arm]
        row = [arm, str(len(made)), *(_mean_with_interval(results, made, metric) for metric in metrics)]
        row.append(_mean([one.steps / one.train_s for one in made if one.train_s], ".1f"))
        row += [_mean([getattr(one, name) for one in made], ".0%") for name in ("learner_idle", "generators_idle")]
        oldest = [one.staleness_max for one in made if one.staleness_max is not None]
        row.append(_mean([one.staleness_mean for one in made], ".2f") + (f" ({max(oldest)})" if oldest else ""))
        text.append(f"| {' | '.join(row)} |")
    text += ["", *_notes(results), "", *_comparison_lines(results)]
    return "\n".join([*text, ""])


def _notes(results: Results) -> list[str]:
    """Say how to read the table, and what is unlike others in it."""
    lines, notes = results.lines, ["Mean over seeds [95 % bootstrap interval]."]
    if results.plan.bar is not None:
        notes.append("A cell that did not reach the bar counts as the longest of all cells.")
    for number, what in (
        (sum(bool(line.outcome.fault) for line in lines), "failed"),
        (sum(line.attempts > 1 for line in lines), "were interrupted and resumed; the time between is not counted"),
        (sum(line.jobs > 1 for line in lines), "ran beside others, so their times say little"),
    ):
        notes += [f"{number} cells {what}."] if number else []
    faults = [f"- {line.arm} seed {line.seed} failed: {line.outcome.fault}" for line in lines if line.outcome.fault]
    if len({line.machine for line in lines}) > 1:
        notes.append("Cells ran on different machines: their times are not comparable.")
    return [" ".join(notes), *(["", *faults] if faults else [])]


def _comparison_lines(results: Results) -> list[str]:
    comparisons = compare(results)
    if not comparisons:
        return ["Nothing to compare: no seed has both the baseline and another arm."]
    smallest_p = min(1.0, len(comparisons) * 2.0 ** (1 - min(one.num_pairs for one in comparisons)))
    text = [
        f"Against `{results.plan.baseline}`, paired by seed. p: two-sided, by permutation of signs (exact up to {MOST_EXACT} "
        f"pairs); corrected: by Holm, over these {len(comparisons)}.",
        "",
        "| arm | by | pairs | difference | p | p, corrected | |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in comparisons:
        digits = DIGITS[one.metric]
        low, high = one.interval
        shown = f"{one.mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
        by = one.metric.replace("_", " ")
        text.append(f"| {one.arm} | {by} | {one.num_pairs} | {shown} | {one.p:.4f} | {one.family_p:.4f} | {one.verdict} |")
    if smallest_p >= SIGNIFICANT:
        text += ["", f"With so few seeds no first difference can be told: the smallest corrected p is {smallest_p:.2f}."]
    return text


def _mean(values: Sequence[float | None], style: str) -> str:
    known = [value for value in values if value is not None]
    return f"{np.mean(known):{style}}" if known else "-"


def _mean_with_interval(results: Results, made: Sequence[Outcome], metric: Metric) -> str:
    known = [value for one in made if (value := results.value(one, metric)) is not None]
    if not known:
        return "-"
    (low, high), digits = bootstrap_interval(known), DIGITS[metric]
    unreached = sum(getattr(one, metric) is None for one in made) if metric.endswith("_to_bar") else 0
    return f"{np.mean(known):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]" + (f", {unreached} not" if unreached else "")


def draw(path: Path, picture: Path) -> None:
    """Draw the measured curves over seconds and samples, and seconds to the bar and idle shares by arm.

    Raises:
        ConfigError: As `report_text`.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import, and only a picture needs it

    results = Results(path)
    judged = all(len(line.outcome.evals) > 2 for line in results.lines)
    figure = Figure(figsize=(15, 4.4), layout="constrained")
    over_time, over_samples, by_arm = figure.subplots(1, 3)
    for axes, column, label in ((over_time, 0, "seconds of training"), (over_samples, 1, "samples trained")):
        for number, (arm, lines) in enumerate(results.arms.items()):
            curves = [line.outcome.evals if judged else line.outcome.curve for line in lines]
            _draw_band(axes, [curve for curve in curves if curve], column, COLOURS[number % len(COLOURS)], arm)
        axes.set_xlabel(label)
        axes.set_ylabel("held-out accuracy" if judged else "mean reward")
        axes.grid(alpha=0.3)
        if results.plan.bar is not None and not judged:
            axes.axhline(results.plan.bar, color="#1f2933", lw=1, ls=(0, (4, 3)))
    over_time.legend(frameon=False, fontsize=8)
    labels: list[str] = []
    metric: Metric = "accuracy" if results.plan.bar is None else "seconds_to_bar"
    for place, (arm, lines) in enumerate(results.arms.items()):
        values = [value for line in lines if (value := results.value(line.outcome, metric)) is not None]
        if values:
            low, high = bootstrap_interval(values)
            by_arm.bar(place, np.mean(values), color=COLOURS[place % len(COLOURS)], width=0.6)
            by_arm.plot([place, place], [low, high], color="#1f2933", lw=1.6)
        told = [_mean([getattr(line.outcome, name) for line in lines], ".0%") for name in ("learner_idle", "generators_idle")]
        labels.append(f"{arm}\nidle: {told[0]}, {told[1]}")
    by_arm.set_xticks(range(len(labels)), labels, rotation=20, ha="right", fontsize=8)
    by_arm.set_ylabel("held-out accuracy" if results.plan.bar is None else f"seconds to {results.plan.bar:g}")
    aside = picture.with_name(f".{picture.name}.tmp")
    figure.savefig(aside, dpi=110, format="png", facecolor="white", metadata={"Software": None})
    aside.replace(picture)


def _draw_band(axes: Axes, curves: Sequence[Sequence[tuple[float, int, float]]], column: int, colour: str, label: str) -> None:
    """Draw the mean over seeds with its interval, as far as all seeds go."""
    if not curves:
        return
    points = [np.asarray(curve, dtype=np.float64) for curve in curves]
    grid: NDArray[np.float64] = np.linspace(
        max(one[0, column] for one in points), min(one[-1, column] for one in points), GRID_POINTS
    )
    values_SG = np.stack([np.interp(grid, one[:, column], one[:, 2]) for one in points])
    intervals = np.array([bootstrap_interval(values_S, repeats=1000) for values_S in values_SG.T])
    axes.fill_between(grid, intervals[:, 0], intervals[:, 1], color=colour, alpha=0.2, lw=0)
    axes.plot(grid, values_SG.mean(axis=0), color=colour, lw=1.8, label=f"{label} ({len(points)})")
