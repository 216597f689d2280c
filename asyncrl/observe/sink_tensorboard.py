"""Metrics to TensorBoard event files under RUN/tensorboard. The only file that imports tensorboard; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from asyncrl.observe.samples import SampleRow


class TensorBoardSink:
    """Writes scalars and tables of samples."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Queue one event of all values."""
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(step=step, wall_time=time_s, summary=Summary(value=scalars)))

    def write_samples(self, step: int, time_s: float, rows: Sequence[SampleRow]) -> None:
        """Queue one event of a Markdown table."""
        table = [[cell.replace("|", "\\|").replace("\n", "<br>") for cell in row.cells.values()] for row in rows]
        lines = ["| " + " | ".join(line) + " |" for line in ([*rows[0].cells], ["---"] * len(rows[0].cells), *table)]
        text = TensorProto(dtype="DT_STRING", string_val=["\n".join(lines).encode()])
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        value = Summary.Value(tag="samples", metadata=metadata, tensor=text)
        self._writer.add_event(Event(step=step + 1, wall_time=time_s, summary=Summary(value=[value])))

    def close(self) -> None:
        """Write what is queued and end the writer's thread."""
        self._writer.close()
