"""CPU milliseconds a step of every process of a run: `python experiments/benchmarks/step_cpu.py CONFIG [STEPS] [KEY=VALUE ...]`.

Runs CONFIG without evaluations for STEPS steps (110) and prints, by process, the CPU seconds between step 20 and the fifth from
last, over the steps between: user and system time of the process and of its children, from the operating system.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

FIRST_STEP, LAST_STEPS = 20, 5


def main() -> None:
    config, steps, *settings = [*sys.argv[1:], "110"][: max(len(sys.argv) - 1, 2)]
    with tempfile.TemporaryDirectory(prefix="asyncrl-") as folder:
        settings += [f"num_steps={steps}", f"folder={folder}", "eval.at_start=false", "eval.at_end=false"]
        command = [sys.executable, "-m", "asyncrl", "run", config, *(part for each in settings for part in ("--set", each))]
        with (Path(folder) / "out").open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as run:
            first, before = wait_for(FIRST_STEP, run, Path(folder))
            last, after = wait_for(int(steps) - LAST_STEPS, run, Path(folder))
    total = sum((after - before).values())
    for name, seconds in (after - before).most_common():
        print(f"{name:20} {1000 * seconds / (last - first):8.2f} ms a step {seconds / total:7.1%}")


def wait_for(step: int, run: subprocess.Popen[bytes], folder: Path) -> tuple[int, Counter[str]]:
    """Return the newest step once there are so many, and the CPU seconds of every process by then."""
    while (newest := sum(len(path.read_text().splitlines()) for path in folder.glob("*/steps.jsonl"))) < step:
        if run.poll() is not None:
            sys.exit(f"the run ended: {(folder / 'out').read_text()[-2000:]}")
        time.sleep(0.05)
    seconds, root = Counter[str](), psutil.Process(run.pid)
    for process in (root, *root.children(recursive=True)):
        words = " ".join(process.cmdline()).split()  # a forked process shows its command as one
        names = [word for word in words if word.rstrip("0123456789-") in {"controller", "learner", "generator", "reward"}]
        times = process.cpu_times()
        seconds[names[-1] if names else "owner and children"] += times.user + times.system
    return newest, seconds


if __name__ == "__main__":
    main()
