"""What a timeline picture shows, as numbers: lanes of spans, how many ran at once, and which stretch of a run to show.

Pure; drawn by report.py. Legend: N spans, E edges of a time grid (E - 1 bins). Times are clock seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.observe.spans import CHECKPOINT, EVALUATE, GENERATE, PUBLISH, SCORE, STEP, SWAP, WAIT, Span

LaneKind = Literal["generator", "reward", "learner"]
_KIND_OF_SPAN: dict[str, LaneKind] = {GENERATE: "generator", SWAP: "generator", SCORE: "reward", STEP: "learner"}
_KIND_OF_SPAN |= {WAIT: "learner", PUBLISH: "learner", CHECKPOINT: "learner"}
_LEARNER_FIRST: dict[LaneKind, int] = {"generator": 0, "reward": 1, "learner": 2}


@dataclass(slots=True)
class Lane:
    """One process's spans, sorted by start, by name of span."""

    process: str
    kind: LaneKind
    spans: dict[str, list[Span]] = field(default_factory=dict)

    def named(self, name: str) -> list[Span]:
        """Return its spans of one name."""
        return self.spans.get(name, [])


def lanes_of(spans: Iterable[Span]) -> list[Lane]:
    """Return generators by number, then reward workers (all in one lane), then the learner, each with its spans in order."""
    lanes: dict[str, Lane] = {}
    for item in sorted(spans, key=lambda span: span.start_s):
        kind = _KIND_OF_SPAN.get(item.name)
        if kind is None or item.name == EVALUATE:
            continue
        process = "reward" if kind == "reward" else item.process
        lane = lanes.setdefault(process, Lane(process, kind))
        lane.spans.setdefault(item.name, []).append(item)
    return sorted(lanes.values(), key=lambda lane: (_LEARNER_FIRST[lane.kind], _number_in(lane.process), lane.process))


def occupancy(spans: Sequence[Span]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the step function of how many spans are open.

    Returns:
        Times [K] at which the number changes, and the number [K] from each time on.
    """
    starts = np.array([item.start_s for item in spans], dtype=np.float64)
    ends = np.array([item.end_s for item in spans], dtype=np.float64)
    times = np.concatenate([starts, ends])
    change = np.concatenate([np.ones(len(starts), np.int64), -np.ones(len(ends), np.int64)])
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(change[order])


def mean_occupancy(spans: Sequence[Span], edges_E: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how many spans were open in each bin, on average, [E - 1]."""
    if not spans:
        return np.zeros(len(edges_E) - 1)
    times, open_now = occupancy(spans)
    area = np.concatenate([[0.0], np.cumsum(np.diff(times) * open_now[:-1])])
    return np.diff(np.interp(edges_E, times, area)) / np.diff(edges_E)


def choose_window(steps: Sequence[Span], most_s: float = 20.0, most_steps: int = 14) -> tuple[float, float]:
    """Return the stretch in the middle of training that can be read: at most `most_s` seconds and about `most_steps` steps."""
    begin, end = steps[0].start_s, steps[-1].end_s
    typical_s = float(np.median(np.diff([item.start_s for item in steps]))) if len(steps) > 1 else end - begin
    length = min(most_s, most_steps * max(typical_s, 1e-3), end - begin)
    middle = steps[len(steps) // 2].start_s
    first = min(max(middle - length / 2, begin), end - length)
    return first, first + length


def running_mean(values: Sequence[float], width: int) -> NDArray[np.float64]:
    """Return the mean of each value and up to `width - 1` before it, same length."""
    total = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    upto = np.arange(1, len(values) + 1)
    since = np.maximum(upto - width, 0)
    means: NDArray[np.float64] = (total[upto] - total[since]) / (upto - since)
    return means


def _number_in(process: str) -> int:
    last = process.rpartition("-")[2]
    return int(last) if last.isdigit() else 0
