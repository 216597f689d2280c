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
}
"""Name to module; each has `run(rounds: int = 0) -> BenchResult`, where 0 rounds means the benchmark's own number."""


def run_benchmark(name: str, rounds: int = 0) -> dict[str, Any]:
    """Run one benchmark and return `{bench, figures, ratios}` as plain values.

    Raises:
        ConfigError: There is no benchmark of that name.
    """
    if name not in BENCHMARKS:
        raise ConfigError(f"no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    outcome = importlib.import_module(BENCHMARKS[name]).run(rounds)
    return outcome.to_dict() if isinstance(outcome, BenchResult) else dict(outcome)
