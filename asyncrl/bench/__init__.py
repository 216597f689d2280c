"""BENCHMARKS: both sides in one run, with the ratio."""
