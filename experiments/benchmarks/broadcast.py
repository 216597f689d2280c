"""`asyncrl bench broadcast`: from publish to live in other processes, over every medium, beside what else moves the same bytes.

135M parameters in bfloat16, shaped like SmolLM2-135M (269 MB), held by this process (the learner). A subscriber is a process that
does what a generator does: fetch, compare fingerprints, copy every tensor into the weights it already holds. `live_ms` runs from
the call of `publish` until the last of 1, 2 or 4 of them said so here. Beside the media: `torch.save` and `torch.load` through a
file in memory, Ray's object store (copied into held weights too, not verified), and bare pyzmq (nothing verified or loaded).

The bare copy is torch's `copy_` of the same number of bytes between two warm buffers, with all cores; one is made in every
round, and a ratio is the median of the rounds' ratios. The processes have the environment that a run gives its own
(`child_environment`), with as many threads as there are cores.

- `shm_vs_two_copies`: bytes a second over shared memory, live, over those of two bare copies.
- `zeromq_vs_bare`: bytes a second fetched and verified over the `zeromq` medium, over those of bare pyzmq in turns with it.
- `delta_bytes`: see weight_costs.py. `pause_overhead_ms`: the pause there minus one bare copy.
- `learner_blocked_copies`: bare copies for which `publish` held the learner up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import msgspec
import torch

from asyncrl.config.broadcast import BroadcastConfig, DeltaConfig, FilesMedium, GlooMedium, SharedMemoryMedium, ZeroMQMedium
from asyncrl.control.launch.local import ProcessSpec, child_environment
from asyncrl.errors import ConfigError
from benchmarks.harness import BenchResult, Ratio, ratio, seconds_of
from benchmarks.subscribers import HandOver, MediumWay, Subscribers, bare_zeromq, file_hand_over, ray_store, scratch_folder
from benchmarks.weight_costs import delta_costs, pauses
from benchmarks.workload import smollm2_model

SHM_GOAL, ZEROMQ_GOAL, DELTA_GOAL, PAUSE_GOAL_MS, BLOCKED_GOAL = 0.8, 0.7, 0.03, 50.0, 1.5
DEFAULT_ROUNDS = 5
COUNTS = (1, 2, 4)
NUM_TRAIN_STEPS = 4
CHANGED_SHARE = 0.01
"""Of the elements, from one version to the next, where a delta is published: what RL steps change at most (`delta_bytes`)."""
TIME_LIMIT_S = 600.0

MEDIA: dict[str, BroadcastConfig] = {
    "shared_memory": BroadcastConfig(medium=SharedMemoryMedium()),
    "zeromq": BroadcastConfig(medium=ZeroMQMedium()),
    "zeromq_curve": BroadcastConfig(medium=ZeroMQMedium()),
    "gloo": BroadcastConfig(medium=GlooMedium()),
    "files": BroadcastConfig(medium=FilesMedium()),
    "shared_memory_delta": BroadcastConfig(medium=SharedMemoryMedium(), delta=DeltaConfig()),
    "zeromq_delta": BroadcastConfig(medium=ZeroMQMedium(), delta=DeltaConfig()),
}
"""What `--media` can name, beside `torch_save` and `ray`."""
OTHERS = ("torch_save", "ray")

Rounds = dict[str, list[float]]


def run(rounds: int = 0, media: str = "all") -> BenchResult:
    """Measure in a process with a run's environment, and return medians.

    Args:
        rounds: Measured rounds for one subscriber, after one that warms up; 0: 5. For two and four it is half as many.
        media: `all`, or names of MEDIA and OTHERS with commas between.

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
    known = [*MEDIA, *OTHERS]
    names = known if media == "all" else [name.strip() for name in media.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"no medium {unknown[0]!r} to measure; there are all, {', '.join(known)}")
    return names


