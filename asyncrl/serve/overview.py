"""What is said of several runs at once: Prometheus' text, and runs beside each other."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from asyncrl.config.load import load_config
from asyncrl.observe.sinks import MetricsRow, label_text, render_prometheus
from asyncrl.observe.steps import read_steps
from asyncrl.serve.records import Records, RunRecord

T = TypeVar("T", bound=msgspec.Struct)
MOST_SERIES = 300
"""Metrics of one run in /metrics, by name; how many more there are is a metric too."""
MOST_LINE_BYTES = 1 << 20
"""The end of a file, in which its newest line is looked for."""
OWN_METRICS = {
    "version": "the run's policy version",
    "serve_metrics_left_out": "metrics of the run that are not here, as they are too many",
}
"""What the daemon says of each live run beside its metrics, and what it means."""
LAST_STEPS = 50
"""Over which reward and staleness are compared."""


class StepSeen(msgspec.Struct, frozen=True):
    """What the list of runs shows of a run's newest step; see `StepReport`."""

    step: int
    reward_mean: float
    staleness_mean: float
    staleness_max: int
    learner_idle: float
    generators_idle: float


def metrics_text(records: Records, answered: Mapping[int, int]) -> str:
    """Return the newest metrics of every live run, and counts of the daemon: runs by state, requests by status (`answered`)."""
    runs = list(records.runs.values())
    states = {state: sum(run.state == state for run in runs) for state in ("queued", "starting", "live", "ended")}
    lines = ["# HELP asyncrl_serve_runs runs of the daemon by state", "# TYPE asyncrl_serve_runs gauge"]
    lines += [f'asyncrl_serve_runs{{state="{name}"}} {n}' for name, n in states.items()]
    lines += ["# HELP asyncrl_serve_requests_total requests that the daemon has answered, by status"]
    lines += ["# TYPE asyncrl_serve_requests_total counter"]
    lines += [f'asyncrl_serve_requests_total{{status="{status}"}} {n}' for status, n in sorted(answered.items())]
    newest: dict[str, dict[str, float]] = {}
    for run in runs:
        if run.state == "live":
            row = newest_row(records.run_folder(run.id) / "metrics.jsonl", MetricsRow)
            values = sorted(row.metrics.items()) if row else []
            own = dict(zip(OWN_METRICS, (run.version, max(0, len(values) - MOST_SERIES)), strict=True))
            newest[f'run="{label_text(run.id)}",project="{label_text(run.project)}"'] = {**dict(values[:MOST_SERIES]), **own}
    return "\n".join(lines) + "\n" + render_prometheus(newest, OWN_METRICS)


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


def newest_row(path: Path, kind: type[T]) -> T | None:
    """Return the last row of a file of JSON lines; None: there is none."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MOST_LINE_BYTES))
        end = file.read()
    while end:
        end, _, line = end.rpartition(b"\n")
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            return msgspec.json.decode(line, type=kind)
    return None


def _flat(table: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return found
