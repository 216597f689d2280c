"""Times of the work of every process: spans.jsonl with one `Span` per line, its Chrome / Perfetto trace, and time windows.

The controller writes every span. Generators, reward workers and the learner measure their own times and put them into messages
that they send anyway, so no process opens a second file. All clocks are anchored in the same way (clock.py).
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.observe.steps import NewLines, read_lines
from asyncrl.schema.control import PhaseReached
from asyncrl.schema.samples import InferResult, Samples, Scores, StepDone
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
IDLE: Final = "idle"


class Span(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One piece of work or one wait."""

    name: str
    start_s: float
    """Clock seconds."""
    end_s: float
    process: str
    attributes: dict[str, float | str] = {}


def span(name: str, start: float, end: float, process: str, **attributes: float | str) -> Span:
    """Return a span; if the end is before the start (clocks of two machines), the start is used as the end."""
    return Span(name, start, max(start, end), process, attributes)


def spans_of(message: object) -> list[Span]:
    """Return the spans that a message reports, in order; an empty list if it reports none.

    Args:
        message: Samples, Scores, InferResult, StepDone, WeightsAvailable, VersionLive or PhaseReached.
    """
    match message:
        case Samples():
            first, num_tokens = message.versions[:4], sum(message.lengths)
            alike = first if message.versions == first * num_tokens else message.versions  # nearly always all have one version
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
            waits = [span(WAIT, begin - waited_s, begin, "learner", step=step)] if waited_s > 0 else []
            return [*waits, span(STEP, begin, message.finished_s, "learner", step=step, version=version)]
        case WeightsAvailable(version):  # the learner stood still; it ends when the version can be fetched
            start = message.published_s - message.blocked_ms / 1000
            return [span(PUBLISH, start, message.published_s, "learner", version=version)]
        case VersionLive(version):  # fetched and swapped in; it ends when the version was live
            start, took = message.live_s - (message.fetch_ms + message.swap_ms) / 1000, message.fetch_ms
            return [span(SWAP, start, message.live_s, message.generator, version=version, fetch_ms=took, swap_ms=message.swap_ms)]
        case PhaseReached():  # the moves follow each other, and the last move ends at `finished_s`
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
    """Return the spans in a run's files, in the order in which they were written."""
    return read_lines(run_folder / SPANS_FILE, Span)


def write_trace(run_folder: Path) -> Path:
    """Write trace.json to the run folder, for chrome://tracing or ui.perfetto.dev, and return its path.

    Every process of the run is a process of the trace. Overlapping spans of one process are on separate rows. Times are
    microseconds since the first span.
    """
    ordered = sorted(read_spans(run_folder), key=lambda item: (item.start_s, item.end_s))
    pids = {name: number for number, name in enumerate(sorted({item.process for item in ordered}), start=1)}
    events: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}} for name, pid in pids.items()
    ]
    rows_busy_until: dict[str, list[float]] = {name: [] for name in pids}
    for item in ordered:
        busy_until_s = rows_busy_until[item.process]
        row = next((row for row, until_s in enumerate(busy_until_s) if until_s <= item.start_s), len(busy_until_s))
        busy_until_s[row : row + 1] = [item.end_s]
        start_us, length_us = (round(1e6 * s, 3) for s in (item.start_s - ordered[0].start_s, item.end_s - item.start_s))
        place = {"pid": pids[item.process], "tid": row, "ts": start_us, "dur": length_us}
        events.append({"name": item.name, "ph": "X", **place, "args": item.attributes})
    path = run_folder / TRACE_FILE
    path.write_bytes(msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))
    return path


MOST_SHOWN_SPANS = 300
"""Largest number of spans of a track that is returned span by span; a track with more spans is returned as bins."""
MOST_TRACKS = 200
MAX_BINS = 4000

UNTOLD = "its next work: no details are reported"
"""Reason of a gap in the spans of a process: a wait between two heartbeats, or the time between two pieces of work."""
LEAST_GAP_S = 1e-3

Rows = NDArray[np.float64]
"""[6, spans]: start and end in seconds since the run's first span, oldest and newest version, group, samples; -1: none."""


class Track(msgspec.Struct, frozen=True):
    """The spans of one process, one name and one reason within a window."""

    process: str
    name: str
    why: str
    """What the process waited for; empty if it did not wait."""
    spans: int
    seconds: float
    """Sum of the seconds of the spans within the window; it can be more than the window's length if spans overlap."""
    oldest: int
    newest: int
    """Newest version; -1: the spans have no version."""
    each: list[list[float]] | None
    """If there are few spans: one list per span, in the order of `Rows`."""
    busy: list[float] | None
    """If there are many spans: mean number of open samples (or spans, if they have no samples) in each bin."""
    version: list[int] | None
    """If there are many spans: version that was live at the process in the middle of each bin."""


