"""Steps a second of TRL on this machine by threads, waiting and micro-batches: what the comparison takes has to be the fastest.

    python experiments/time_to_reward/trl_settings.py [CONFIG.toml] [--steps 60] [--set a.b=c]

From a random version 0 (or the config's model): only speed is looked at. TRL's packing of a batch (`padding_free`) needs
flash attention, which there is none of on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import run as comparison

import asyncrl

FIRST = 5
"""Steps that are left out."""
SETTINGS = [
    (threads, wait, parts) for threads, wait in (("2", "ACTIVE"), ("2", "PASSIVE"), ("1", "ACTIVE")) for parts in (1, 2, 4)
]


def main() -> None:
    """Print a row of a table for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=comparison.WORKS["quickstart"].config)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    told = parser.parse_args()
    print("| threads | waiting | micro-batches | steps/s |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="asyncrl-trl-") as scratch:
        overrides = [*told.overrides, f"num_steps={told.steps}"]
        config = asyncrl.load_config(told.config, [*overrides, "model.warm_start.steps=1"])
        version_0 = comparison.make_version_0(config, Path(scratch))
        for threads, wait, parts in SETTINGS:
            out = Path(scratch) / f"{threads}-{wait}-{parts}"
            command = [sys.executable, str(comparison.HERE / "trl_grpo.py"), str(told.config), str(version_0), str(out)]
            command += ["--micro-batches", str(parts), *(part for each in overrides for part in ("--set", each))]
            environment = os.environ | {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": wait, "HF_HUB_OFFLINE": "1"}
            subprocess.run(command, cwd=comparison.ROOT, env=environment, capture_output=True, text=True, check=True)
            seconds = [json.loads(line)["seconds"] for line in (out / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
            rate = (len(seconds) - 1 - FIRST) / (seconds[-1] - seconds[FIRST])
            print(f"| {threads} | {wait.lower()} | {parts} | {rate:.2f} |", flush=True)


if __name__ == "__main__":
    main()
