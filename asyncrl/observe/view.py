"""What the live display says, as text: built from the steps and the status of a run, without a terminal.

Pure but for its memory of what it was told; drawn by display.py.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from asyncrl.observe.steps import StepReport
from asyncrl.schema.status import RunStatus

BARS = "▁▂▃▄▅▆▇█"
REMEMBERED_STEPS = 400
REMEMBERED_EVENTS = 6


class RunView:
    """A run as its follower knows it."""

    def __init__(self) -> None:
        self.status: RunStatus | None = None
        self.steps: deque[StepReport] = deque(maxlen=REMEMBERED_STEPS)
        self.events: deque[str] = deque(maxlen=REMEMBERED_EVENTS)

    @property
    def last(self) -> StepReport | None:
        """Return the newest step."""
        return self.steps[-1] if self.steps else None

    def take_step(self, report: StepReport) -> str:
        """Take a step in and return it as one line."""
        self.steps.append(report)
        return step_line(report, self.status.num_steps if self.status else 0)

    def take_status(self, status: RunStatus) -> list[str]:
        """Take a status in and return what is new in it, one line each."""
        news = news_between(self.status, status)
        self.status = status
        self.events.extend(f"{duration(status.uptime_s)}  {line}" for line in news)
        return news

    def remaining_s(self) -> float | None:
        """Return the seconds to go at the pace of the last steps; None before there is a pace."""
        if len(self.steps) < 2 or self.status is None:
            return None
        recent = list(self.steps)[-20:]
        pace_s = (recent[-1].time_s - recent[0].time_s) / (len(recent) - 1)
        return max(self.status.num_steps - recent[-1].version, 0) * pace_s


def news_between(before: RunStatus | None, after: RunStatus) -> list[str]:
    """Return what happened between two statuses, in words."""
    news = []
    if before is None or before.phase != after.phase:
        news.append(f"{after.phase}{f': {after.reason}' if after.reason else ''}")
    deaths_before = {process.name: process.deaths for process in before.processes} if before else {}
    died = [process for process in after.processes if process.deaths > deaths_before.get(process.name, 0)]
    news += [f"{process.name} died ({process.deaths} times so far), now {process.state}" for process in died]
    news += _comings_and_goings(before, after)
    if after.accuracy_before is not None and (before is None or before.accuracy_before is None):
        news.append(f"held-out accuracy before training {after.accuracy_before:.3f}")
    if after.accuracy_after is not None and (before is None or before.accuracy_after != after.accuracy_after):
        news.append(f"held-out accuracy now {after.accuracy_after:.3f}")
    if after.checkpoint and (before is None or before.checkpoint != after.checkpoint):
        news.append(f"checkpoint {after.checkpoint}")
    return news


def _comings_and_goings(before: RunStatus | None, after: RunStatus) -> list[str]:
    """Return which generators joined and left."""
    then = {process.name for process in before.processes if process.joined} if before else set()
    now = {process.name for process in after.processes if process.joined}
    lost = after.guests.get("lost", 0) > (before.guests.get("lost", 0) if before else 0)
    gone = "left, or was lost" if lost else "left"
    return [f"{name} joined" for name in sorted(now - then)] + [f"{name} {gone}" for name in sorted(then - now)]


def step_line(report: StepReport, num_steps: int = 0) -> str:
    """Return a step as the one line that logs and pipes get."""
    of = f"/{num_steps}" if num_steps else ""
    return (
        f"step {report.version}{of}  reward {report.reward_mean:.3f} +-{report.reward_std:.2f}  "
        f"staleness {report.staleness_mean:.2f} (max {report.staleness_max})  "
        f"ready {report.groups_ready} running {report.groups_running} scoring {report.groups_scoring}  "
        f"tok/s {report.generated_tokens_per_s:,.0f} generated {report.trained_tokens_per_s:,.0f} trained  "
        f"idle learner {report.learner_idle:.0%} generators {report.generators_idle:.0%}  sync {report.weight_sync_ms:.0f} ms"
    )


def sparkline(values: Sequence[float], width: int) -> str:
    """Return values as a line of bars, at most `width`: neighbours are averaged where there are more."""
    if not values or width < 1:
        return ""
    if len(values) > width:
        cuts = [round(column * len(values) / width) for column in range(width + 1)]
        values = [sum(values[first:last]) / (last - first) for first, last in itertools.pairwise(cuts)]
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


def duration(seconds: float) -> str:
    """Return a duration as `1:02:03` or `4:05`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
