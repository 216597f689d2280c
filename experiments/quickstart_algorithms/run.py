"""Train the quickstart's model by each algorithm, one whole run after the other, and write RESULTS.md.

`python experiments/quickstart_algorithms/run.py`: about 5 minutes an algorithm on 2 cores. `--only dpo` runs one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import asyncrl

HERE = Path(__file__).parent
QUICKSTART = HERE.parents[1] / "configs" / "quickstart.toml"
ALGORITHMS = ("grpo", "reinforce_pp", "ppo_critic", "dpo")
BAR = 0.75


async def train(name: str, overrides: list[str], folder: Path) -> dict[str, float]:
    """Run one algorithm; return what it reached."""
    config = asyncrl.load_config(QUICKSTART, [f"name={name}", f"folder={folder}", *overrides], presets=[HERE / f"{name}.toml"])
    started_s = time.monotonic()
    async with asyncrl.Run(config) as run:
        status = await run.wait()
    if status.phase != "stopped":
        raise SystemExit(f"{name}: {status.phase}: {status.reason}")
    lines = (run.run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line)["metrics"] for line in lines]
    accuracy = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    return {"before": accuracy[0], "after": accuracy[-1], "steps": config.num_steps, "seconds": time.monotonic() - started_s}


def main() -> None:
    """Run all of them and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=ALGORITHMS, default=None)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=VALUE")
    arguments = parser.parse_args()
    names = [arguments.only] if arguments.only else list(ALGORITHMS)
    with tempfile.TemporaryDirectory(prefix="asyncrl-algorithms-") as folder:
        for name in names:
            outcome = asyncio.run(train(name, arguments.overrides, Path(folder)))
            print(name, outcome, flush=True)
            if not arguments.overrides:
                record(name, outcome)


def record(name: str, outcome: dict[str, float]) -> None:
    """Write results.json, where the other algorithms' last results stay, and the table."""
    path = HERE / "results.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    results[name] = outcome
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    (HERE / "RESULTS.md").write_text(table(results), encoding="utf-8")


def table(results: dict[str, dict[str, float]]) -> str:
    """Return RESULTS.md."""
    lines = [
        "# The quickstart by four algorithms",
        "",
        "`python experiments/quickstart_algorithms/run.py`: the quickstart's task, model and processes; only the algorithm",
        f"differs. Sampled accuracy on 512 held-out sums; the bar is to double and to pass {BAR}.",
        "",
        "| algorithm | before | after | steps | seconds, whole run |",
        "|---|---|---|---|---|",
    ]
    for name in ALGORITHMS:
        if name not in results:
            lines.append(f"| [{name}]({name}.toml) | not run yet | | | |")
            continue
        row = results[name]
        reached = f"{row['before']:.3f} | {row['after']:.3f} | {row['steps']} | {row['seconds']:.0f}"
        lines.append(f"| [{name}]({name}.toml) | {reached} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
