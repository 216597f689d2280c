"""MATHS: pure functions in registries. Values in, values out; no files, no clocks, no logging."""
