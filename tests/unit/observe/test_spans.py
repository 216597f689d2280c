"""Spans are made of what the processes say anyway, and a trace of them opens in Perfetto."""

from __future__ import annotations

import json
from pathlib import Path

from asyncrl.observe.spans import read_spans, spans_of, write_trace
from asyncrl.schema.samples import Samples
from tests.builders import make_sample


def test_sample_span_tells_length_and_versions() -> None:
    sample = make_sample(3, 1, [5, 6, 7], versions=[4, 4, 6], generator="generator-1", started_s=10.0, finished_s=12.5)
    (made,) = spans_of(Samples.of([sample]))
    assert (made.process, made.start_s, made.end_s) == ("generator-1", 10.0, 12.5)
    assert made.attributes == {
        "group": 3,
        "samples": 1,
        "tokens": 3,
        "oldest_version": 4,
        "newest_version": 6,
        "purpose": "train",
    }


def test_trace_is_valid_json_with_named_processes(run_folder: Path) -> None:
    trace = json.loads(write_trace(run_folder).read_text())
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert names == {"generator-0", "generator-1", "reward-0", "learner"}
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(complete) == len(list(read_spans(run_folder)))
    assert min(event.get("ts", 0.0) for event in complete) == 0.0
