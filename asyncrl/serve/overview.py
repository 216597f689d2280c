"""What is said of several runs at once: Prometheus' text, and runs beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.load import load_config
from asyncrl.observe.sinks import MetricsRow, label_text, render_prometheus
from asyncrl.observe.steps import read_steps
from asyncrl.serve.records import Records, RunRecord

MOST_SERIES = 300
"""Metrics of one run in /metrics, by name; how many more there are is a metric too."""
MOST_LINE_BYTES = 1 << 20
"""The end of metrics.jsonl, in which the newest line is looked for."""
LAST_STEPS = 50
"""Over which reward and staleness are compared."""


def metrics_text(records: Records, answered: Mapping[int, int]) -> str:
    """Return the newest metrics of every live run, and counts of the daemon: runs by state, requests by status (`answered`)."""
    runs = list(records.runs.values())
    states = {state: sum(run.state == state for run in runs) for state in ("queued", "starting", "live", "ended")}
    lines = ["# TYPE asyncrl_serve_runs gauge", *(f'asyncrl_serve_runs{{state="{name}"}} {n}' for name, n in states.items())]
    lines += ["# TYPE asyncrl_serve_requests_total counter"]
    lines += [f'asyncrl_serve_requests_total{{status="{status}"}} {n}' for status, n in sorted(answered.items())]
    newest: dict[str, dict[str, float]] = {}
    for run in runs:
        if run.state == "live":
            values = sorted(_newest_metrics(records.run_folder(run.id)).items())
            own = {"version": run.version, "serve_metrics_left_out": max(0, len(values) - MOST_SERIES)}
            newest[f'run="{label_text(run.id)}",project="{label_text(run.project)}"'] = {**dict(values[:MOST_SERIES]), **own}
    return "\n".join(lines) + "\n" + render_prometheus(newest)


def compared(records: Records, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return results of runs, and those settings in which they differ."""
    rows = [_row(records.runs[name], records.run_folder(name), records.config_file(name)) for name in names]
    keys = {key for row in rows for key in row["config"]}
    same = {key for key in keys if len({repr(row["config"].get(key)) for row in rows}) == 1}
    return [{**row, "config": {key: value for key, value in row["config"].items() if key not in same}} for row in rows]


def _row(record: RunRecord, folder: Path, config: Path) -> dict[str, Any]:
    steps = read_steps(folder)
    last, span_s = steps[-LAST_STEPS:], steps[-1].time_s - steps[0].time_s if len(steps) > 1 else 0.0
    return {
        "run": record.id,
        "outcome": record.outcome or record.state,
        "version": record.version,
        "accuracy_before": record.accuracy_before,
        "accuracy_after": record.accuracy_after,
        "reward": sum(step.reward_mean for step in last) / len(last) if last else None,
        "staleness": sum(step.staleness_mean for step in last) / len(last) if last else None,
        "steps_per_s": (len(steps) - 1) / span_s if span_s else None,
        "config": _flat(msgspec.to_builtins(load_config(config))),
    }


def _newest_metrics(folder: Path) -> dict[str, float]:
    """Return the metrics of a run's newest step."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MOST_LINE_BYTES))
        lines = file.read().splitlines()
    for line in reversed(lines):
        try:
            return msgspec.json.decode(line, type=MetricsRow).metrics
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return {}


def _flat(table: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return found
