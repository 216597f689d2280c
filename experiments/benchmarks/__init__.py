"""Benchmarks, `asyncrl bench NAME --json`: one module each, listed in harness.py."""
