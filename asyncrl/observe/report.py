"""Pictures of a run: reward.png (reward and staleness over versions) and timeline.png (overlap of generation and training).

They are drawn from steps.jsonl, eval.jsonl, spans.jsonl and config.toml of the run folder. The run may be live or ended. This is
the only file that imports matplotlib. It shares no figure with other code, so any thread may call it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from msgspec import Struct
from msgspec.structs import replace

from asyncrl.config.load import load_config
from asyncrl.config.run import RunConfig
from asyncrl.folders import replacing
from asyncrl.observe.spans import CHECKPOINT, GENERATE, PUBLISH, SCORE, STEP, SWAP, WAIT, Span, read_spans
from asyncrl.observe.steps import STEPS_FILE, EvalReport, read_evals, read_lines

MOST_GENERATORS_SHOWN = 8

INK, FAINT, GRID = "#1f2933", "#8a949e", "#e4e7eb"
GENERATE_COLOURS = ("#9ec5f4", "#6ba4e7")
"""The colours of successive versions alternate."""
REWARD_COLOUR, LEARN_COLOURS, WAIT_COLOUR = "#f0b95b", ("#3f9b6c", "#57b986"), "#eceff2"
SWAP_COLOUR, STALE_COLOUR, CHECKPOINT_COLOUR = "#b4338a", "#d1495b", "#6b7280"

Axes = Any
"""The axes of matplotlib, which has no types."""
Window = tuple[float, float]
"""First and last second that are shown."""


def write_report(run_folder: Path) -> dict[str, Path]:
    """Draw every picture for which the run has data.

    Args:
        run_folder: Folder of a live or ended run.

    Returns:
        Paths by name (`reward`, `timeline`); a picture without data is absent.
    """
    drawn: dict[str, Figure] = {}
    newest = {row.step: row for row in read_lines(run_folder / STEPS_FILE, DrawnStep)}  # the last row of a repeated step counts
    steps, evals = [newest[step] for step in sorted(newest)], read_evals(run_folder)
    config = load_config(run_folder / "config.toml") if (run_folder / "config.toml").exists() else RunConfig()
    if steps:
        drawn["reward"] = draw_reward(steps, evals, config)
    lanes = lanes_of(read_spans(run_folder))
    if any(lane.named(STEP) for lane in lanes):
        drawn["timeline"] = draw_timeline(lanes, config.name)
    paths = {name: run_folder / f"{name}.png" for name in drawn}
    for name, figure in drawn.items():
        with replacing(paths[name]) as file:  # a user may have the file open
            figure.savefig(file, dpi=130, format="png", facecolor="white")
    return paths


# -- reward --------------------------------------------------------------------------------------------------------------


class DrawnStep(Struct, frozen=True):
    """The drawn fields of a `StepReport`. A long run has many reports, and each holds a hundred metrics."""

    step: int
    version: int
    reward_mean: float
    staleness_mean: float = 0.0
    staleness_max: int = 0


def draw_reward(steps: Sequence[DrawnStep], evals: Sequence[EvalReport], config: RunConfig) -> Figure:
    """Return a figure of reward and held-out accuracy over the policy version, with staleness below."""
    figure = Figure(figsize=(9.5, 6.0), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    versions = [report.version for report in steps]
    width = max(3, len(steps) // 12)
    rewards = [report.reward_mean for report in steps]
    sums, ends = np.cumsum([0.0, *rewards]), np.arange(1, len(rewards) + 1)
    starts = np.maximum(ends - width, 0)
    smooth = (sums[ends] - sums[starts]) / (ends - starts)
    above.plot(versions, rewards, ".", color=GENERATE_COLOURS[0], ms=5, label="reward of a step")
    above.plot(versions, smooth, color="#2868b8", lw=2.2, label=f"mean of {width} steps")
    if evals:
        values, label = [item.headline[1] for item in evals], f"held-out {evals[0].headline[0]}"
        above.plot([item.version for item in evals], values, "D--", color=LEARN_COLOURS[0], lw=1, ms=8, mec="white", label=label,
                   zorder=5)  # fmt: skip
        for item in {evals[0].version: evals[0], evals[-1].version: evals[-1]}.values():
            above.annotate(
                f"{item.headline[1]:.2f}", (item.version, item.headline[1]), xytext=(0, -19), textcoords="offset points",
                ha="center", fontweight="bold", color=LEARN_COLOURS[0], zorder=6,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
            )  # fmt: skip
        above.margins(y=0.12)
    above.set_ylabel("mean reward")
    above.legend(loc="best", frameon=False)
    above.set_title(f"{config.name}: reward over policy version", loc="left", color=INK, fontweight="bold")

    eta = config.buffer.max_staleness
    below.fill_between(versions, [report.staleness_max for report in steps], step="mid", color="#f7d9dd", label="max")
    below.plot(versions, [report.staleness_mean for report in steps], color=STALE_COLOUR, lw=1.8, label="mean")
    below.axhline(eta, color=INK, lw=1, ls=(0, (4, 3)))
    below.annotate(f"bound η = {eta}", (1, eta), xycoords=("axes fraction", "data"), xytext=(-4, 3),
                   textcoords="offset points", ha="right", fontsize=9, color=INK)  # fmt: skip
    below.set_ylim(0, max(eta, *(report.staleness_max for report in steps)) + 0.7)
    below.set_ylabel("staleness\n(versions)")
    below.set_xlabel("policy version (optimizer steps)")
    below.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.legend(loc="upper left", frameon=False, ncols=2)
    for axes in (above, below):
        _plain_axes(axes)
    return figure


# -- timeline ------------------------------------------------------------------------------------------------------------


def draw_timeline(lanes: Sequence[Lane], title: str) -> Figure:
    """Return a timeline with one lane per process, of a readable part in the middle of the run."""
    window = choose_window([item for lane in lanes for item in lane.named(STEP)])
    generators = [lane for lane in lanes if lane.kind == "generator"]
    shown = generators[:MOST_GENERATORS_SHOWN] + [lane for lane in lanes if lane.kind != "generator"]
    figure = Figure(figsize=(13, 1.6 + 0.95 * len(shown)), layout="constrained")
    axes, upwards = figure.subplots(), list(reversed(shown))
    for row, lane in enumerate(upwards):
        _draw_lane(axes, lane, row, window)
    # A line from each publication to the swaps of its version.
    rows = {lane.process: row for row, lane in enumerate(upwards)}
    published = {item.attributes.get("version"): (item.end_s, rows[lane.process])
                 for lane in upwards for item in _inside(lane.named(PUBLISH), window)}  # fmt: skip
    for lane in upwards:
        for item in _inside(lane.named(SWAP), window):
            if item.attributes.get("version") in published:
                at_s, row = published[item.attributes["version"]]
                axes.plot([at_s, item.end_s], [row + 0.8, rows[lane.process]], color=SWAP_COLOUR, lw=0.9, alpha=0.55, zorder=3)
    axes.set_ylim(0, len(upwards))
    axes.set_yticks([row + 0.4 for row in range(len(upwards))], [lane.process for lane in upwards])
    axes.tick_params(axis="y", length=0)
    for row in range(1, len(upwards)):
        axes.axhline(row - 0.06, color=GRID, lw=0.8, zorder=0)
    _plain_axes(axes, grid=False)
    axes.spines["left"].set_visible(False)
    axes.set_xlim(*window)
    axes.set_xlabel("seconds since the first span")
    hidden = max(len(generators) - MOST_GENERATORS_SHOWN, 0)
    heading = f"{title}: work of each process, {window[1] - window[0]:.1f} s of it"
    heading += f" ({hidden} more generators not shown)" if hidden else ""
    figure.suptitle(heading, x=0.008, ha="left", color=INK, fontweight="bold")
    entries = [
        Patch(color=GENERATE_COLOURS[1], label="samples in flight (v: version that samples)"),
        Patch(color=SWAP_COLOUR, label="weights fetched and swapped in"),
        Patch(color=REWARD_COLOUR, label="samples being judged"),
        Patch(color=LEARN_COLOURS[0], label="optimizer step"),
        Patch(facecolor=WAIT_COLOUR, edgecolor=FAINT, hatch="////", lw=0, label="learner waits for a batch"),
    ]
    figure.legend(handles=entries, loc="outside lower center", ncols=len(entries), frameon=False, fontsize=9)
    return figure


def _draw_lane(axes: Axes, lane: Lane, row: int, window: Window) -> None:
    shown_s = window[1] - window[0]
    if lane.kind == "reward":
        shown = [replace(item, end_s=max(item.end_s, item.start_s + shown_s / 400)) for item in lane.named(SCORE)]
        _fill_occupancy(axes, shown, row, window, REWARD_COLOUR)
    for item in _inside(lane.named(WAIT), window):
        bar = [(item.start_s, item.end_s - item.start_s)]
        axes.broken_barh(bar, (row + 0.2, 0.5), facecolor=WAIT_COLOUR, edgecolor=FAINT, hatch="////", lw=0)
    for item in _inside(lane.named(CHECKPOINT), window):
        axes.broken_barh([(item.start_s, item.end_s - item.start_s)], (row + 0.1, 0.1), color=CHECKPOINT_COLOUR, lw=0)
    for item in _inside(lane.named(STEP), window):
        step, start_s, end_s = int(item.attributes.get("step", 0)), max(item.start_s, window[0]), min(item.end_s, window[1])
        axes.broken_barh([(item.start_s, item.end_s - item.start_s)], (row + 0.12, 0.66), color=LEARN_COLOURS[step % 2], lw=0)
        if end_s - start_s > shown_s / 45:
            axes.text((start_s + end_s) / 2, row + 0.45, str(step), ha="center", va="center", color="white", fontsize=9,
                      fontweight="bold")  # fmt: skip
    if lane.kind != "generator":
        return
    swaps = lane.named(SWAP)
    borders = [-np.inf, *(item.end_s for item in swaps), np.inf]
    versions = [int(swaps[0].attributes.get("version", 1)) - 1 if swaps else 0]
    versions += [int(item.attributes.get("version", 0)) for item in swaps]
    for version, (since, until) in zip(versions, itertools.pairwise(borders), strict=True):
        part = (max(since, window[0]), min(until, window[1]))
        if part[0] < part[1]:
            _fill_occupancy(axes, lane.named(GENERATE), row, part, GENERATE_COLOURS[version % 2])
            if part[1] - part[0] > shown_s / 35:
                axes.annotate(f"v{version}", (part[0], row + 0.06), xytext=(5, 0), textcoords="offset points",
                              va="bottom", fontsize=8.5, color=INK)  # fmt: skip
    for item in _inside(swaps, window):
        length_s = max(item.end_s - item.start_s, shown_s / 500)
        axes.broken_barh([(item.start_s, length_s)], (row, 0.86), color=SWAP_COLOUR, lw=0, zorder=4)


def _fill_occupancy(axes: Axes, spans: Sequence[Span], row: int, window: Window, colour: str) -> None:
    """Fill a lane in proportion to its open samples; the full height is the largest number of open samples."""
    if not spans:
        return
    times = np.array([*(item.start_s for item in spans), *(item.end_s for item in spans)])
    samples = np.array([int(item.attributes.get("samples", 1)) for item in spans])
    order = np.argsort(times, kind="stable")
    times, open_now = times[order], np.cumsum(np.concatenate([samples, -samples])[order])
    first, last = np.searchsorted(times, window)
    before, after = (open_now[place - 1] if place > 0 else 0 for place in (first, last))
    shown_times = np.concatenate([[window[0]], times[first:last], [window[1]]])
    shown = np.concatenate([[before], open_now[first:last], [after]])
    axes.fill_between(shown_times, row, row + 0.82 * shown / max(int(open_now.max()), 1), step="post", color=colour, lw=0)


def _inside(spans: Sequence[Span], window: Window) -> list[Span]:
    return [item for item in spans if item.end_s >= window[0] and item.start_s <= window[1]]


def _plain_axes(axes: Axes, *, grid: bool = True) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK)
    if grid:
        axes.grid(color=GRID, lw=0.8)
        axes.set_axisbelow(True)


LaneKind = Literal["generator", "reward", "learner"]
_KIND_OF_SPAN: dict[str, LaneKind] = {GENERATE: "generator", SWAP: "generator", SCORE: "reward", STEP: "learner"}
_KIND_OF_SPAN |= {WAIT: "learner", PUBLISH: "learner", CHECKPOINT: "learner"}


@dataclass(slots=True)
class Lane:
    """The spans of one process by name, each list sorted by start."""

    process: str
    kind: LaneKind
    spans: dict[str, list[Span]] = field(default_factory=dict)

    def named(self, name: str) -> list[Span]:
        """Return the spans with this name."""
        return self.spans.get(name, [])


def lanes_of(spans: Iterable[Span]) -> list[Lane]:
    """Return the lanes: generators by number, then all reward workers in one lane, then the learner; spans are in order.

    Times are seconds since the first span.
    """
    lanes: dict[str, Lane] = {}
    shown = sorted((item for item in spans if item.name in _KIND_OF_SPAN), key=lambda item: item.start_s)
    for item in shown:
        kind = _KIND_OF_SPAN[item.name]
        process = "reward" if kind == "reward" else item.process
        moved = replace(item, start_s=item.start_s - shown[0].start_s, end_s=item.end_s - shown[0].start_s)
        lanes.setdefault(process, Lane(process, kind)).spans.setdefault(item.name, []).append(moved)

    def place(lane: Lane) -> tuple[int, int, str]:
        number = lane.process.rpartition("-")[2]
        return ("generator", "reward", "learner").index(lane.kind), int(number) if number.isdigit() else 0, lane.process

    return sorted(lanes.values(), key=place)


def choose_window(steps: Sequence[Span]) -> Window:
    """Return a readable part in the middle of training: at most 20 seconds and about 14 steps."""
    begin, end = steps[0].start_s, steps[-1].end_s
    typical_s = float(np.median(np.diff([item.start_s for item in steps]))) if len(steps) > 1 else end - begin
    length = min(20.0, 14 * max(typical_s, 1e-3), end - begin)
    middle = steps[len(steps) // 2].start_s
    first = min(max(middle - length / 2, begin), end - length)
    return first, first + length
