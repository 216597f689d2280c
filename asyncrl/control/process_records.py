"""What a run knows about each of its processes, and what their deaths come to: how many, how long to wait, what to say.

Plain records and sums over them; control/lifecycle.py changes them and decides.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.config.run import SupervisionConfig
from asyncrl.schema.control import ProcessKind

ProcessState = Literal["planned", "starting", "up", "ready", "dying", "restarting", "leaving", "left", "gone"]
ALIVE: frozenset[ProcessState] = frozenset({"starting", "up", "ready", "dying", "leaving"})
LONGEST_BACKOFF_S = 30.0


@dataclass(slots=True)
class ProcessRecord:
    """What the run knows about one of its processes."""

    name: str
    kind: ProcessKind
    state: ProcessState = "planned"
    incarnation: int = 0
    deaths_s: list[float] = field(default_factory=list)
    """When it died, within the window."""
    exit_codes: list[int] = field(default_factory=list)
    """Of every incarnation that died: one death each; ends after the run's end, and of those that left, are none."""
    departures: int = 0
    """Incarnations that left because the run could do without them."""
    last_words: str = ""
    """Why it was killed or said it would die; empty where nobody knows."""


def deaths_in_window(records: Collection[ProcessRecord], config: SupervisionConfig, now: float) -> int:
    """Forget deaths that are too long ago, and return how many are left."""
    for record in records:
        record.deaths_s = [died_s for died_s in record.deaths_s if now - died_s <= config.death_window_s]
    return sum(len(record.deaths_s) for record in records)


def backoff_s(record: ProcessRecord, config: SupervisionConfig) -> float:
    """Return backoff_s x 2^(deaths of this process in the window - 1), at most LONGEST_BACKOFF_S."""
    doublings = min(len(record.deaths_s) - 1, 30)
    return float(min(config.backoff_s * 2**doublings, LONGEST_BACKOFF_S))


def too_many_deaths(records: Collection[ProcessRecord], config: SupervisionConfig, deaths: int, last_words: str) -> str:
    """Return why a run ends over its deaths: how many, who, and the last one's story."""
    listing = "; ".join(
        f"{record.name} ended with {', '.join(map(exit_text, record.exit_codes[-len(record.deaths_s) :]))}"
        for record in records
        if record.deaths_s
    )
    return (
        f"{deaths} deaths within {config.death_window_s:.0f} s, allowed are {config.max_deaths} "
        f"(supervision.max_deaths): {listing}; the last: {last_words}"
    )


def exit_text(code: int) -> str:
    """Return an exit code in words, `signal 9` for -9."""
    return f"signal {-code}" if code < 0 else f"code {code}"
