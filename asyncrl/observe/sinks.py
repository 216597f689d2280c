"""Where a step's metrics go: one `Sink` a destination, opened by config, fed once a step by the controller.

Invariants: metrics.jsonl is always written; a heavy library (wandb, tensorboard) is imported only when its sink is asked for, in
that sink's file; a missing one is a ConfigError that names the extra to install, raised before the run starts.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.observe.metrics import find_metric, finite, unknown_names
from asyncrl.observe.samples import SampleRow, SamplesFile
from asyncrl.observe.steps import JsonLines

log = logging.getLogger(__name__)


class Sink(Protocol):
    """One destination."""

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Take one step's metrics, named as in metrics.py."""
        ...

    def write_samples(self, step: int, time_s: float, rows: Sequence[SampleRow]) -> None:
        """Take some of one step's samples, where the destination shows text."""
        ...

    def close(self) -> None:
        """Get everything out; nothing is written after it."""
        ...


class MetricSinks:
    """All destinations of a run, behind one `write`."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks
        self._newest: dict[str, float] = {}
        self._told: set[str] = set()

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Hand one step's metrics to every destination; a name that the table does not know is logged once and kept."""
        unknown = set(unknown_names(values)) - self._told
        if unknown:
            self._told |= unknown
            log.warning("metrics that observe/metrics.py does not list: %s", ", ".join(sorted(unknown)))
        self._newest |= {**values, "step": step}
        for sink in self._sinks:
            sink.write(step, time_s, values)

    def write_samples(self, step: int, time_s: float, rows: Sequence[SampleRow]) -> None:
        """Hand some of one step's samples, if there are any, to every destination."""
        for sink in self._sinks if rows else ():
            sink.write_samples(step, time_s, rows)

    def prometheus_text(self) -> str:
        """Return the newest value of every metric in Prometheus' text form; after `close`, too: a scrape may still come."""
        return render_prometheus({"": self._newest})

    def close(self) -> None:
        """Close every destination, whatever becomes of the others."""
        with contextlib.ExitStack() as closing:
            for sink in self._sinks:
                closing.callback(sink.close)


def open_sinks(config: RunConfig, run_folder: Path) -> MetricSinks:
    """Open what `config.observe` asks for.

    Raises:
        ConfigError: A destination needs a package that is not installed.
    """
    sinks: list[Sink] = []
    try:
        sinks.append(JsonlSink(run_folder))
        if config.observe.tensorboard:
            sinks.append(_optional("sink_tensorboard", extra="tensorboard").TensorBoardSink(run_folder / "tensorboard"))
        if config.observe.wandb != "off":
            sinks.append(_optional("sink_wandb", extra="wandb").WandbSink(config, run_folder))
    except BaseException:
        MetricSinks(sinks).close()
        raise
    return MetricSinks(sinks)


def _optional(module: str, *, extra: str) -> Any:  # noqa: ANN401 - a module
    try:
        return importlib.import_module(f"asyncrl.observe.{module}")
    except ModuleNotFoundError as error:
        raise ConfigError(f"observe.{extra} needs the package {error.name!r}: pip install 'asyncrl[{extra}]'") from error


class MetricsRow(msgspec.Struct, frozen=True):
    """One line."""

    step: int
    time_s: float
    metrics: dict[str, float]
    """Finite ones only: JSON has no word for the others."""


class JsonlSink:
    """Appends to metrics.jsonl and samples.jsonl."""

    def __init__(self, run_folder: Path) -> None:
        self._lines: JsonLines[MetricsRow] = JsonLines(run_folder / "metrics.jsonl")
        self._samples = SamplesFile(run_folder)

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Append one line."""
        self._lines.write(MetricsRow(step, time_s, finite(values)))

    def write_samples(self, step: int, time_s: float, rows: Sequence[SampleRow]) -> None:  # noqa: ARG002 - the rows have it
        """Append a line a sample."""
        self._samples.write(rows)

    def close(self) -> None:
        """Close the files."""
        self._samples.close()
        self._lines.close()


def render_prometheus(by_labels: Mapping[str, Mapping[str, float]]) -> str:
    """Return metrics as exposition text, members of a family under one header.

    Args:
        by_labels: Values by name, under the labels that each of them gets (`run="a"`); empty: none.
    """
    by_header: dict[str, list[str]] = {}
    for labels, name, value in sorted(
        (labels, name, value) for labels, values in by_labels.items() for name, value in values.items()
    ):
        metric = find_metric(name)
        family = metric is not None and metric.is_family
        stem, _, key = name.rpartition("/") if family else (name, "", "")
        exposed = "asyncrl_" + re.sub(r"[^a-zA-Z0-9_]", "_", stem)
        escaped = key.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        label = ",".join([labels] * bool(labels) + [f'key="{escaped}"'] * family)
        label = f"{{{label}}}" if label else ""
        meaning = f"# HELP {exposed} {metric.meaning} ({metric.unit})\n" if metric else ""
        by_header.setdefault(f"{meaning}# TYPE {exposed} gauge\n", []).append(f"{exposed}{label} {_number(value)}")
    return "".join(header + "\n".join(lines) + "\n" for header, lines in by_header.items())


def _number(value: float) -> str:
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(str(float(value)), repr(float(value)))
