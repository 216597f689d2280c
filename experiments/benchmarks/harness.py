"""Which benchmarks there are, how one is run by name, and what it says: figures with units, and ratios of two sides.

Each benchmark is a module with `run(rounds: int = 0) -> BenchResult`, where 0 rounds means its own number. Both sides of a ratio
are measured in the same run, in turns, so that a slow minute of the machine hits both; what is compared is the median of several
rounds. `asyncrl bench NAME --json` prints the result as one JSON object.
"""

from __future__ import annotations

import importlib
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import ConfigError

BENCHMARKS = (
    "transport",
    "ledger",
    "broadcast",
    "engine",
    "pipeline",
    "packing",
    "learner",
    "residency",
    "controller",
    "rewards",
)
OPTIONS: dict[str, frozenset[str]] = {
    "engine": frozenset({"engine"}),
    "broadcast": frozenset({"media"}),
    "learner": frozenset({"profile"}),
}
"""Further words that `run` of a benchmark takes, by its name."""


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

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as `asyncrl bench` prints them."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


def run_benchmark(name: str, rounds: int = 0, **options: str) -> dict[str, Any]:
    """Run one benchmark and return `{bench, figures, ratios}` as plain values.

    Args:
        name: One of `BENCHMARKS`.
        rounds: Measured rounds; 0: the benchmark's own number.
        options: As `OPTIONS` says.

    Raises:
        ConfigError: There is no benchmark of that name, or it does not take that option.
    """
    if name not in BENCHMARKS:
        raise ConfigError(f"no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    if unknown := sorted(options.keys() - OPTIONS.get(name, frozenset())):
        raise ConfigError(f"benchmark {name!r} takes no --{unknown[0]}")
    # What benchmarks start with `python -m benchmarks.NAME` finds this package too.
    here, before = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [before])])
    result: BenchResult = importlib.import_module(f"benchmarks.{name}").run(rounds, **options)
    return result.to_dict()


def ratio(value: float, goal: float, *, at_least: bool = True) -> Ratio:
    """Return a ratio judged against its goal: `value >= goal`, or `value <= goal` with `at_least=False`."""
    return Ratio(value=value, goal=goal, holds=value >= goal if at_least else value <= goal)


def seconds_of(action: Callable[[], object]) -> float:
    """Return how many seconds one call of `action` takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def interleaved(sides: Mapping[str, Callable[[], float]], rounds: int = 5, warmup: int = 1) -> dict[str, float]:
    """Measure every side once a round, in turns, after rounds of warm-up that are thrown away; return each side's median."""
    measured = [{name: measure() for name, measure in sides.items()} for _ in range(warmup + rounds)][warmup:]
    return medians(measured)


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure over the rounds."""
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
