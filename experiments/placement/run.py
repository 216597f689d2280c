"""The placements on the same work, one whole run after the other: what a step costs, who idles, what lies in memory.

`python experiments/placement/run.py` measures and writes results.json, RESULTS.md and placement.png; `--only hybrid` measures
one, `--steps 10` is a short try. What is printed also says where the time of a switch went. `--learn` trains the quickstart under
each placement instead, and notes the accuracy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
from matplotlib.figure import Figure

import asyncrl
from asyncrl.control.lifecycle.supervisor import read_pids
from asyncrl.observe.spans import PHASE, SWAP, Span, read_spans
from asyncrl.observe.steps import MemoryLine, read_memory

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"
PLACEMENTS = tuple(
    name
    for name in ("disaggregated", "colocated", "hybrid", "async_hybrid")
    if (CONFIGS / "placements" / f"{name}.toml").exists()
)
WARM_UP_STEPS = 3
"""Not counted: the first steps make optimizer state and caches."""
SAMPLE_S = 0.25
MIB = 1 << 20
BAR = 0.75

Row = dict[str, float]


async def measure(name: str, overrides: list[str], folder: Path) -> Row:
    """Run the work under one placement and return its figures."""
    config = asyncrl.load_config(HERE / "config.toml", [f"name={name}", f"folder={folder}", *overrides], presets=[preset(name)])
    peak = PeakMemory()
    async with asyncrl.Run(config) as run, asyncio.TaskGroup() as group:
        watching = group.create_task(peak.watch(run.run_folder))
        reports = [report async for report in run.steps()]
        status = await run.wait()
        watching.cancel()
    if status.phase != "stopped":
        raise SystemExit(f"{name}: {status.phase}: {status.reason}")
    lines = read_memory(run.run_folder)
    told = switch_parts(list(read_spans(run.run_folder)), lines)
    return figures(reports[WARM_UP_STEPS:], lines) | {"peak_pss_mib": peak.mib} | told


def switch_parts(spans: list[Span], lines: list[MemoryLine]) -> Row:
    """Return the mean milliseconds of a switch to either phase, and of its parts, after the first few.

    `give` and `take` are the two halves as the slowest process tells them, `load` what of `take` are an engine's fetch and swap
    of the new version (keys and values that are computed anew among it), `rest` is messages.
    """
    switches = [span for span in spans if span.name == PHASE and span.attributes.get("phase") == "switch"]
    parts: dict[str, list[float]] = {}
    for switch in switches[2 * WARM_UP_STEPS :]:
        halves = {"give": 0.0, "take": 0.0}
        mine = [line for line in lines if line.number == switch.attributes["number"]]
        for line in mine:
            half = "take" if (line.phase == "train") == (line.process == "learner") else "give"
            halves[half] = max(halves[half], line.finished_s - line.started_s)
        loads = [s.end_s - s.start_s for s in spans if s.name == SWAP and switch.start_s <= s.start_s <= switch.end_s]
        told = halves | {"load": max(loads, default=0.0), "rest": switch.end_s - switch.start_s - sum(halves.values())}
        for name, seconds in ({"whole": switch.end_s - switch.start_s} | told).items():
            for line in mine[:1]:
                parts.setdefault(f"to_{line.phase}_{name}_ms", []).append(seconds * 1e3)
    return {name: sum(values) / len(values) for name, values in sorted(parts.items())}


class PeakMemory:
    """The most memory that learner and generators had at once; what two of them share counts once (PSS)."""

    def __init__(self) -> None:
        self.mib = 0.0

    async def watch(self, run_folder: Path) -> None:
        """Look now and then, until cancelled."""
        while True:
            self.mib = max(self.mib, await asyncio.to_thread(shared_memory_mib, run_folder))
            await asyncio.sleep(SAMPLE_S)


def shared_memory_mib(run_folder: Path) -> float:
    """Return the proportional set size of the run's learner and generators, in MiB."""
    try:
        table = read_pids(run_folder)
    except (OSError, ValueError):
        return 0.0
    total = 0.0
    for name, record in table.items():
        if name.startswith(("learner", "generator")):
            with contextlib.suppress(psutil.Error):
                total += psutil.Process(record.pid).memory_full_info().pss / MIB
    return total


def figures(reports: list[asyncrl.StepReport], lines: list[MemoryLine]) -> Row:
    """Return what the steps and the memory timeline say, per step."""

    def mean(name: str) -> float:
        values = [report.metrics[name] for report in reports if name in report.metrics]
        return sum(values) / len(values) if values else 0.0

    step_s = mean("time/step_s")
    row = {
        "steps_per_s": 1 / step_s,
        "step_s": step_s,
        "train_s": mean("time/train_s"),
        "learner_idle": mean("time/wait_s") / step_s,
        "generators_idle": mean("idle/generators"),
        "staleness": sum(report.staleness_mean for report in reports) / len(reports),
        **{f"{page}_s": mean(f"placement/{page}_s") for page in ("rollout", "switch")},
    }
    moved = sum(move.num_bytes for line in lines for move in line.moves)
    return row | {"device_mib": most_at_once(lines) / MIB, "moved_mib": moved / MIB / max(len(lines), 1)}


def most_at_once(lines: list[MemoryLine]) -> int:
    """Return the most bytes of components that all processes together had on the device at once; 0 where none were moved."""
    held: dict[str, int] = {}
    most = 0
    for line in lines:
        held[line.process] = max(sum(line.resident.values()), line.peak_bytes if line.process not in held else 0)
        most = max(most, sum(held.values()))
    return most


