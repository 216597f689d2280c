"""One cell of the sweep by TRL: version 0 as our runs of that seed make it, then experiments/time_to_reward/trl_grpo.py.

    python experiments/staleness/trl_cell.py CONFIG.toml OUT

Writes OUT/result.json (docs/experiments.md). Held-out accuracy is sampled by transformers, four samples a prompt.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "time_to_reward"))
from run import Work, held_out_accuracy, make_version_0, trl

import asyncrl


def main(path: Path, out: Path) -> None:
    """Train and measure."""
    config = asyncrl.load_config(path)
    with tempfile.TemporaryDirectory(prefix="asyncrl-trl-cell-") as scratch:
        version_0 = make_version_0(config, Path(scratch))
        steps, model = trl(Work(path, 0.0, (), 0.0, 0.0), [], version_0, Path(scratch))
        accuracy = [held_out_accuracy(config, folder) for folder in (version_0, model)]
    seconds, rewards = zip(*steps, strict=True)
    (out / "result.json").write_text(json.dumps({"seconds": seconds, "rewards": rewards, "accuracy": accuracy}), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
