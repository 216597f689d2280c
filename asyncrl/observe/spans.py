"""Who did what from when to when: one `Span` a line in spans.jsonl, and the Chrome / Perfetto trace made of them.

The controller writes every span: generators, reward workers and the learner time themselves and say so in the messages they send
anyway, so no process opens a second file, and all times are of clocks anchored alike (clock.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from asyncrl.observe.steps import read_lines
from asyncrl.schema.batches import StepDone
from asyncrl.schema.control import PhaseReached
from asyncrl.schema.samples import InferResult, Sample, Score
from asyncrl.schema.weights import VersionLive, WeightsAvailable

SPANS_FILE = "spans.jsonl"
OLD_SPANS_FILE = "spans.old.jsonl"
"""What `spans.jsonl` was before it grew too large; the one before that is gone."""
TRACE_FILE = "trace.json"

GENERATE: Final = "generate"
SCORE: Final = "score"
STEP: Final = "step"
WAIT: Final = "wait"
PUBLISH: Final = "publish"
SWAP: Final = "swap"
CHECKPOINT: Final = "checkpoint"
EVALUATE: Final = "evaluate"
PHASE: Final = "phase"


class Span(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One stretch of work."""

    name: str
    start_s: float
    """Clock seconds."""
    end_s: float
    process: str
    attributes: dict[str, float | str] = {}


def span(name: str, start: float, end: float, process: str, **attributes: float | str) -> Span:
    """Return a span; an end before its start (clocks of two machines) counts as the start."""
    return Span(name, start, max(start, end), process, attributes)


def sample_span(sample: Sample) -> Span:
    """Return the generation of one sample."""
    first, num_tokens = sample.versions[:4], sample.num_tokens
    alike = first if sample.versions == first * num_tokens else sample.versions  # nearly always all are of one version
    versions = memoryview(alike).cast("i") if num_tokens else [-1]
    attributes: dict[str, float | str] = {
        "group": sample.group_id, "index": sample.index, "tokens": num_tokens, "oldest_version": min(versions),
        "newest_version": max(versions), "purpose": sample.purpose,
    }  # fmt: skip
    return Span(GENERATE, sample.started_s, max(sample.started_s, sample.finished_s), sample.generator, attributes)


def score_span(answer: Score | InferResult) -> Span:
    """Return the judging of one sample by one worker."""
    reward = answer.reward if isinstance(answer, Score) else sum(answer.rewards.values())
    attributes: dict[str, float | str] = {"group": answer.group_id, "index": answer.index, "reward": reward}
    return Span(SCORE, answer.started_s, max(answer.started_s, answer.finished_s), answer.worker, attributes)


def step_spans(done: StepDone, process: str = "learner") -> list[Span]:
    """Return an optimizer step, and the wait for its batch before it where there was one."""
    spans = [span(STEP, done.started_s, done.finished_s, process, step=done.step, version=done.version)]
    if done.waited_s > 0:
        spans.insert(0, span(WAIT, done.started_s - done.waited_s, done.started_s, process, step=done.step))
    return spans


def publish_span(available: WeightsAvailable, process: str = "learner") -> Span:
    """Return how long the learner stood still to publish a version; ends when it became fetchable."""
    start = available.published_s - available.blocked_ms / 1000
    return span(PUBLISH, start, available.published_s, process, version=available.version)


def swap_span(live: VersionLive) -> Span:
    """Return a generator's fetch and swap of a version; ends when it was live."""
    start = live.live_s - (live.fetch_ms + live.swap_ms) / 1000
    return span(SWAP, start, live.live_s, live.generator, version=live.version, fetch_ms=live.fetch_ms, swap_ms=live.swap_ms)


def phase_span(phase: str, number: int, start: float, end: float) -> Span:
    """Return a phase of a shared device, or a switch between two, by the number of the switch that led to it."""
    return span(PHASE, start, end, "controller", phase=phase, number=number)


def move_spans(reached: PhaseReached) -> list[Span]:
    """Return the moves by which a process came into a phase, one after the other, the last of them ending with its answer."""
    spans, end = [], reached.finished_s
    for move in reversed(reached.moves):
        start = end - move.seconds
        spans.append(
            span(PHASE, start, end, reached.name, phase=reached.phase, number=reached.number, component=move.component,
                 before=move.before, after=move.after, bytes=move.num_bytes)
        )  # fmt: skip
        end = start
    return spans[::-1]


def read_spans(run_folder: Path) -> Iterator[Span]:
    """Yield the spans of a run that are kept, in the order in which they were written."""
    yield from read_lines(run_folder / OLD_SPANS_FILE, Span)
    yield from read_lines(run_folder / SPANS_FILE, Span)


def write_trace(run_folder: Path) -> Path:
    """Write trace.json beside spans.jsonl, for chrome://tracing or ui.perfetto.dev, and return its path."""
    path = run_folder / TRACE_FILE
    path.write_bytes(msgspec.json.encode({"traceEvents": list(trace_events(read_spans(run_folder))), "displayTimeUnit": "ms"}))
    return path


class TraceEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of the trace event format: `X` a complete event, `M` a name for a process or a row. Times in microseconds."""

    name: str
    ph: str
    pid: int
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, float | str] = {}


def trace_events(spans: Iterable[Span]) -> list[TraceEvent]:
    """Return spans as trace events: a process each, overlapping spans of one process on rows of their own."""
    ordered = sorted(spans, key=lambda item: (item.start_s, item.end_s))
    if not ordered:
        return []
    origin_s = ordered[0].start_s
    pids = {name: number for number, name in enumerate(sorted({item.process for item in ordered}), start=1)}
    events = [TraceEvent("process_name", "M", pid, args={"name": name}) for name, pid in pids.items()]
    rows_busy_until: dict[str, list[float]] = {name: [] for name in pids}
    for item in ordered:
        busy_until_s, pid = rows_busy_until[item.process], pids[item.process]
        row = next((row for row, until_s in enumerate(busy_until_s) if until_s <= item.start_s), len(busy_until_s))
        busy_until_s[row : row + 1] = [item.end_s]
        start_us, length_us = (round(seconds * 1e6, 3) for seconds in (item.start_s - origin_s, item.end_s - item.start_s))
        events.append(TraceEvent(item.name, "X", pid, row, start_us, length_us, item.attributes))
    return events
