"""Spans are made of what the processes say anyway, and a trace of them opens in Perfetto."""

import json
import random
from pathlib import Path

import msgspec
import pytest

from asyncrl.observe.spans import SPANS_FILE, UNTOLD, Timeline, read_spans, span, spans_of, write_trace
from asyncrl.observe.steps import JsonLines
from asyncrl.schema.samples import Samples
from tests.builders import make_sample


def test_sample_span_tells_length_and_versions() -> None:
    sample = make_sample(3, 1, [5, 6, 7], versions=[4, 4, 6], generator="generator-1", started_s=10.0, finished_s=12.5)
    (made,) = spans_of(Samples.of([sample]))
    assert (made.process, made.start_s, made.end_s) == ("generator-1", 10.0, 12.5)
    told = {"group": 3, "samples": 1, "tokens": 3, "oldest_version": 4, "newest_version": 6, "purpose": "train"}
    assert made.attributes == told


def test_trace_is_valid_json_with_named_processes(run_folder: Path) -> None:
    trace = json.loads(write_trace(run_folder).read_text())
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert names == {"generator-0", "generator-1", "reward-0", "learner"}
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(complete) == len(list(read_spans(run_folder)))
    assert min(event.get("ts", 0.0) for event in complete) == 0.0


def test_a_window_tells_many_spans_as_bins_that_add_up_to_the_same(tmp_path):
    source, spans = random.Random(0), []
    for number in range(1000):
        start = source.uniform(0, 100)
        spans.append(span("generate", start, start + source.uniform(0, 5), "generator-0", samples=number % 3 + 1))
    spans.sort(key=lambda one: one.start_s)
    spans += [span("swap", at, at + 1, "generator-0", version=at // 10) for at in range(0, 100, 10)]
    file = JsonLines(tmp_path / SPANS_FILE)
    file.write(*spans)
    first, timeline = spans[0].start_s, Timeline(tmp_path)
    window = timeline.window(20.0, 60.0, num_bins=40)
    tracks = {track.name: track for track in window["tracks"]}
    open_s = [0.0] * 40
    for one in spans[:1000]:
        for number in range(40):
            overlap = min(one.end_s - first, 21.0 + number) - max(one.start_s - first, 20.0 + number)
            open_s[number] += max(overlap, 0.0) * one.attributes["samples"]
    assert tracks["generate"].busy == pytest.approx(open_s, abs=1e-6)
    swaps = [one for one in spans if one.name == "swap"]
    live = [max((one.attributes["version"] for one in swaps if one.end_s - first <= 20.5 + n), default=-1) for n in range(40)]
    assert tracks["generate"].version == live
    inside = [one for one in swaps if one.end_s - first >= 20.0 and one.start_s - first <= 60.0]
    assert [row[0] for row in tracks["swap"].each] == [one.start_s - first for one in inside]
    file.write(span("step", first + 200, first + 201, "learner", version=3))
    file.close()
    (tmp_path / SPANS_FILE).rename(tmp_path / "spans.old.jsonl")  # as a full file is set behind
    with (tmp_path / SPANS_FILE).open("wb") as newer:
        newer.write(msgspec.json.encode(span("step", first + 300, first + 302, "learner", version=4)) + b'\n{"name":"st')
    gap, track = timeline.window(150.0)["tracks"]
    assert (track.each, track.seconds) == ([[200.0, 201.0, 3, 3, -1, -1], [300.0, 302.0, 4, 4, -1, -1]], pytest.approx(3.0))
    assert (gap.process, gap.name, gap.why, gap.each) == ("learner", "idle", UNTOLD, [[201.0, 300.0, -1, -1, -1, -1]])
    with (tmp_path / SPANS_FILE).open("ab") as newer:  # a wait that is told later takes the gap's place
        newer.write(b"\n" + msgspec.json.encode(span("wait", first + 201, first + 300, "learner")) + b"\n")
    assert {track.why for track in timeline.window(150.0)["tracks"]} == {"", "the batch of its next step"}
    (tmp_path / SPANS_FILE).rename(tmp_path / "spans.old.jsonl")  # the file before that goes, and with it what it alone had
    (tmp_path / SPANS_FILE).write_bytes(msgspec.json.encode(span("step", first + 310, first + 311, "learner", version=5)) + b"\n")
    kept = {(track.process, track.name): [row[0] for row in track.each] for track in timeline.window()["tracks"]}
    assert kept == {("learner", "step"): [300.0, 310.0], ("learner", "idle"): [302.0]}
