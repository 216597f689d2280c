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
from asyncrl.schema.samples import InferResult, Samples, Scores
from asyncrl.schema.weights import VersionLive, WeightsAvailable

SPANS_FILE = "spans.jsonl"
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


def spans_of(message: object, process: str = "learner") -> list[Span]:
    """Return the work that a message tells of, in order; nothing where it tells of none.

    Args:
        message: Samples, Scores, InferResult, StepDone, WeightsAvailable, VersionLive or PhaseReached.
        process: Who sent it, where it does not say so itself.
    """
    match message:
        case Samples():
            first, num_tokens = message.versions[:4], sum(message.lengths)
            alike = first if message.versions == first * num_tokens else message.versions  # nearly always all are of one version
            versions = memoryview(alike).cast("i") if alike and len(alike) % 4 == 0 else [-1]
            return [span(
                GENERATE, message.started_s, message.finished_s, message.generator, group=message.group_id,
                samples=len(message.indices), tokens=num_tokens, oldest_version=min(versions), newest_version=max(versions),
                purpose=message.purpose,
            )]  # fmt: skip
        case Scores() | InferResult():
            if isinstance(message, Scores):
                rewards = [score.reward for score in message.scores]
            else:
                rewards = [sum(message.rewards.values())]
            attributes = {"group": message.group_id, "samples": len(rewards), "reward": sum(rewards) / len(rewards)}
            return [span(SCORE, message.started_s, message.finished_s, message.worker, **attributes)]
        case StepDone(step, version):
            begin, waited_s = message.started_s, message.waited_s
            waits = [span(WAIT, begin - waited_s, begin, process, step=step)] if waited_s > 0 else []
            return [*waits, span(STEP, begin, message.finished_s, process, step=step, version=version)]
        case WeightsAvailable(version):  # the learner stood still; it ends when the version can be fetched
            start = message.published_s - message.blocked_ms / 1000
            return [span(PUBLISH, start, message.published_s, process, version=version)]
        case VersionLive(version):  # fetched and swapped in; it ends when the version was live
            start, took = message.live_s - (message.fetch_ms + message.swap_ms) / 1000, message.fetch_ms
            return [span(SWAP, start, message.live_s, message.generator, version=version, fetch_ms=took, swap_ms=message.swap_ms)]
        case PhaseReached():  # one move after the other, the last of them ending with the answer
            spans, end = [], message.finished_s
            for move in reversed(message.moves):
                spans.append(span(
                    PHASE, end - move.seconds, end, message.name, phase=message.phase, number=message.number,
                    component=move.component, before=move.before, after=move.after, bytes=move.num_bytes,
                ))  # fmt: skip
                end -= move.seconds
            return spans[::-1]
    return []


def read_spans(run_folder: Path) -> Iterator[Span]:
    """Return the spans of a run that are kept, in the order in which they were written."""
    return read_lines(run_folder / SPANS_FILE, Span)


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
