"""From outcomes to RESULTS.md and curves.png; no number is typed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from cell import EVALUATE_EVERY, Outcome
from methods import BASELINE

from asyncrl.sweep.statistics import Comparison, bootstrap_interval, compare

COLLAPSE_SHARE = 0.5
"""A run collapsed where it ended under this share of the accuracy it began with, or on a loss that was not finite."""
SIGNIFICANT = 0.05
HEAD = "| method | accuracy [95 %] | collapsed | against {baseline} | p | p, corrected | | largest mean KL | smallest ESS |"


def collapsed(outcome: Outcome) -> bool:
    """Say whether a run collapsed."""
    return bool(outcome.fault) or outcome.accuracy[-1] < COLLAPSE_SHARE * outcome.accuracy[0]


def write_report(outcomes: Sequence[Outcome], folder: Path) -> None:
    """Write the tables and the picture."""
    lags = sorted({outcome.cell.lag for outcome in outcomes})
    by_lag = {lag: _by_method([outcome for outcome in outcomes if outcome.cell.lag == lag]) for lag in lags}
    seeds, first = len({outcome.cell.seed for outcome in outcomes}), outcomes[0]
    made = [sorted({getattr(outcome, name) for outcome in outcomes}) for name in ("code", "machine", "date")]
    lines = [
        "# Off-policy: what a lag does to each method",
        "",
        f"{len(outcomes)} runs of {first.cell.num_steps} steps, {seeds} seeds; code "
        f"{'; '.join(' and '.join(one) for one in made)}; `python experiments/off_policy/run.py`.",
        "",
        "Accuracy: the probability of the right answer on 512 held-out sums after the last step; mean over seeds [95 % bootstrap "
        f"interval]. All runs begin at {first.accuracy[0]:.2f}. Collapsed: ended under {COLLAPSE_SHARE:.0%} of that, or on a "
        "loss that is not finite; such a run keeps its last accuracy. Differences are paired by seed; p: exact, by permutation "
        "of signs; corrected: by Holm, over the methods of one lag. Largest mean KL(behaviour || learner) and smallest ESS of a "
        "step: medians over seeds.",
        "",
        "![Curves](curves.png)",
        "",
    ]
    for lag, methods in by_lag.items():
        compared = compare({name: {one.cell.seed: one.accuracy[-1] for one in runs} for name, runs in methods.items()}, BASELINE)
        lines += [f"## Lag {lag}", "", HEAD.format(baseline=f"`{BASELINE}`"), "|---" * 9 + "|"]
        lines += [_row(one, methods[one.arm]) for one in sorted(compared, key=lambda one: -one.mean)]
        lines.append("")
    (folder / "RESULTS.md").write_text("\n".join(lines), encoding="utf-8")
    _draw(by_lag, folder / "curves.png")


def _by_method(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    names = dict.fromkeys(outcome.cell.method for outcome in outcomes)
    return {name: [outcome for outcome in outcomes if outcome.cell.method == name] for name in names}


def _row(one: Comparison, runs: Sequence[Outcome]) -> str:
    low, high = one.interval
    fallen = sum(map(collapsed, runs))
    figures = f"{one.mean:.3f} [{low:.3f}, {high:.3f}] | {fallen or ''}"
    far = f"{np.median([run.kl_max for run in runs]):.2g} | {np.median([run.ess_min for run in runs]):.2g}"
    if not one.pairs:
        return f"| {one.arm} | {figures} | | | | | {far} |"
    verdict = ("higher" if one.difference > 0 else "lower") if one.family_p < SIGNIFICANT else "not told apart"
    return f"| {one.arm} | {figures} | {one.difference:+.3f} | {one.p:.4f} | {one.family_p:.4f} | {verdict} | {far} |"


def _draw(by_lag: dict[int, dict[str, list[Outcome]]], path: Path) -> None:
    figure, axes = plt.subplots(
        1, len(by_lag), figsize=(6.5 * len(by_lag), 4.6), sharey=True, layout="constrained", squeeze=False
    )
    for axis, (lag, methods) in zip(axes[0], by_lag.items(), strict=True):
        for number, (name, runs) in enumerate(methods.items()):
            length = max(len(run.accuracy) for run in runs)
            curves = np.array([[*run.accuracy, *run.accuracy[-1:] * (length - len(run.accuracy))] for run in runs])
            steps = np.minimum(np.arange(length) * EVALUATE_EVERY, runs[0].cell.num_steps)
            band = np.array([bootstrap_interval(column) for column in curves.T])
            line = axis.plot(steps, curves.mean(axis=0), label=name, color=f"C{number}")[0]
            axis.fill_between(steps, band[:, 0], band[:, 1], color=line.get_color(), alpha=0.12, linewidth=0)
        axis.set_title(f"every sample is {lag} versions old")
        axis.set_xlabel("step")
    axes[0][0].set_ylabel("held-out accuracy")
    axes[0][-1].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