class Timeline:
    """The spans in a run's files, held in memory and updated while the file grows. Any thread may use it.

    Args:
        run_folder: Folder of the run.
    """

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder
        self._lines, self._first_s = NewLines(run_folder / SPANS_FILE, from_old=True), math.inf
        self._first_kept: Span | None = None
        """First span in the files. It changes when the older file is deleted."""
        self._read: dict[tuple[str, str, str], Rows] = {}
        self._lock = threading.Lock()

    def window(self, from_s: float = -math.inf, to_s: float = math.inf, num_bins: int = 800) -> dict[str, object]:
        """Return the spans of a window: `from_s`, `to_s`, `end_s` of the whole run, and the tracks, longest first."""
        with self._lock:
            self._follow()
            end_s = max((float(rows[1].max()) for rows in self._read.values()), default=0.0)
            from_s, to_s = max(from_s, 0.0), min(to_s, end_s)
            shown_keys = self._read if from_s < end_s else ()
            tracks = [self._track(key, from_s, max(to_s, from_s + 1e-6), num_bins) for key in shown_keys]
        shown = sorted((track for track in tracks if track.spans), key=lambda track: -track.seconds)[:MOST_TRACKS]
        return {"from_s": from_s, "to_s": to_s, "end_s": end_s, "first_s": self._first_s if shown else 0.0, "tracks": shown}

    def _track(self, key: tuple[str, str, str], from_s: float, to_s: float, num_bins: int) -> Track:
        whole = self._read[key]
        inside = (whole[1] >= from_s) & (whole[0] <= to_s)
        starts, ends, oldest, newest = (row[inside] for row in whole[:4])
        starts, ends, oldest = starts.clip(from_s), ends.clip(max=to_s), oldest[oldest >= 0]
        told = (*key, len(starts), float(ends.sum() - starts.sum()), int(oldest.min()) if len(oldest) else -1)
        newest_version = int(newest.max(initial=-1))
        if len(starts) <= MOST_SHOWN_SPANS:
            return Track(*told, newest_version, whole[:, inside].T.tolist(), None, None)
        weights, bin_s = whole[5][inside].clip(1), (to_s - from_s) / num_bins
        area = _area(starts - from_s, weights, bin_s, num_bins) - _area(ends - from_s, weights, bin_s, num_bins)
        swaps = self._read.get((key[0], SWAP, ""), whole)
        middles = from_s + bin_s * (np.arange(num_bins) + 0.5)
        live = np.searchsorted(swaps[1], middles, side="right") - 1
        versions = np.where(live >= 0, swaps[3][live], -1).astype(int).tolist()
        return Track(*told, newest_version, None, (np.diff(area) / bin_s).tolist(), versions)

    def _follow(self) -> None:
        """Read the new lines of the file."""
        decoder, found = msgspec.json.Decoder(_Line), dict[tuple[str, str, str], list[tuple[float, ...]]]()
        for line in self._lines.read():
            try:
                one = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # half a line of a killed writer
            if self._first_s == math.inf:
                self._first_s = one.start_s
            about, times = one.attributes, (one.start_s - self._first_s, one.end_s - self._first_s)
            versions = (about.oldest_version, about.newest_version) if about.version is None else (about.version, about.version)
            why = about.why or ("the batch of its next step" if one.name == WAIT else "")
            found.setdefault((one.process, one.name, why), []).append((*times, *versions, about.group, about.samples))
        self._forget()
        for key, rows in found.items():
            before = self._read.get(key, np.empty((6, 0)))
            self._read[key] = np.concatenate([before, np.array(rows).T], axis=1)
        for process in {key[0] for key in found} - {"admission", "controller"}:  # the spans of these do not cover all their time
            self._fill(process)

    def _forget(self) -> None:
        """If the first span in the files has changed, drop the spans that ended before it: they were deleted with a file."""
        before = self._first_kept
        with contextlib.suppress(ConfigError):  # a line of another asyncrl version is left out here
            self._first_kept = next(read_spans(self._run_folder), None)
        if before is not None and self._first_kept is not None and self._first_kept != before:
            kept_from_s = self._first_kept.end_s - self._first_s
            left = {key: rows[:, rows[1] >= kept_from_s] for key, rows in self._read.items()}
            self._read = {key: rows for key, rows in left.items() if rows.size}

    def _fill(self, process: str) -> None:
        """Add a wait in every gap between the spans of a process, so that its whole time has a reason."""
        own = [rows[:2] for key, rows in self._read.items() if key[0] == process and key[2] != UNTOLD]
        starts, ends = np.concatenate(own, axis=1)
        order = starts.argsort(kind="stable")
        before, after = np.maximum.accumulate(ends[order])[:-1], starts[order][1:]
        is_gap = after - before > LEAST_GAP_S
        self._read.pop((process, IDLE, UNTOLD), None)
        if is_gap.any():
            rows = np.full((6, is_gap.sum()), -1.0)
            rows[:2] = before[is_gap], after[is_gap]
            self._read[process, IDLE, UNTOLD] = rows


def _area(times_N: NDArray[np.float64], weights_N: NDArray[np.float64], bin_s: float, num_bins: int) -> NDArray[np.float64]:
    """Return [bins + 1]: for each bin edge, the weighted sum of the seconds from every earlier time to the edge."""
    places = np.ceil(times_N / bin_s).astype(np.intp)
    count, total = (np.bincount(places, of, num_bins + 2)[: num_bins + 1].cumsum() for of in (weights_N, weights_N * times_N))
    area: NDArray[np.float64] = count * bin_s * np.arange(num_bins + 1) - total
    return area


class _About(msgspec.Struct, gc=False):
    version: float | None = None
    oldest_version: float = -1
    newest_version: float = -1
    group: float = -1
    samples: float = -1
    why: str = ""


class _Line(msgspec.Struct, gc=False):
    """The fields of a `Span` that a timeline needs; they are decoded faster than the whole span."""

    name: str
    start_s: float
    end_s: float
    process: str
    attributes: _About = msgspec.field(default_factory=_About)
