"""WHAT WE SEE: log, metrics, spans, sinks."""
