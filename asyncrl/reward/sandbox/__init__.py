"""Model-written Python, run where it can do no harm and judged where it cannot reach."""
