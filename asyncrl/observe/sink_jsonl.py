"""Metrics to RUN/metrics.jsonl, one JSON object a step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from asyncrl.observe.metrics import finite
from asyncrl.observe.steps import JsonLines


class MetricsRow(msgspec.Struct, frozen=True):
    """One line."""

    step: int
    time_s: float
    metrics: dict[str, float]
    """Finite ones only: JSON has no word for the others."""


class JsonlSink:
    """Appends to a file."""

    def __init__(self, path: Path) -> None:
        self._lines: JsonLines[MetricsRow] = JsonLines(path)

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Append one line."""
        self._lines.write(MetricsRow(step, time_s, finite(values)))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
