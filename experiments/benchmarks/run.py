"""Run every benchmark and write RESULTS.md: `python experiments/benchmarks/run.py [NAME[/profile][:ROUNDS] ...]`."""

from __future__ import annotations

import json
import platform
import sys
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from asyncrl.sweep.results import machine_now  # noqa: E402
from benchmarks.harness import BENCHMARKS, in_process, run_benchmark  # noqa: E402


def main() -> None:
    store = HERE / "results.json"
    results = json.loads(store.read_text())
    for asked in sys.argv[1:] or BENCHMARKS:
        what, _, rounds = asked.partition(":")
        name, _, option = what.partition("/")
        print(f"running {what}", file=sys.stderr, flush=True)
        found = in_process(partial(run_benchmark, name, int(rounds or 0), **({option: "yes"} if option else {})))
        command = f"python experiments/benchmarks/run.py {asked}"
        machine = f"{machine_now()}, Python {platform.python_version()}"
        results[what] = found | {"date": date.today().isoformat(), "machine": machine, "command": command}
        store.write_text(json.dumps(results, indent=1) + "\n")
    (HERE / "RESULTS.md").write_text(table(results))
    print(table(results))


def table(results: dict[str, Any]) -> str:
    lines = [
        "# Results",
        "",
        "Made by `python experiments/benchmarks/run.py`; one benchmark alone by `asyncrl bench NAME --json`. Both sides of a",
        "ratio are measured in one run, in turns; medians of the rounds. Not run on a GPU.",
    ]
    for name, result in results.items():
        lines += ["", f"## {name}", "", f"{result['date']}, {result['machine']}, `{result['command']}`", ""]
        lines += ["| ratio | value | goal | holds |", "|---|---|---|---|"]
        for ratio, row in result["ratios"].items():
            lines.append(f"| `{ratio}` | {row['value']:.3g} | {row['goal']:g} | {'yes' if row['holds'] else 'no'} |")
        lines += ["", "| figure | value |", "|---|---|"]
        lines += [f"| `{figure}` | {value:,.4g} |" for figure, value in result["figures"].items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
