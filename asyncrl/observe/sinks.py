"""Destinations of the metrics: one `Sink` per destination. The config chooses them, and each receives every step once.

Alarms are sent to a webhook if the config has one.

Invariants: metrics.jsonl is always written. A large library (wandb, tensorboard) is imported only when its sink is opened, and in
no other file. If it is missing, a ConfigError that names the extra to install is raised before the run starts.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import queue
import re
import secrets
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import msgspec

from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.folders import write_whole
from asyncrl.observe.metrics import COUNTERS, find_metric, finite, unknown_names
from asyncrl.observe.samples import MOST_FILE_BYTES, SAMPLES_FILE, SampleRow
from asyncrl.observe.steps import JsonLines

log = logging.getLogger(__name__)

MOST_WAITING = 100
WEBHOOK_TRIES, WEBHOOK_TIMEOUT_S, WEBHOOK_PAUSE_S = 3, 5.0, 1.0
"""The pause doubles after each try."""
WEBHOOK_CLOSE_S = 10.0
"""Most time for posting the waiting alarms when the run ends."""


class Sink(Protocol):
    """One destination."""

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Write the metrics of one step, named as in metrics.py."""
        ...

    def write_samples(self, step: int, time_s: float, rows: Sequence[SampleRow]) -> None:
        """Write some samples of one step, if the destination shows text."""
        ...

    def close(self) -> None:
        """Flush everything; nothing is written afterwards."""
        ...


class MetricsRow(msgspec.Struct, frozen=True):
    """One line of metrics.jsonl."""

    step: int
    time_s: float
    metrics: dict[str, float]
    """Only finite values, because JSON cannot represent the others."""


class MetricSinks:
    """metrics.jsonl, samples.jsonl and all other destinations of a run, behind one `write`."""

    def __init__(self, run_folder: Path, others: Sequence[Sink] = ()) -> None:
        self._metrics: JsonLines[MetricsRow] = JsonLines(run_folder / "metrics.jsonl")
        self._samples: JsonLines[SampleRow] = JsonLines(run_folder / SAMPLES_FILE, MOST_FILE_BYTES)
        self._others = others
        self._newest: dict[str, float] = {}
        self._told: set[str] = set()

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Pass one step's metrics to every destination; a name that is not in the table is logged once and kept."""
        unknown = set(unknown_names(values)) - self._told
        if unknown:
            self._told |= unknown
            log.warning("metrics that observe/metrics.py does not list: %s", ", ".join(sorted(unknown)))
        newest = newest_values(self._newest, values)
        self._newest = {**newest, "step": newest.get("step", step)}  # kept if an evaluation's row comes, which may be late
        self._metrics.write(MetricsRow(step, time_s, finite(values)))
        for sink in self._others:
            sink.write(step, time_s, values)

    def write_samples(self, step: int, time_s: float, rows: Sequence[SampleRow]) -> None:
        """Pass some samples of one step, if there are any, to every destination."""
        self._samples.write(*rows)
        for sink in self._others if rows else ():
            sink.write_samples(step, time_s, rows)

    def prometheus_text(self) -> str:
        """Return the metrics of the newest step and the newest evaluation in the text format of Prometheus.

        This also works after `close`, because a scrape may still come.
        """
        return render_prometheus({"": self._newest}, {"step": "the newest optimizer step"})

    def close(self) -> None:
        """Close every destination, even if closing another one fails."""
        with contextlib.ExitStack() as closing:
            for close in (self._metrics.close, self._samples.close, *(sink.close for sink in self._others)):
                closing.callback(close)


class WandbSink:
    """Logs to one run of Weights & Biases with the name of our run: online, or into RUN/wandb for a later `wandb sync`.

    RUN/wandb/id holds its id, so that a resumed run goes on with it.
    """

    def __init__(self, config: RunConfig, run_folder: Path) -> None:
        wandb = import_module("wandb")
        self._table = wandb.Table
        file = run_folder / "wandb" / "id"
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            write_whole(file, secrets.token_hex(8))
        self._run = wandb.init(
            project=config.observe.wandb_project,
            name=config.name,
            id=file.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=str(run_folder),
            mode="online" if config.observe.wandb == "online" else "offline",
            config=without_secrets(config),
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True),
        )
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Log one step.

        The x axis of charts is our own value `version`, because the step of wandb must not decrease, and the evaluation of an
        earlier version may end later.
        """
        self._run.log({**values, "version": step, "time_s": time_s})

    def write_samples(self, step: int, time_s: float, rows: Sequence[SampleRow]) -> None:  # noqa: ARG002 - wandb has its own time
        """Log a table of samples."""
        table = self._table(columns=list(rows[0].cells), data=[[*({**row.cells, "reward": row.reward}).values()] for row in rows])
        self._run.log({"samples": table, "version": step + 1})

    def close(self) -> None:
        """Flush everything and end the process of wandb."""
        self._run.finish()


class TensorBoardSink:
    """Writes scalars and tables of samples to event files. It does not need torch."""

    def __init__(self, folder: Path) -> None:
        writer = import_module("tensorboard.summary.writer.event_file_writer")
        self._events = import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = import_module("tensorboard.compat.proto.summary_pb2")
        self._tensors = import_module("tensorboard.compat.proto.tensor_pb2")
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = writer.EventFileWriter(str(folder))

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Queue one event with all values."""
        scalars = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._events.Event(step=step, wall_time=time_s, summary=self._summaries.Summary(value=scalars)))

    def write_samples(self, step: int, time_s: float, rows: Sequence[SampleRow]) -> None:
        """Queue one event with a Markdown table."""
        table = [[cell.replace("|", "\\|").replace("\n", "<br>") for cell in row.cells.values()] for row in rows]
        lines = ["| " + " | ".join(line) + " |" for line in ([*rows[0].cells], ["---"] * len(rows[0].cells), *table)]
        text = self._tensors.TensorProto(dtype="DT_STRING", string_val=["\n".join(lines).encode()])
        metadata = self._summaries.SummaryMetadata(plugin_data=self._summaries.SummaryMetadata.PluginData(plugin_name="text"))
        value = self._summaries.Summary.Value(tag="samples", metadata=metadata, tensor=text)
        self._writer.add_event(
            self._events.Event(step=step + 1, wall_time=time_s, summary=self._summaries.Summary(value=[value]))
        )

    def close(self) -> None:
        """Write the queued events and end the writer's thread."""
        self._writer.close()


