"""Where a step's metrics go: one `Sink` a destination, opened by config, fed once a step by the controller.

Invariants: metrics.jsonl is always written; a heavy library (wandb, tensorboard) is imported only when its sink is asked for, in
that sink's file; a missing one is a ConfigError that names the extra to install, raised before the run starts.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.observe.metrics import find_metric, finite, unknown_names
from asyncrl.observe.samples import MOST_FILE_BYTES, SAMPLES_FILE, SampleRow
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


class MetricsRow(msgspec.Struct, frozen=True):
    """One line of metrics.jsonl."""

    step: int
    time_s: float
    metrics: dict[str, float]
    """Finite ones only: JSON has no word for the others."""


class MetricSinks:
    """metrics.jsonl and samples.jsonl of a run, and all other destinations, behind one `write`."""

    def __init__(self, run_folder: Path, others: Sequence[Sink] = ()) -> None:
        self._metrics: JsonLines[MetricsRow] = JsonLines(run_folder / "metrics.jsonl")
        self._samples: JsonLines[SampleRow] = JsonLines(run_folder / SAMPLES_FILE, MOST_FILE_BYTES)
        self._others = others
        self._newest: dict[str, float] = {}
        self._told: set[str] = set()

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Hand one step's metrics to every destination; a name that the table does not know is logged once and kept."""
        unknown = set(unknown_names(values)) - self._told
        if unknown:
            self._told |= unknown
            log.warning("metrics that observe/metrics.py does not list: %s", ", ".join(sorted(unknown)))
        self._newest |= {**values, "step": step}
        self._metrics.write(MetricsRow(step, time_s, finite(values)))
        for sink in self._others:
            sink.write(step, time_s, values)

    def write_samples(self, step: int, time_s: float, rows: Sequence[SampleRow]) -> None:
        """Hand some of one step's samples, if there are any, to every destination."""
        self._samples.write(*rows)
        for sink in self._others if rows else ():
            sink.write_samples(step, time_s, rows)

    def prometheus_text(self) -> str:
        """Return the newest value of every metric in Prometheus' text form; after `close`, too: a scrape may still come."""
        return render_prometheus({"": self._newest})

    def close(self) -> None:
        """Close every destination, whatever becomes of the others."""
        with contextlib.ExitStack() as closing:
            for close in (self._metrics.close, self._samples.close, *(sink.close for sink in self._others)):
                closing.callback(close)


def open_sinks(config: RunConfig, run_folder: Path) -> MetricSinks:
    """Open what `config.observe` asks for.

    Raises:
        ConfigError: A destination needs a package that is not installed.
    """
    others: list[Sink] = []
    extra = "tensorboard"
    try:
        if config.observe.tensorboard:
            from asyncrl.observe.sink_tensorboard import TensorBoardSink  # noqa: PLC0415 - heavy, and an extra

            others.append(TensorBoardSink(run_folder / "tensorboard"))
        extra = "wandb"
        if config.observe.wandb != "off":
            from asyncrl.observe.sink_wandb import WandbSink  # noqa: PLC0415 - heavy, and an extra

            others.append(WandbSink(config, run_folder))
    except ModuleNotFoundError as error:
        MetricSinks(run_folder, others).close()
        raise ConfigError(f"observe.{extra} needs the package {error.name!r}: pip install 'asyncrl[{extra}]'") from error
    return MetricSinks(run_folder, others)


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
        family = metric is not None and metric.name.endswith("/*")
        stem, _, key = name.rpartition("/") if family else (name, "", "")
        exposed = "asyncrl_" + re.sub(r"[^a-zA-Z0-9_]", "_", stem)
        escaped = key.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        label = ",".join([labels] * bool(labels) + [f'key="{escaped}"'] * family)
        label = f"{{{label}}}" if label else ""
        shown = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(str(float(value)), repr(float(value)))
        meaning = f"# HELP {exposed} {metric.meaning} ({metric.unit})\n" if metric else ""
        by_header.setdefault(f"{meaning}# TYPE {exposed} gauge\n", []).append(f"{exposed}{label} {shown}")
    return "".join(header + "\n".join(lines) + "\n" for header, lines in by_header.items())
