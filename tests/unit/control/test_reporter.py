"""What the controller's reports do when the disk is full; the rest is seen in whole runs (tests/integration)."""

from __future__ import annotations

import pytest

from asyncrl.clock import VirtualClock
from asyncrl.config.run import RunConfig
from asyncrl.control.reporter import Reporter
from asyncrl.observe.sinks import MetricSinks
from asyncrl.observe.spans import SPANS_FILE
from asyncrl.schema.samples import Score


class Destination:
    def __init__(self, error: str = "") -> None:
        self.error = error
        self.is_closed = False

    def write(self, step, time_s, values) -> None:
        """Take nothing."""

    def close(self) -> None:
        self.is_closed = True
        if self.error:
            raise OSError(self.error)


async def test_what_cannot_be_closed_keeps_nothing_else_open(tmp_path):
    (tmp_path / SPANS_FILE).symlink_to("/dev/full")
    sinks = [Destination(), Destination("no network"), Destination()]
    reporter = Reporter(RunConfig(), tmp_path, MetricSinks(sinks), VirtualClock())
    reporter.note_answer(Score(0, 0, 1, 1.0), None)
    with pytest.raises(OSError, match=r"No space left|no network"):
        await reporter.close(tmp_path)
    assert all(sink.is_closed for sink in sinks)
