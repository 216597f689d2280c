"""Run a short colocated run and draw what lay on its device when; or, with --run, draw one that was made already.

Writes RESULTS.md and memory_timeline.png beside this file, or to `--out`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

import asyncrl
from asyncrl.config.load import load_config
from asyncrl.observe.spans import PHASE, Span, read_spans
from asyncrl.observe.steps import MemoryLine, read_memory

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
MIB = 1 << 20
COLOURS = ("#4c72b0", "#8172b3", "#dd8452", "#c44e52", "#55a868", "#937860", "#da8bc3", "#8c8c8c", "#ccb974", "#64b5cd")
SHADES = {"rollout": "#e8f1e4", "train": "#eceaf5", "inference": "#fbeee6"}


def main() -> None:
    options = parse()
    where = "a run made before" if options.run else machine()
    with tempfile.TemporaryDirectory(prefix="asyncrl-memory-") as folder:
        run_folder = options.run or asyncio.run(make_run(Path(folder), options.placement))
        timeline = Timeline.of(read_memory(run_folder), [span for span in read_spans(run_folder) if span.name == PHASE])
    options.out.mkdir(parents=True, exist_ok=True)
    draw(timeline, options.out / "memory_timeline.png")
    text = report(timeline, " ".join(["python experiments/memory_timeline/run.py", *sys.argv[1:]]), where)
    (options.out / "RESULTS.md").write_text(text)
    print(text)


def machine() -> str:
    """Return when and where, and how busy others keep it: their work is in the milliseconds."""
    load = os.getloadavg()[0]
    return f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores shared with other work (load average {load:.1f} before)"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="a run folder whose processes took turns")
    parser.add_argument("--placement", default="colocated", choices=["colocated", "hybrid"])
    parser.add_argument("--out", type=Path, default=HERE)
    return parser.parse_args()


async def make_run(folder: Path, placement: str) -> Path:
    presets = (REPOSITORY / f"configs/placements/{placement}.toml", HERE / "layer.toml")
    config = load_config(REPOSITORY / "configs/quickstart.toml", [f"folder={folder}", "name=memory"], presets)
    async with asyncrl.Run(config) as run:
        async for step in run.steps():
            print(f"version {step.version}", file=sys.stderr)
    return folder / "memory"


@dataclass(frozen=True)
class Change:
    """Bytes of one component of one process, from a moment on."""

    time_s: float
    key: str
    num_bytes: int


@dataclass(frozen=True)
class Timeline:
    """What was where, by time."""

    lines: list[MemoryLine]
    phases: list[Span]
    changes: list[Change]

    @classmethod
    def of(cls, lines: list[MemoryLine], phases: list[Span]) -> Timeline:
        if not lines:
            raise SystemExit("no memory timeline in this run: its placement takes no turns")
        by_process = defaultdict(list)
        for line in lines:
            by_process[line.process].append(line)
        changes = [change for own in by_process.values() for change in changes_of(own)]
        return cls(lines, phases, sorted(changes, key=lambda change: change.time_s))

    @property
    def keys(self) -> list[str]:
        return list(dict.fromkeys(change.key for change in sorted(self.changes, key=lambda change: change.key)))

    def steps(self) -> tuple[list[float], dict[str, list[float]]]:
        """Return times, and for every component its MiB from each of them on."""
        held, times = dict.fromkeys(self.keys, 0.0), []
        values: dict[str, list[float]] = {key: [] for key in held}
        for change in self.changes:
            held[change.key] = change.num_bytes / MIB
            times.append(change.time_s)
            for key, value in held.items():
                values[key].append(value)
        return times, values

    def peak(self) -> tuple[float, float, dict[str, float]]:
        """Return when most was resident in all processes together, how much (MiB), and of what."""
        times, values = self.steps()
        totals = [sum(values[key][index] for key in values) for index in range(len(times))]
        index = totals.index(max(totals))
        return times[index], totals[index], {key: values[key][index] for key in values if values[key][index]}


def changes_of(lines: list[MemoryLine]) -> list[Change]:
    """Return one process's changes: moves one after the other, each at its end, then what the line says is there."""
    process, changes = lines[0].process, []
    for line in lines:
        moment = line.started_s
        for move in line.moves:
            if line is lines[0] and move.before == "device":
                changes.append(Change(moment, f"{process}: {move.component}", move.num_bytes))
            moment = min(moment + move.seconds, line.finished_s)
            there = move.num_bytes if move.after == "device" else 0
            changes.append(Change(moment, f"{process}: {move.component}", there))
        changes += [Change(line.finished_s, f"{process}: {name}", held) for name, held in line.resident.items()]
    return changes


