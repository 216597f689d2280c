"""Metrics to TensorBoard event files under RUN/tensorboard. The only file that imports tensorboard; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoardSink:
    """Writes scalars."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Queue one event of all values."""
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(step=step, wall_time=time_s, summary=Summary(value=scalars)))

    def close(self) -> None:
        """Write what is queued and end the writer's thread."""
        self._writer.close()
