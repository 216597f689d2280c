"""Which benchmarks there are, and how one is run by name."""

from __future__ import annotations

import importlib
from typing import Any

from asyncrl.bench.result import BenchResult
from asyncrl.errors import ConfigError

BENCHMARKS: dict[str, str] = {
    "transport": "asyncrl.bench.transport",
    "broadcast": "asyncrl.bench.broadcast",
    "engine": "asyncrl.bench.engine",
    "pipeline": "asyncrl.bench.pipeline",
    "packing": "asyncrl.bench.packing",
    "learner": "asyncrl.bench.learner",
    "residency": "asyncrl.bench.residency",
    "controller": "asyncrl.bench.controller",
}
"""Name to module; each has `run(rounds: int = 0) -> BenchResult`, where 0 rounds means the benchmark's own number."""
OPTIONS: dict[str, frozenset[str]] = {"engine": frozenset({"engine"}), "broadcast": frozenset({"media"})}
"""Further words that `run` of a benchmark takes, by its name."""


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
    outcome = importlib.import_module(BENCHMARKS[name]).run(rounds, **options)
    return outcome.to_dict() if isinstance(outcome, BenchResult) else dict(outcome)
