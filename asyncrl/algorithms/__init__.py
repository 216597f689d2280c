"""MATHS: pure functions in registries."""
