"""CPU milliseconds a step of every process of a run: `python experiments/benchmarks/step_cpu.py CONFIG [STEPS] [KEY=VALUE ...]`.

Runs CONFIG without evaluations for STEPS steps (110) and prints, by process, the CPU seconds between step 20 and the fifth from
last, over the steps between: user and system time of the process and of its children, from the operating system.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import Counter

import psutil

from asyncrl.client import Run


async def main() -> None:
    config, steps, *settings = [*sys.argv[1:], "110"][: max(len(sys.argv) - 1, 2)]
    first, last = 20, int(steps) - 5
    seconds: dict[int, Counter[str]] = {}
    with tempfile.TemporaryDirectory(prefix="asyncrl-") as folder:
        settings += [f"num_steps={steps}", f"folder={folder}", "eval.at_start=false", "eval.at_end=false"]
        async with Run(config, overrides=settings) as run:
            async for report in run.steps():
                if report.version in {first, last}:
                    seconds[report.version] = cpu_seconds()
    spent = seconds[last] - seconds[first]
    for name, of_process in spent.most_common():
        print(f"{name:20} {1000 * of_process / (last - first):8.2f} ms a step {of_process / sum(spent.values()):7.1%}")


def cpu_seconds() -> Counter[str]:
    """Return the CPU seconds of every process of the run so far."""
    seconds, root = Counter[str](), psutil.Process()
    for process in (root, *root.children(recursive=True)):
        words = " ".join(process.cmdline()).split()  # a forked process shows its command as one
        names = [word for word in words if word.rstrip("0123456789-") in {"controller", "learner", "generator", "reward"}]
        times = process.cpu_times()
        seconds[names[-1] if names else "owner and children"] += times.user + times.system
    return seconds


if __name__ == "__main__":
    asyncio.run(main())
