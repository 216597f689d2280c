"""Spans are made of what the processes say anyway, and a trace of them opens in Perfetto."""

from __future__ import annotations

import json
from pathlib import Path

from asyncrl.observe.spans import (
    GENERATE,
    Span,
    publish_span,
    read_spans,
    sample_span,
    score_span,
    step_spans,
    swap_span,
    trace_events,
    write_trace,
)
from asyncrl.schema.batches import StepDone
from asyncrl.schema.samples import Score
from asyncrl.schema.weights import VersionLive, WeightsAvailable, WeightsManifest
from tests.builders import make_sample


def test_sample_span_tells_length_and_versions() -> None:
    made = sample_span(make_sample(3, 1, [5, 6, 7], versions=[4, 4, 6], generator="generator-1", started_s=10.0, finished_s=12.5))
    assert (made.process, made.start_s, made.end_s) == ("generator-1", 10.0, 12.5)
    assert made.attributes == {"group": 3, "index": 1, "tokens": 3, "oldest_version": 4, "newest_version": 6, "purpose": "train"}


def test_step_has_its_wait_before_it() -> None:
    wait, step = step_spans(StepDone(4, 5, {}, started_s=10.0, finished_s=11.0, waited_s=2.0))
    assert (wait.name, wait.start_s, wait.end_s) == ("wait", 8.0, 10.0)
    assert (step.name, step.start_s, step.end_s, step.attributes["version"]) == ("step", 10.0, 11.0, 5)
    assert [item.name for item in step_spans(StepDone(4, 5, {}, 10.0, 11.0))] == ["step"]


def test_publish_swap_and_score_end_when_they_say_they_did() -> None:
    published = publish_span(WeightsAvailable(7, "files", "x", WeightsManifest((), 0), "", published_s=100.0, blocked_ms=250.0))
    swapped = swap_span(VersionLive(7, "generator-0", live_s=101.0, fetch_ms=400.0, swap_ms=100.0))
    scored = score_span(Score(1, 2, 1, reward=1.0, worker="reward-0", started_s=5.0, finished_s=6.0))
    assert (published.start_s, published.end_s, published.process) == (99.75, 100.0, "learner")
    assert (swapped.start_s, swapped.end_s, swapped.process) == (100.5, 101.0, "generator-0")
    assert (scored.start_s, scored.end_s, scored.process) == (5.0, 6.0, "reward-0")


def test_overlapping_spans_of_a_process_lie_on_rows_of_their_own() -> None:
    spans = [Span(GENERATE, 0.0, 2.0, "g"), Span(GENERATE, 1.0, 3.0, "g"), Span(GENERATE, 2.0, 4.0, "g")]
    rows = [(event.ts, event.tid) for event in trace_events(spans) if event.ph == "X"]
    assert rows == [(0.0, 0), (1e6, 1), (2e6, 0)]


def test_trace_is_valid_json_with_named_processes(run_folder: Path) -> None:
    trace = json.loads(write_trace(run_folder).read_text())
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert names == {"generator-0", "generator-1", "reward-0", "learner"}
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(complete) == len(list(read_spans(run_folder)))
    assert min(event.get("ts", 0.0) for event in complete) == 0.0
