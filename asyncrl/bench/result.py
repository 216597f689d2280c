"""What a benchmark says: figures with units in their names, and ratios of two sides measured in one run.

Every benchmark module has `run(...) -> BenchResult`; `asyncrl bench NAME --json` prints `to_dict` of it as one JSON object.
Both sides are measured in the same process or run, in turns (`interleaved`), so that a slow minute of the machine hits both;
what is compared is the median of several rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec


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

    @property
    def holds(self) -> bool:
        """Return whether every ratio meets its goal."""
        return all(ratio.holds for ratio in self.ratios.values())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as `asyncrl bench` prints them."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    def to_json(self) -> str:
        """Return one line of JSON."""
        return msgspec.json.encode(self).decode()


def ratio(value: float, goal: float, *, at_least: bool = True) -> Ratio:
    """Return a ratio judged against its goal: `value >= goal`, or `value <= goal` with `at_least=False`."""
    return Ratio(value=value, goal=goal, holds=value >= goal if at_least else value <= goal)


def seconds_of(action: Callable[[], object]) -> float:
    """Return how many seconds one call of `action` takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def interleaved(sides: Mapping[str, Callable[[], float]], rounds: int = 5, warmup: int = 1) -> dict[str, float]:
    """Measure every side once a round, in turns, and return each side's median.

    Args:
        sides: Name to a function that measures once and returns the figure (seconds, or a rate).
        rounds: Measured rounds; odd, so that the median is a measurement.
        warmup: Rounds before them that are thrown away.

    Returns:
        Name to median figure.
    """
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(warmup + rounds):
        for name, measure in sides.items():
            figure = measure()
            if round_number >= warmup:
                measured[name].append(figure)
    return {name: statistics.median(figures) for name, figures in measured.items()}


async def interleaved_async(
    sides: Mapping[str, Callable[[], Awaitable[float]]], rounds: int = 5, warmup: int = 1
) -> dict[str, float]:
    """Do as `interleaved` does, for sides that are coroutines, one at a time."""
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(warmup + rounds):
        for name, measure in sides.items():
            figure = await measure()
            if round_number >= warmup:
                measured[name].append(figure)
    return {name: statistics.median(figures) for name, figures in measured.items()}
