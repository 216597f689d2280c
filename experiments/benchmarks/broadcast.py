"""`asyncrl bench broadcast`: from publish to live in other processes, over every medium, beside what else moves the same bytes.

135M parameters in bfloat16, shaped like SmolLM2-135M (269 MB), held by this process (the learner). A subscriber is a process that
does what a generator does: fetch, compare fingerprints, copy every tensor into the weights it already holds. `live_ms` runs from
the call of `publish` until the last of 1, 2 or 4 of them said so here. Beside the media: bare pyzmq (nothing
verified or loaded).

The bare copy is torch's `copy_` of the same number of bytes between two warm buffers, with all cores; one is made in every
round, and a ratio is the median of the rounds' ratios. The processes have the environment that a run gives its own
(`child_environment`), with as many threads as there are cores.

- `shm_vs_two_copies`: bytes a second over shared memory, live, over those of two bare copies.
- `zeromq_vs_bare`: bytes a second fetched and verified over the `zeromq` medium, over those of bare pyzmq in turns with it.
- `delta_bytes`: see weight_costs.py.
- `learner_blocked_copies`: bare copies for which `publish` held the learner up.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec
import torch

from asyncrl.config.broadcast import BroadcastConfig, FilesMedium, GlooMedium, SharedMemoryMedium, ZeroMQMedium
from asyncrl.control.launch.processes import ProcessSpec, child_environment
from asyncrl.errors import ConfigError
from benchmarks.harness import BenchResult, Ratio, ratio, seconds_of
from benchmarks.subscribers import MediumWay, Subscribers, bare_zeromq, scratch_folder
from benchmarks.weight_costs import delta_costs
from benchmarks.workload import smollm2_model

SHM_GOAL, ZEROMQ_GOAL, DELTA_GOAL, BLOCKED_GOAL = 0.8, 0.7, 0.03, 1.5
DEFAULT_ROUNDS = 5
COUNTS = (1, 2, 4)
NUM_TRAIN_STEPS = 4
TIME_LIMIT_S = 600.0

MEDIA: dict[str, BroadcastConfig] = {
    "shared_memory": BroadcastConfig(medium=SharedMemoryMedium()),
    "zeromq": BroadcastConfig(medium=ZeroMQMedium()),
    "zeromq_curve": BroadcastConfig(medium=ZeroMQMedium()),
    "gloo": BroadcastConfig(medium=GlooMedium()),
    "files": BroadcastConfig(medium=FilesMedium()),
}
"""What `--media` can name."""

Rounds = dict[str, list[float]]


def run(rounds: int = 0, media: str = "all") -> BenchResult:
    """Measure in a process with a run's environment, and return medians.

    Args:
        rounds: Measured rounds for one subscriber, after one that warms up; 0: 5. For two and four it is half as many.
        media: `all`, or names of MEDIA with commas between.

    Raises:
        ConfigError: A name is unknown.
    """
    names = chosen(media)
    cores = os.cpu_count() or 1
    command = (sys.executable, "-m", "benchmarks.broadcast", str(rounds or DEFAULT_ROUNDS), ",".join(names))
    spec = ProcessSpec("bench", "learner", 1, command, Path(os.devnull), cores)
    environment = child_environment(os.environ, spec)
    said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=TIME_LIMIT_S)
    return msgspec.json.decode(said.stdout.splitlines()[-1], type=BenchResult)


def chosen(media: str) -> list[str]:
    """Return the names that `media` asks for. Raises ConfigError for an unknown one."""
    names = list(MEDIA) if media == "all" else [name.strip() for name in media.split(",")]
    if unknown := [name for name in names if name not in MEDIA]:
        raise ConfigError(f"no medium {unknown[0]!r} to measure; there are all, {', '.join(MEDIA)}")
    return names


def measure(rounds: int, names: list[str], counts: tuple[int, ...] = COUNTS) -> BenchResult:
    """Measure here; `run` says what."""
    weights = {name: tensor.detach() for name, tensor in smollm2_model(torch.bfloat16).named_parameters()}
    samples = _hand_overs(weights, rounds, names, counts)
    figures = {name: round(statistics.median(values), 3) for name, values in samples.items() if not name.endswith("_copies")}
    ratios = _ratios_of(samples)
    if "shared_memory" in names:
        costs = delta_costs(NUM_TRAIN_STEPS)
        ratios["delta_bytes"] = ratio(round(costs.pop("delta_bytes"), 5), DELTA_GOAL, at_least=False)
        figures |= costs
    return BenchResult("broadcast", {"model_bytes": num_bytes_of(weights), "rounds": rounds, **figures}, ratios)


def _ratios_of(samples: Rounds) -> dict[str, Ratio]:
    ratios: dict[str, Ratio] = {}
    if copies := samples.get("shared_memory_live_copies"):
        ratios["shm_vs_two_copies"] = ratio(round(2 / statistics.median(copies), 3), SHM_GOAL)
        blocked = statistics.median(samples["shared_memory_blocked_copies"])
        ratios["learner_blocked_copies"] = ratio(round(blocked, 3), BLOCKED_GOAL, at_least=False)
    if fetches := samples.get("zeromq_fetch_ms"):
        shares = [bare / fetch for bare, fetch in zip(samples["bare_zeromq_live_ms"], fetches, strict=True)]
        ratios["zeromq_vs_bare"] = ratio(round(statistics.median(shares), 3), ZEROMQ_GOAL)
    return ratios


def _hand_overs(weights: dict[str, torch.Tensor], rounds: int, names: list[str], counts: tuple[int, ...]) -> Rounds:
    """Return what every measured round of every medium gave, for each number of subscribers, by figure."""
    num_bytes, samples = num_bytes_of(weights), defaultdict[str, list[float]](list)
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)

    def one_round(way: MediumWay, name: str, count: int) -> dict[str, float]:
        copy_ms, told = seconds_of(partial(target.copy_, source)) * 1e3, way.hand_over(weights, count)
        prefix = name if count == 1 else f"{name}_{count}"
        figures = {f"{prefix}_{figure}": value for figure, value in told.items() if count == 1 or figure == "live_ms"}
        figures |= {f"{prefix}_{figure}_copies": told[f"{figure}_ms"] / copy_ms for figure in ("live", "blocked")}
        if prefix == "zeromq":
            figures |= {f"bare_zeromq_{figure}": value for figure, value in bare().items()}
        return figures | {"copy_ms": copy_ms}

    with (
        scratch_folder() as folder,
        contextlib.closing(Subscribers(max(counts))) as peers,
        bare_zeromq(num_bytes, peers) as bare,
    ):
        for name, count in itertools.product(names, counts):
            sys.stderr.write(f"measuring {name} with {count}\n")
            opened = MediumWay(MEDIA[name], folder / f"{name}-{count}", peers, is_encrypted=name.endswith("_curve"))
            with contextlib.closing(opened) as way:
                # Mappings, buffers and connections are made in the first, which is not counted.
                measured = [one_round(way, name, count) for _ in range((rounds if count == 1 else -(-rounds // 2)) + 1)][1:]
            for figure, value in itertools.chain.from_iterable(figures.items() for figures in measured):
                samples[figure].append(value)
    return samples


def num_bytes_of(weights: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in weights.values())


if __name__ == "__main__":
    started_s = time.perf_counter()
    outcome = measure(int(sys.argv[1]), sys.argv[2].split(","))
    outcome.figures["bench_s"] = round(time.perf_counter() - started_s, 1)
    sys.stdout.write(msgspec.json.encode(outcome).decode() + "\n")