def measure(rounds: int, names: list[str], counts: tuple[int, ...] = COUNTS) -> BenchResult:
    """Measure here; `run` says what."""
    weights = {name: tensor.detach() for name, tensor in smollm2_model(torch.bfloat16).named_parameters()}
    samples = _hand_overs(weights, rounds, names, counts)
    figures = {name: round(statistics.median(values), 3) for name, values in samples.items() if not name.endswith("_copies")}
    ratios = _ratios_of(samples)
    if "shared_memory" in names:
        pause = asyncio.run(pauses(rounds))
        figures["pause_ms"] = round(pause["pause_ms"], 3)
        ratios["pause_overhead_ms"] = ratio(round(pause["overhead_ms"], 2), PAUSE_GOAL_MS, at_least=False)
    if any(name.endswith("_delta") for name in names):
        costs = delta_costs(NUM_TRAIN_STEPS)
        ratios["delta_bytes"] = ratio(round(costs.pop("delta_bytes"), 5), DELTA_GOAL, at_least=False)
        figures |= costs
    return BenchResult("broadcast", {"model_bytes": _num_bytes(weights), "rounds": rounds, **figures}, ratios)


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
    """Return what every measured round of every way gave, for each number of subscribers, by figure."""
    samples, num_bytes = defaultdict[str, list[float]](list), _num_bytes(weights)
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    with contextlib.ExitStack() as opened:
        folder = opened.enter_context(scratch_folder(in_memory=True))
        peers = opened.enter_context(contextlib.closing(Subscribers(max(counts))))
        bare = opened.enter_context(bare_zeromq(num_bytes, peers))

        def measure_rounds(name: str, hand_over: HandOver | None, count: int) -> None:
            prefix = name if count == 1 else f"{name}_{count}"
            for number in range((rounds if count == 1 else -(-rounds // 2)) + 1):
                if hand_over is None:  # what hands over is not installed
                    return
                copy_ms, measured = seconds_of(partial(target.copy_, source)) * 1e3, hand_over(count)
                beside = bare() if prefix == "zeromq" else {}
                if number == 0:  # mappings, buffers and connections are made in the first
                    continue
                figures = {f"{prefix}_{figure}": value for figure, value in measured.items() if count == 1 or figure == "live_ms"}
                figures |= {f"{prefix}_{figure}_copies": measured[f"{figure}_ms"] / copy_ms for figure in ("live", "blocked")}
                figures |= {f"bare_zeromq_{figure}": value for figure, value in beside.items()} | {"copy_ms": copy_ms}
                for figure, value in figures.items():
                    samples[figure].append(value)

        for name in names:
            sys.stderr.write(f"measuring {name}\n")
            with _way(name, weights, folder, peers, max(counts)) as hand_over:
                for count in counts:
                    measure_rounds(name, hand_over, count)
    return samples


@contextlib.contextmanager
def _way(name: str, weights: dict[str, torch.Tensor], folder: Path, peers: Subscribers, most: int) -> Iterator[HandOver | None]:
    """Open one way, its files in `folder`; None where it is not there."""
    with contextlib.ExitStack() as opened:
        if name == "ray":
            yield opened.enter_context(ray_store(weights, most))
        elif name == "torch_save":
            yield lambda count: file_hand_over(weights, count, folder / "weights.pt", peers)
        else:
            on_disk = opened.enter_context(scratch_folder())
            way = MediumWay(MEDIA[name], on_disk / name, peers, is_encrypted=name.endswith("_curve"))
            opened.callback(way.close)
            given = _changing(weights) if MEDIA[name].delta else lambda: weights
            yield lambda count: way.hand_over(given(), count)


def _num_bytes(weights: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in weights.values())


def _changing(weights: dict[str, torch.Tensor]) -> Callable[[], Mapping[str, torch.Tensor]]:
    """Return what gives a copy of the weights in which, from call to call, CHANGED_SHARE of the elements differ."""
    changing = {name: tensor.clone() for name, tensor in weights.items()}
    generator = torch.Generator().manual_seed(0)

    def change() -> Mapping[str, torch.Tensor]:
        for tensor in changing.values():
            flat = tensor.view(torch.int16).view(-1)
            chosen_elements = torch.randint(flat.numel(), (int(flat.numel() * CHANGED_SHARE) + 1,), generator=generator)
            flat[chosen_elements] ^= 1
        return changing

    return change


if __name__ == "__main__":
    started_s = time.perf_counter()
    outcome = measure(int(sys.argv[1]), sys.argv[2].split(","))
    outcome.figures["bench_s"] = round(time.perf_counter() - started_s, 1)
    sys.stdout.write(msgspec.json.encode(outcome).decode() + "\n")
