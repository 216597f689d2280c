"""Which benchmarks there are, how one is run by name, and what it says: figures with units, and ratios of two sides.

Each benchmark is a module with `run(rounds: int = 0) -> BenchResult`, where 0 rounds means its own number; further arguments are
its options. Both sides of a ratio are measured in the same run, in turns, so that a slow minute of the machine hits both; what is
compared is the median of several rounds. `asyncrl bench NAME --json` prints the result as one JSON object.
"""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import msgspec

from asyncrl.errors import ConfigError

T = TypeVar("T")

BENCHMARKS = (
    "transport", "ledger", "broadcast", "engine", "pipeline", "packing", "learner", "residency", "controller", "rewards",
)  # fmt: skip
SPAWN = multiprocessing.get_context("spawn")
LIMIT_S = 1200.0
"""For what is measured in a process of its own."""


class Ratio(msgspec.Struct, frozen=True):
    """One side over the other, against what was asked for."""

    value: float
    goal: float
    holds: bool


class BenchResult(msgspec.Struct, frozen=True):
    """One benchmark's outcome."""

    bench: str
    figures: dict[str, float]
    """Name with unit (`durable_samples_per_s`, `publish_ms`) to value."""
    ratios: dict[str, Ratio]


def run_benchmark(name: str, rounds: int = 0, **options: str) -> dict[str, Any]:
    """Run one benchmark and return `{bench, figures, ratios}` as plain values.

    It leaves the number of threads and the environment of this process changed.

    Args:
        name: One of `BENCHMARKS`.
        rounds: Measured rounds; 0: the benchmark's own number.
        options: Further arguments of its `run`.

    Raises:
        ConfigError: There is no benchmark of that name, or it does not take that option.
    """
    if name not in BENCHMARKS:
        raise ConfigError(f"no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    run = importlib.import_module(f"benchmarks.{name}").run
    if unknown := sorted(options.keys() - inspect.signature(run).parameters):
        raise ConfigError(f"benchmark {name!r} takes no --{unknown[0]}")
    plain: dict[str, Any] = msgspec.to_builtins(run(rounds, **options))
    return plain


def ratio(value: float, goal: float, *, at_least: bool = True) -> Ratio:
    """Return a ratio judged against its goal: `value >= goal`, or `value <= goal` with `at_least=False`."""
    return Ratio(value=value, goal=goal, holds=value >= goal if at_least else value <= goal)


def seconds_of(action: Callable[[], object]) -> float:
    """Return how many seconds one call of `action` takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def interleaved(sides: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 1) -> dict[str, float]:
    """Measure every side once a round, in turns, after rounds of warm-up that are thrown away; return each side's median."""
    return medians([{name: measure() for name, measure in sides.items()} for _ in range(warmup + rounds)][warmup:])


def seconds_in_turns(sides: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 1) -> dict[str, float]:
    """Return the median seconds that a call of each side takes; see `interleaved`."""
    return interleaved({name: partial(seconds_of, side) for name, side in sides.items()}, rounds, warmup)


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure over the rounds."""
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def in_process(work: Callable[..., T], *arguments: object) -> T:
    """Return what `work` returns in a new process.

    Raises:
        EOFError: It raised; its standard error has the traceback.
        TimeoutError: It took longer than LIMIT_S.
    """
    ours, theirs = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=_work, args=(theirs, work, *arguments))
    process.start()
    theirs.close()
    try:
        if not ours.poll(LIMIT_S):
            process.kill()
            raise TimeoutError(f"{work.__name__} was not done after {LIMIT_S:.0f} s")
        result: T = ours.recv()
    finally:
        process.join()
    return result


def _work(pipe: Connection, work: Callable[..., object], *arguments: object) -> None:
    os.dup2(2, 1)  # standard output is for the result; gloo, for one, writes there
    pipe.send(work(*arguments))
