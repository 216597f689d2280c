"""Benchmarks: one module each, listed here; `asyncrl bench NAME --json` runs one. Figures and ratios: bench/result.py.

A benchmark module has `run(*, quick: bool = False) -> BenchResult`; `quick` makes it small enough for a test.
"""

from __future__ import annotations

import importlib

import msgspec

from asyncrl.bench.result import BenchResult, Ratio, interleaved, interleaved_async, ratio
from asyncrl.errors import ConfigError

BENCHMARKS: dict[str, str] = {
    "transport": "asyncrl.bench.transport",
    "broadcast": "asyncrl.bench.broadcast",
    "engine": "asyncrl.bench.engine",
    "pipeline": "asyncrl.bench.pipeline",
}
"""Name to module."""


def run_benchmark(name: str, *, quick: bool = False) -> BenchResult:
    """Run one benchmark by name.

    Raises:
        ConfigError: There is no benchmark of that name.
    """
    if name not in BENCHMARKS:
        raise ConfigError(f"no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    outcome = importlib.import_module(BENCHMARKS[name]).run(quick=quick)
    return outcome if isinstance(outcome, BenchResult) else msgspec.convert(outcome, BenchResult)


__all__ = ["BENCHMARKS", "BenchResult", "Ratio", "interleaved", "interleaved_async", "ratio", "run_benchmark"]
