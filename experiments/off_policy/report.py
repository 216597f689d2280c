"""From outcomes to RESULTS.md, heatmap.png and curves.png."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from cell import Outcome
from methods import METHODS, UNCORRECTED

COLLAPSE_SHARE = 0.5
"""A run collapsed where it ended under this share of the accuracy it began with, or on a loss that was not finite."""
LEVEL = 5e-4
"""Methods whose accuracies are not further apart than this stand level: at lag 0 most are one and the same computation."""


def collapsed(outcome: Outcome) -> bool:
    """Say whether a run collapsed."""
    return bool(outcome.fault) or outcome.accuracy[-1] < COLLAPSE_SHARE * outcome.accuracy[0]


def write_report(outcomes: list[Outcome], folder: Path, seconds: float) -> None:
    """Write the table and the pictures."""
    cells: dict[tuple[str, int], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        cells[outcome.cell.method, outcome.cell.lag].append(outcome)
    methods = [name for name in METHODS if any(method == name for method, _ in cells)]
    lags = sorted({lag for _, lag in cells})
    accuracy = np.array([[statistics.mean(run.accuracy[-1] for run in cells[name, lag]) for lag in lags] for name in methods])
    rate = np.array([[statistics.mean(map(collapsed, cells[name, lag])) for lag in lags] for name in methods])
    _draw(methods, lags, accuracy, rate, folder / "heatmap.png")
    (folder / "RESULTS.md").write_text(_table(methods, lags, accuracy, rate, outcomes, seconds), encoding="utf-8")


def _table(
    methods: list[str], lags: list[int], accuracy: np.ndarray, rate: np.ndarray, outcomes: list[Outcome], seconds: float
) -> str:
    first = outcomes[0]
    seeds = len({outcome.cell.seed for outcome in outcomes})
    lines = [
        "# Off-policy: what a lag does to each method",
        "",
        f"`python experiments/off_policy/run.py`: {len(outcomes)} runs of {first.cell.num_steps} steps, {seeds} seeds, "
        f"{seconds / 60:.0f} min. Accuracy (the probability of the right answer) on 512 held-out sums after the last step, mean "
        "over seeds; "
        f"all begin at {statistics.mean(outcome.accuracy[0] for outcome in outcomes):.2f}. In brackets how many of the {seeds} "
        f"collapsed (ended under {COLLAPSE_SHARE:.0%} of where they began, or on a loss that was not finite).",
        "",
        "| method | " + " | ".join(f"lag {lag}" for lag in lags) + " |",
        "|---|" + "---|" * len(lags),
    ]
    for row, name in enumerate(methods):
        figures = []
        for column in range(len(lags)):
            fallen = round(rate[row, column] * seeds)
            figures.append(f"{accuracy[row, column]:.2f}" + (f" ({fallen})" if fallen else ""))
        lines.append(f"| {name}{' *' if name in UNCORRECTED else ''} | " + " | ".join(figures) + " |")
    lines += ["", "\\* without any correction.", "", "![heat map](heatmap.png)", ""]
    return "\n".join([*lines, *_auto_lines(methods, lags, accuracy)])


def _auto_lines(methods: list[str], lags: list[int], accuracy: np.ndarray) -> list[str]:
    if "auto" not in methods or len(methods) == 1:
        return []
    lines = [
        '## `kind = "auto"` against the best and the worst of the others',
        "",
        "| lag | auto | best | worst | auto / best | others ahead, level, behind |",
        "|---|---|---|---|---|---|",
    ]
    auto = methods.index("auto")
    for column, lag in enumerate(lags):
        others = {name: accuracy[row, column] for row, name in enumerate(methods) if row != auto}
        best, worst = max(others, key=others.__getitem__), min(others, key=others.__getitem__)
        share = accuracy[auto, column] / others[best]
        best_cell, worst_cell = f"{others[best]:.2f} ({best})", f"{others[worst]:.2f} ({worst})"
        gaps = [value - accuracy[auto, column] for value in others.values()]
        ahead, behind = sum(gap > LEVEL for gap in gaps), sum(gap < -LEVEL for gap in gaps)
        places = f"{ahead}, {len(gaps) - ahead - behind}, {behind}"
        lines.append(f"| {lag} | {accuracy[auto, column]:.2f} | {best_cell} | {worst_cell} | {share:.2f} | {places} |")
    level_note = (
        f"Level: within {LEVEL:g}. With no lag and one update a step every ratio is 1, so every method with the same aggregation "
        "is the same computation, auto among them."
    )
    return [*lines, "", level_note, ""]


def _draw(methods: list[str], lags: list[int], accuracy: np.ndarray, rate: np.ndarray, path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 0.42 * len(methods) + 1.6), sharey=True, layout="constrained")
    for axis, values, title, colours in (
        (left, accuracy, "final accuracy", "viridis"),
        (right, rate, "share of seeds that collapsed", "Reds"),
    ):
        axis.imshow(values, aspect="auto", cmap=colours, vmin=0, vmax=1)
        axis.set_title(title)
        axis.set_xticks(range(len(lags)), [str(lag) for lag in lags])
        axis.set_xlabel("lag (versions)")
        axis.set_yticks(range(len(methods)), methods)
        for row in range(len(methods)):
            for column in range(len(lags)):
                value = values[row, column]
                dark = (value < 0.6) if axis is left else (value > 0.6)
                axis.text(column, row, f"{value:.2f}", ha="center", va="center", color="white" if dark else "black", fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