def draw(timeline: Timeline, path: Path) -> None:
    times, values = timeline.steps()
    origin, end = times[0], times[-1]
    figure, axis = plt.subplots(figsize=(12, 5))
    for span in timeline.phases:
        phase = str(span.attributes.get("phase", ""))
        axis.axvspan(span.start_s - origin, span.end_s - origin, color=SHADES.get(phase, "#f4f4f4"), lw=0, zorder=0)
    keys = [key for key in timeline.keys if any(values[key])]
    axis.stackplot(
        [moment - origin for moment in times], [values[key] for key in keys], labels=keys, step="post",
        colors=[COLOURS[index % len(COLOURS)] for index in range(len(keys))], zorder=2,
    )  # fmt: skip
    peaks = [line for line in timeline.lines if line.process == "learner" and line.ended_phase == "train" and line.number >= 0]
    axis.plot(
        [line.started_s - origin for line in peaks], [line.peak_bytes / MIB for line in peaks], "k_", ms=9, zorder=3,
        label="learner: peak of the train phase, activations included",
    )  # fmt: skip
    axis.set(
        xlabel="seconds", ylabel="MiB on the shared device", xlim=(0, end - origin), title="What lies on the device, and when"
    )
    handles, labels = axis.get_legend_handles_labels()
    shades = [mpl.patches.Patch(color=colour, label=f"phase {phase}") for phase, colour in SHADES.items()]
    axis.legend([*handles, *shades], [*labels, *(shade.get_label() for shade in shades)], loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=110, bbox_inches="tight")


def report(timeline: Timeline, command: str, where: str) -> str:
    moment, peak, parts = timeline.peak()
    origin = timeline.changes[0].time_s
    Move = tuple[str, str, str]
    seconds, moved, counts = defaultdict[Move, float](float), defaultdict[Move, int](int), defaultdict[Move, int](int)
    for line in timeline.lines:
        for move in line.moves:
            key = (line.process.rstrip("-0123456789"), move.component, f"{move.before} to {move.after}")
            seconds[key] += move.seconds
            moved[key] += move.num_bytes
            counts[key] += 1
    peaks = defaultdict[tuple[str, str], int](int)
    for line in timeline.lines:
        peaks[line.process, line.ended_phase] = max(peaks[line.process, line.ended_phase], line.peak_bytes)
    longest = max(seconds, key=lambda key: seconds[key])
    (peak_process, peak_phase), most = max(peaks.items(), key=lambda item: item[1])
    in_components = sum(parts.values())
    rows = [
        f"| {process} | {component} | {way} | {counts[process, component, way]} | {moved[process, component, way] / MIB:.1f} | "
        f"{seconds[process, component, way] * 1e3:.0f} |"
        for process, component, way in sorted(seconds, key=lambda key: -seconds[key])
    ]
    phase_rows = [
        f"| {process} | {phase} | {num_bytes / MIB:.1f} |" for (process, phase), num_bytes in sorted(peaks.items()) if phase
    ]
    return "\n".join([
        "# Memory timeline: results", "", f"`{command}`, {where}.", "", "![memory](memory_timeline.png)", "",
        f"- Peak of all components of all processes: {peak:.1f} MiB, {moment - origin:.1f} s after the first line: "
        + ", ".join(f"{key} {value:.1f}" for key, value in parts.items()) + f" (sum {in_components:.1f}).",
        f"- The phase that peaks is `{peak_phase}` of {peak_process}: {most / MIB:.1f} MiB, what autograd keeps for the backward "
        "pass included.",
        f"- The move that took longest in all is {longest[1]} of {longest[0]}, {longest[2]}: {seconds[longest] * 1e3:.0f} ms in "
        f"{counts[longest]} moves, {moved[longest] / MIB / max(seconds[longest], 1e-9):.0f} MiB/s.",
        f"- {switching(timeline)}", "",
        "| process | phase | peak MiB |", "|---|---|---|", *phase_rows, "",
        "| process | component | move | times | MiB | ms |", "|---|---|---|---|---|---|", *rows, "",
    ])  # fmt: skip


def switching(timeline: Timeline) -> str:
    """Return how much of the time went into switches."""
    own = [line for line in timeline.lines if line.number >= 0]
    begin, end = min(line.started_s for line in own), max(line.finished_s for line in own)
    moving = sum(later.finished_s - later.started_s for _, later in pairwise(sorted(own, key=lambda line: line.started_s)))
    return (
        f"{len({line.number for line in own})} switches in {end - begin:.1f} s; processes spent {moving:.2f} s moving in them, "
        "added up over processes that move at the same time."
    )


if __name__ == "__main__":
    main()
