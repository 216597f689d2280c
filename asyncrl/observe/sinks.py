"""Where a step's metrics go: one `Sink` a destination, opened by config, fed once a step by the controller.

Invariants: metrics.jsonl is always written; a heavy library (wandb, tensorboard) is imported only when its sink is asked for, in
that sink's file; a missing one is a ConfigError that names the extra to install, raised before the run starts.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Protocol

from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.observe.metrics import unknown_names
from asyncrl.observe.sink_jsonl import JsonlSink
from asyncrl.observe.sink_prometheus import PrometheusSink

log = logging.getLogger(__name__)


class Sink(Protocol):
    """One destination."""

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Take one step's metrics, named as in metrics.py."""
        ...

    def close(self) -> None:
        """Get everything out; nothing is written after it."""
        ...


class MetricSinks:
    """All destinations of a run, behind one `write`."""

    def __init__(self, sinks: list[Sink], prometheus: PrometheusSink | None = None) -> None:
        self._prometheus = prometheus or PrometheusSink()
        self._sinks: list[Sink] = [*sinks, self._prometheus]
        self._told: set[str] = set()

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Hand one step's metrics to every destination; a name that the table does not know is logged once and kept."""
        unknown = set(unknown_names(values)) - self._told
        if unknown:
            self._told |= unknown
            log.warning("metrics that observe/metrics.py does not list: %s", ", ".join(sorted(unknown)))
        for sink in self._sinks:
            sink.write(step, time_s, values)

    def prometheus_text(self) -> str:
        """Return the newest values in Prometheus' text form."""
        return self._prometheus.text()

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
        sinks.append(JsonlSink(run_folder / "metrics.jsonl"))
        if config.observe.tensorboard:
            make: Callable[..., Sink] = _optional("sink_tensorboard", extra="tensorboard").TensorBoardSink
            sinks.append(make(run_folder / "tensorboard"))
        if config.observe.wandb != "off":
            make = _optional("sink_wandb", extra="wandb").WandbSink
            sinks.append(make(config, run_folder))
    except BaseException:
        MetricSinks(sinks).close()
        raise
    return MetricSinks(sinks)


def _optional(module: str, *, extra: str) -> ModuleType:
    try:
        return importlib.import_module(f"asyncrl.observe.{module}")
    except ModuleNotFoundError as error:
        raise ConfigError(f"observe.{extra} needs the package {error.name!r}: pip install 'asyncrl[{extra}]'") from error
