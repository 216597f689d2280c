"""Measure every way of moving weights; write RESULTS.md, results.json and chart.png beside this file, or to `--out`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.broadcast import chosen  # noqa: E402
from benchmarks.harness import run_benchmark  # noqa: E402

COUNTS = (1, 2, 4)
PARTS = ("snapshot", "commit", "transfer", "load")
COLOURS = ("#4c72b0", "#8172b3", "#dd8452", "#55a868")


def main() -> None:
    options = parse()
    started_s = time.perf_counter()
    results = run_benchmark("broadcast", options.rounds, media=options.media)
    results["names"] = chosen(options.media)
    results |= {"machine": machine(), "seconds": time.perf_counter() - started_s, "command": " ".join(["run.py", *sys.argv[1:]])}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "RESULTS.md").write_text(report(results))
    draw(results, options.out / "chart.png")
    print(report(results))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--media", default="all", help="names with commas between; all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE)
    return parser.parse_args()


def parts(figures: dict[str, float], name: str) -> list[float]:
    """Return milliseconds of each of PARTS, one subscriber; they add up to nearly all of `live_ms`."""
    snapshot = figures.get(f"{name}_blocked_ms", 0.0)
    commit = max(0.0, figures.get(f"{name}_announced_ms", snapshot) - snapshot)
    load = figures.get(f"{name}_load_ms", 0.0)
    transfer = figures.get(f"{name}_fetch_ms", figures[f"{name}_live_ms"] - snapshot - commit - load)
    return [snapshot, commit, transfer, load]


def measured(results: dict[str, Any]) -> list[str]:
    return [name for name in results["names"] if f"{name}_live_ms" in results["figures"]]


def report(results: dict[str, Any]) -> str:
    figures = results["figures"]
    lines = [
        "# Weight transfer",
        "",
        f"`python experiments/weight_transfer/{results['command']}`, {results['machine']}, {results['seconds']:.0f} s. "
        f"{figures['model_bytes'] / 1e6:.0f} MB, medians of {figures['rounds']:.0f} rounds; one warm copy of the bytes took "
        f"{figures['copy_ms']:.0f} ms. Not run on a GPU or between machines.",
        "",
        "| way | " + " | ".join(PARTS) + " | " + " | ".join(f"live, {count}" for count in COUNTS) + " | MB moved |",
        "|---|" + "---|" * (len(PARTS) + len(COUNTS) + 1),
    ]
    for name in measured(results):
        cells = [f"{part:.0f}" for part in parts(figures, name)]
        for count in COUNTS:
            live = figures.get(f"{name}_live_ms" if count == 1 else f"{name}_{count}_live_ms")
            cells.append("" if live is None else f"{live:.0f}")
        lines.append(
            f"| `{name}` | " + " | ".join(cells) + f" | {figures.get(f'{name}_bytes', figures['model_bytes']) / 1e6:.1f} |"
        )
    lines += [
        "",
        "Milliseconds; live: until the last of so many subscribers.",
        "",
        "| ratio | value | goal | holds |",
        "|---|---|---|---|",
    ]
    for ratio, row in results["ratios"].items():
        lines.append(f"| `{ratio}` | {row['value']:.3g} | {row['goal']:g} | {'yes' if row['holds'] else 'no'} |")
    return "\n".join([*lines, *delta_lines(figures, results["ratios"]), "", "![chart](chart.png)", ""])


def delta_lines(figures: dict[str, float], ratios: dict[str, Any]) -> list[str]:
    if "delta_bytes" not in ratios:
        return []
    pretrained = "SmolLM2-135M-Instruct (de-quantised from Q4_1)"
    model = pretrained if figures["delta_pretrained"] else "random weights of SmolLM2-135M's shape"
    identical = "bit-identical" if figures["delta_identical"] else "NOT bit-identical"
    return [
        "",
        f"Deltas, {model}, learning rate 1e-6, bfloat16: {ratios['delta_bytes']['value']:.2%} of the whole (median), "
        f"{figures['delta_changed_share']:.2%} of the elements changed; applied one after the other they are {identical} to what "
        "was sent.",
    ]


def draw(results: dict[str, Any], path: Path) -> None:
    figures, names = results["figures"], measured(results)
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 0.5 * len(names) + 2), sharey=True, layout="constrained")
    starts = [0.0] * len(names)
    for index, (part, colour) in enumerate(zip(PARTS, COLOURS, strict=True)):
        widths = [parts(figures, name)[index] for name in names]
        left.barh(names, widths, left=starts, color=colour, label=part)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    left.set(xlabel="ms, one subscriber", title="where the time goes")
    left.axvline(2 * figures["copy_ms"], color="black", linestyle=":", label="two warm copies")
    left.legend()
    left.invert_yaxis()
    for index, count in enumerate(COUNTS):
        lives = [figures.get(f"{name}_live_ms" if count == 1 else f"{name}_{count}_live_ms", 0.0) for name in names]
        right.barh([row + 0.27 * (index - 1) for row in range(len(names))], lives, height=0.25, label=f"{count} subscribers")
    right.set(xlabel="ms from publish to live in the last", title="1, 2 and 4 subscribers")
    right.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def machine() -> str:
    described = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in described if line.startswith("model name")), platform.processor())
    return f"{os.cpu_count()} cores, {model}, Python {platform.python_version()}"


if __name__ == "__main__":
    main()
