"""Benchmarks, `asyncrl bench NAME --json`: one module each, listed in registry.py; figures and ratios in result.py."""
