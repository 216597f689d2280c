"""The newest metrics in Prometheus' text exposition form, for GET /metrics of the run's API. Needs no package.

A metric `stage/noun` is `asyncrl_stage_noun`; a family's last part is the label `key`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from asyncrl.observe.metrics import Metric, find_metric

CONTENT_TYPE = "text/plain; version=0.0.4"


class PrometheusSink:
    """Remembers the newest value of every metric."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._step = 0

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:  # noqa: ARG002 - the scrape has its own time
        """Replace the values that are given."""
        self._step = step
        self._values.update(values)

    def text(self) -> str:
        """Return everything as it stands."""
        return render_prometheus({"step": self._step, **self._values})

    def close(self) -> None:
        """Keep the last values: a scrape may still come."""


def render_prometheus(values: Mapping[str, float]) -> str:
    """Return metrics as exposition text, members of a family under one header."""
    by_header: dict[str, list[str]] = {}
    for name, value in sorted(values.items()):
        metric = find_metric(name)
        family = metric is not None and metric.is_family
        stem, _, key = name.rpartition("/") if family else (name, "", "")
        exposed = "asyncrl_" + re.sub(r"[^a-zA-Z0-9_]", "_", stem)
        label = f'{{key="{_escaped(key)}"}}' if family else ""
        by_header.setdefault(_header(exposed, metric), []).append(f"{exposed}{label} {_number(value)}")
    return "".join(header + "\n".join(lines) + "\n" for header, lines in by_header.items())


def _header(exposed: str, metric: Metric | None) -> str:
    meaning = f"# HELP {exposed} {metric.meaning} ({metric.unit})\n" if metric else ""
    return f"{meaning}# TYPE {exposed} gauge\n"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(str(float(value)), repr(float(value)))