async def learn(name: str, overrides: list[str], folder: Path) -> Row:
    """Train the quickstart under one placement; return what it reached."""
    settings = [f"name=learn-{name}", f"folder={folder}", *overrides]
    config = asyncrl.load_config(CONFIGS / "quickstart.toml", settings, presets=[preset(name)])
    started_s = time.monotonic()
    async with asyncrl.Run(config) as run:
        status = await run.wait()
    if status.phase != "stopped":
        raise SystemExit(f"{name}: {status.phase}: {status.reason}")
    before, after = status.accuracy_before or 0.0, status.accuracy_after or 0.0
    return {"before": before, "after": after, "learn_s": time.monotonic() - started_s}


def preset(name: str) -> Path:
    """Return what is laid over the work for a placement."""
    return CONFIGS / "placements" / f"{name}.toml"


def main() -> None:
    """Run what was asked for; write down what was not a try."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PLACEMENTS, default=None)
    parser.add_argument("--learn", action="store_true")
    parser.add_argument("--steps", type=int, default=0, help="a try of so many steps; nothing is written")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=VALUE")
    arguments = parser.parse_args()
    overrides = arguments.overrides + ([f"num_steps={arguments.steps}"] if arguments.steps else [])
    with tempfile.TemporaryDirectory(prefix="asyncrl-placement-") as folder:
        for name in [arguments.only] if arguments.only else PLACEMENTS:
            work = learn if arguments.learn else measure
            row = asyncio.run(work(name, overrides, Path(folder)))
            print(name, json.dumps({key: round(value, 4) for key, value in row.items()}), flush=True)
            if not overrides:
                record(name, row)


def record(name: str, row: Row) -> None:
    """Add to results.json, and write table and picture anew."""
    path = HERE / "results.json"
    results: dict[str, Row] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    results[name] = results.get(name, {}) | row
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    (HERE / "RESULTS.md").write_text(table(results), encoding="utf-8")
    draw(results, HERE / "placement.png")


COLUMNS = {
    "steps/s": ("steps_per_s", "{:.2f}"),
    "s a step": ("step_s", "{:.3f}"),
    "of it training": ("train_s", "{:.3f}"),
    "of it switching": ("switch_s", "{:.3f}"),
    "learner idle": ("learner_idle", "{:.0%}"),
    "generators idle": ("generators_idle", "{:.0%}"),
    "staleness": ("staleness", "{:.2f}"),
    "components at once, MiB": ("device_mib", "{:.0f}"),
    "moved a switch and process, MiB": ("moved_mib", "{:.1f}"),
    "peak memory of all processes, MiB": ("peak_pss_mib", "{:.0f}"),
}
LEARNED = {"before": ("before", "{:.3f}"), "after": ("after", "{:.3f}"), "seconds, whole run": ("learn_s", "{:.0f}")}


def table(results: Mapping[str, Row]) -> str:
    """Return RESULTS.md."""
    lines = [
        "# Placements on the same work",
        "",
        "`python experiments/placement/run.py`: config.toml here (14 M parameters, 32 samples a step, max_staleness 1), each",
        "under one of `configs/placements/`, on a CPU, one after the other on the same machine; means over all steps but the",
        f"first {WARM_UP_STEPS}. What a column means: README.md.",
        "",
        *rows(results, COLUMNS),
        "",
        "![Time, idle shares and memory](placement.png)",
        "",
        "`python experiments/placement/run.py --learn`: the quickstart's accuracy on 512 held-out sums; the bar is "
        f"{BAR}, or double.",
        "",
        *rows(results, LEARNED),
        "",
    ]
    return "\n".join(lines)


def rows(results: Mapping[str, Row], columns: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return a Markdown table of these columns."""
    lines = ["| placement | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in PLACEMENTS:
        row = results.get(name, {})
        cells = [form.format(row[key]) if key in row else "not run yet" for key, form in columns.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def draw(results: Mapping[str, Row], path: Path) -> None:
    """Draw where a step's time goes, who idles, and what lies in memory."""
    measured = [name for name in PLACEMENTS if "step_s" in results.get(name, {})]
    if not measured:
        return
    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    places = range(len(measured))

    def bars(
        axis: int, key: str, label: str, shift: float = 0.0, width: float = 0.6, below: list[float] | None = None
    ) -> list[float]:
        heights = [results[name].get(key, 0.0) for name in measured]
        axes[axis].bar([place + shift for place in places], heights, width, label=label, bottom=below)
        return [low + high for low, high in zip(below or [0.0] * len(heights), heights, strict=True)]

    top = bars(0, "train_s", "training")
    top = bars(0, "switch_s", "switching", below=top)
    rest = [max(results[name]["step_s"] - used, 0.0) for name, used in zip(measured, top, strict=True)]
    axes[0].bar(places, rest, 0.6, bottom=top, label="generation alone, waiting", color="lightgrey")
    bars(1, "learner_idle", "learner", -0.2, 0.4)
    bars(1, "generators_idle", "generators", 0.2, 0.4)
    bars(2, "peak_pss_mib", "all processes, peak")
    for axis, title in zip(axes, ("seconds a step", "share of time idle", "MiB"), strict=True):
        axis.set_title(title)
        axis.set_xticks(list(places), measured, rotation=15)
        axis.set_ylim(top=axis.get_ylim()[1] * 1.25)  # room for the legend above the bars
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
