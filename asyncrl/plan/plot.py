"""A sweep as a picture. Imports matplotlib; its figure is its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from asyncrl.errors import ConfigError
from asyncrl.plan.report import COLUMNS
from asyncrl.plan.simulator.scenario import Outcome

SHOWN = ("steps_per_s", "mean_staleness", "learner_idle", "slots_used")
COLOUR = "#20639b"


def plot(rows: Sequence[tuple[str, Outcome]], over: str, path: Path) -> None:
    """Draw steps a second, staleness and use of learner and slots over the values of a sweep.

    Raises:
        ConfigError: There is nothing to draw a line through.
    """
    if len(rows) < 2:
        raise ConfigError("a picture needs a sweep over at least two values: --sweep FIELD=A,B,C")
    figure = Figure(figsize=(4 * len(SHOWN), 3.2), layout="constrained")
    positions = range(len(rows))
    for axis, column in zip(figure.subplots(1, len(SHOWN)), SHOWN, strict=True):
        axis.plot(positions, [getattr(made, column) for _, made in rows], marker="o", color=COLOUR, lw=1.8)
        axis.set_xticks(list(positions), [value for value, _ in rows])
        axis.set_xlabel(over.partition("=")[0])
        axis.set_title(COLUMNS[column])
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