class Webhook:
    """Posts JSON to a URL on its own thread. A server that does not answer delays nothing. A full queue drops new values."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._waiting: queue.Queue[bytes] = queue.Queue(MOST_WAITING)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._post_all, name="webhook", daemon=True)
        self._thread.start()

    def tell(self, value: object) -> None:
        """Queue a value for posting."""
        try:
            self._waiting.put_nowait(msgspec.json.encode(value))
        except queue.Full:
            log.warning("observe.webhook: %d alarms wait to be posted, and one more is dropped", MOST_WAITING)

    def close(self) -> None:
        """Wait until every queued value was tried, at most WEBHOOK_CLOSE_S."""
        self._closing.set()
        self._thread.join(WEBHOOK_CLOSE_S)

    def _post_all(self) -> None:
        while not (self._closing.is_set() and self._waiting.empty()):
            with contextlib.suppress(queue.Empty):
                self._post(self._waiting.get(timeout=0.2))

    def _post(self, body: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, body, headers, method="POST")  # noqa: S310 - the config allows http(s) only
        for tried in range(1, WEBHOOK_TRIES + 1):
            try:
                urllib.request.urlopen(request, timeout=WEBHOOK_TIMEOUT_S).close()  # noqa: S310 - the same
            except (OSError, http.client.HTTPException, ValueError) as error:
                # The URL may be a secret, so neither the URL nor the text of the error is logged.
                log.warning(
                    "observe.webhook: an alarm could not be posted, try %d of %d: %s", tried, WEBHOOK_TRIES, type(error).__name__
                )
                self._closing.wait(WEBHOOK_PAUSE_S * 2 ** (tried - 1))
            else:
                return


def open_sinks(config: RunConfig, run_folder: Path) -> MetricSinks:
    """Open the destinations that `config.observe` requests.

    Raises:
        ConfigError: A destination needs a package that is not installed.
    """
    others: list[Sink] = []
    extra = "tensorboard"
    try:
        if config.observe.tensorboard:
            others.append(TensorBoardSink(run_folder / "tensorboard"))
        extra = "wandb"
        if config.observe.wandb != "off":
            others.append(WandbSink(config, run_folder))
    except ModuleNotFoundError as error:
        MetricSinks(run_folder, others).close()
        raise ConfigError(f"observe.{extra} needs the package {error.name!r}: pip install 'asyncrl[{extra}]'") from error
    return MetricSinks(run_folder, others)


def newest_values(before: Mapping[str, float], values: Mapping[str, float]) -> dict[str, float]:
    """Return the newest values after a row of metrics: an evaluation's row is added, a step's row replaces all but `eval/*`."""
    is_of_step = any(not name.startswith("eval/") for name in values)
    return {**{name: value for name, value in before.items() if not is_of_step or name.startswith("eval/")}, **values}


def without_secrets(config: RunConfig) -> dict[str, Any]:
    """Return a config as plain values, without secrets: the webhook and the values of environment variables are empty."""
    plain: dict[str, Any] = msgspec.to_builtins(config)
    plain["observe"]["webhook"] = ""
    if environment := plain["launch"].get("environment"):
        environment["env_vars"] = dict.fromkeys(environment["env_vars"], "")
    return plain


def label_text(value: str) -> str:
    """Return a label's value, escaped for quotation marks in the text format of Prometheus."""
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def render_prometheus(by_labels: Mapping[str, Mapping[str, float]], meanings: Mapping[str, str]) -> str:
    """Return metrics in the text format of Prometheus; a family has one header, and names of counters end in `_total`.

    Args:
        by_labels: Values by name, for each set of labels (`run="a"`; the empty string: no label).
        meanings: Meanings of names that are not in metrics.py.
    """
    families: dict[str, tuple[str, dict[str, str]]] = {}
    for labels, name, value in sorted(
        (labels, name, value) for labels, values in by_labels.items() for name, value in values.items()
    ):
        metric = find_metric(name)
        family = metric is not None and metric.name.endswith("/*")
        stem = metric.name.removesuffix("/*") if metric is not None else name
        key = name[len(stem) + 1 :]
        kind, suffix = ("counter", "_total") if metric is not None and metric.name in COUNTERS else ("gauge", "")
        exposed = f"asyncrl_{re.sub(r'[^a-zA-Z0-9_]', '_', stem)}{suffix}"
        label = ",".join([labels] * bool(labels) + [f'key="{label_text(key)}"'] * family)
        label = f"{{{label}}}" if label else ""
        shown = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(str(float(value)), repr(float(value)))
        meaning = f"{metric.meaning} ({metric.unit})" if metric else meanings.get(name, "a name that is not asyncrl's own")
        _, lines = families.setdefault(exposed, (f"# HELP {exposed} {meaning}\n# TYPE {exposed} {kind}\n", {}))
        lines.setdefault(label, f"{exposed}{label} {shown}\n")  # if two names become equal here, the first value is kept
    return "".join(header + "".join(lines.values()) for header, lines in families.values())
