"""The live display of a run, and one line a step where there is no terminal. The only file that imports rich.

Called by the CLI with a `Run` or a client of one. It only reads: leaving it does nothing to the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.clock import Clock, SystemClock
from asyncrl.errors import RunError
from asyncrl.observe.steps import STEPS_FILE, StepReport, read_evals
from asyncrl.schema.status import ENDED, OVER_LIMIT, RunStatus

BARS = "▁▂▃▄▅▆▇█"
REMEMBERED_STEPS = 400
REMEMBERED_EVENTS = 6


class RunView:
    """A run as its follower knows it."""

    def __init__(self) -> None:
        self.status: RunStatus | None = None
        self.steps: deque[StepReport] = deque(maxlen=REMEMBERED_STEPS)
        self.events: deque[str] = deque(maxlen=REMEMBERED_EVENTS)

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
    if after.resumed and not (before and before.resumed):
        news.append(after.resumed)
    deaths_before = {process.name: process.deaths for process in before.processes} if before else {}
    died = [process for process in after.processes if process.deaths > deaths_before.get(process.name, 0)]
    news += [f"{process.name} died ({process.deaths} times so far), now {process.state}" for process in died]
    then = {process.name for process in before.processes if process.joined} if before else set()
    now = {process.name for process in after.processes if process.joined}
    lost = after.guests.get("lost", 0) > (before.guests.get("lost", 0) if before else 0)
    news += [f"{name} joined" for name in sorted(now - then)]
    news += [f"{name} {'left, or was lost' if lost else 'left'}" for name in sorted(then - now)]
    if after.accuracy_before is not None and (before is None or before.accuracy_before is None):
        news.append(f"held-out accuracy before training {after.accuracy_before:.3f}")
    if after.accuracy_after is not None and (before is None or before.accuracy_after != after.accuracy_after):
        news.append(f"held-out accuracy now {after.accuracy_after:.3f}")
    standing = {alarm.rule for alarm in before.alarms} if before else set()
    news += [f"ALARM {alarm.rule}: {alarm.text}" for alarm in after.alarms if alarm.rule not in standing]
    news += [f"alarm {rule} is over" for rule in sorted(standing - {alarm.rule for alarm in after.alarms})]
    then_aside = before.set_aside if before else ()
    news += [f"prompt {prompt} failed too often and is set aside" for prompt in after.set_aside if prompt not in then_aside]
    if after.checkpoint and (before is None or before.checkpoint != after.checkpoint):
        news.append(f"checkpoint {after.checkpoint}")
    return news


def step_line(report: StepReport, num_steps: int = 0) -> str:
    """Return a step as the one line that logs and pipes get."""
    of = f"/{num_steps}" if num_steps else ""
    return (
        f"step {report.version}{of}  reward {report.reward_mean:.3f} +-{report.reward_std:.2f}  "
        f"staleness {report.staleness_mean:.2f} (max {report.staleness_max})  "
        f"ready {report.groups_ready} running {report.groups_running} scoring {report.groups_scoring}  "
        f"tok/s {report.generated_tokens_per_s:,.0f} generated {report.trained_tokens_per_s:,.0f} trained  "
        f"idle learner {report.learner_idle:.0%} generators {report.generators_idle:.0%}  sync {report.weight_sync_ms:.0f} ms"
        + (f"  FAILED {report.failed_samples} samples, {report.failed_share:.0%} of groups" if report.failed_samples else "")
        + (
            f"  OVER LIMIT {report.over_limit_samples} samples, {report.over_limit_share:.0%}"
            if report.over_limit_samples
            else ""
        )
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


REFRESH_S = 0.5
MOST_FAILURES_SHOWN = 4
_PHASE_STYLE = {
    "running": "bold green",
    "paused": "bold yellow",
    "draining": "bold yellow",
    "failed": "bold red",
    "stopped": "bold",
}


class Followed(Protocol):
    """What can be followed: `asyncrl.Run`, or what `asyncrl.connect` returns."""

    run_folder: Path

    async def status(self) -> RunStatus:
        """Return the run as it is now."""
        ...

    def steps(self, first: int = 0) -> AsyncIterator[StepReport]:
        """Yield steps, past and coming, until the run ends; raise RunError when it failed."""
        ...


async def follow_run(
    run: Followed, *, plain: bool, first: int = 0, console: Console | None = None, clock: Clock | None = None
) -> RunStatus | None:
    """Show a run until it has ended, then what came of it.

    Args:
        run: An entered run or client.
        plain: One line a step and an event, for pipes and logs.
        first: Steps before this one are not shown.
        console: Where to; standard output by default.
        clock: Paces the looks at the status; the system's by default.

    Returns:
        Its last status; None where it never answered.

    Raises:
        RunError: The run failed; the message is its reason.
    """
    console = console or Console(highlight=False)
    failure: RunError | None = None
    with contextlib.ExitStack() as stack:
        live = None if plain else stack.enter_context(Live(Text("starting"), console=console, auto_refresh=False))
        follower = _Follower(run, console, live)
        async with asyncio.TaskGroup() as group:
            polling = group.create_task(follower.poll(clock or SystemClock()), name="display-poll")
            try:
                async for report in run.steps(first):
                    follower.tell(follower.view.take_step(report))
            except RunError as error:
                failure = error
            polling.cancel()
        await follower.look()
    for line in await asyncio.to_thread(closing_lines, run.run_folder, follower.view.status):
        _print_line(console, line)
    if failure is not None:
        raise failure
    return follower.view.status


class _Follower:
    """Takes a run's statuses into a view and shows them."""

    def __init__(self, run: Followed, console: Console, live: Live | None) -> None:
        self.view = RunView()
        self._run, self._console, self._live = run, console, live

    async def poll(self, clock: Clock) -> None:
        """Look every REFRESH_S until the run does not answer any more."""
        while await self.look():
            await clock.sleep(REFRESH_S)

    def tell(self, line: str) -> None:
        """Print a line where there is no display."""
        if self._live is None:
            _print_line(self._console, line)

    async def look(self) -> bool:
        """Take one status in; return whether the run answered."""
        try:
            status = await self._run.status()
        except RunError:
            return False
        known = len(self.view.status.failures) if self.view.status else 0
        for line in self.view.take_status(status):
            self.tell(f"{duration(status.uptime_s)} {line}")
        if self._live is not None:
            self._live.update(render(self.view), refresh=True)
        for seen in status.failures[known:]:
            what = "a sample scored 0" if seen.stage == OVER_LIMIT else f"a sample failed at {seen.stage} ({seen.kind})"
            _print_line(self._console, f"{what}: {seen.reason}\n{seen.trace}".rstrip())
        return True


def _print_line(console: Console, line: str) -> None:
    """Print text as it is: no markup, no wrapping."""
    console.print(line, markup=False, soft_wrap=True)


def closing_lines(run_folder: Path, status: RunStatus | None) -> list[str]:
    """Return what a user wants to know at the end of a run: accuracy, pictures, checkpoint, outcome."""
    evals = read_evals(run_folder)
    lines = []
    if len(evals) > 1:
        first, last = evals[0], evals[-1]
        (name, before), (_, after) = first.headline, last.headline
        lines.append(
            f"held-out {name} {before:.3f} (version {first.version}) -> {after:.3f} (version {last.version}), "
            f"{last.num_samples} samples each"
        )
    try:
        lines += [f"{name:<12}{path}" for name, path in _pictures(run_folder).items()]
    except OSError as error:
        lines.append(f"no pictures: {error.strerror}; `asyncrl report {run_folder}` draws them")
    if status is not None and status.checkpoint:
        lines.append(f"{'checkpoint':<12}{status.checkpoint}")
    if status is not None and status.phase in ENDED:
        lines.append(f"{status.phase}{f': {status.reason}' if status.reason else ''}")
    return lines


def _pictures(run_folder: Path) -> dict[str, Path]:
    """Return the run's pictures, drawn anew only where the controller has not done it at the end (it was killed, say)."""
    steps = run_folder / STEPS_FILE
    if not steps.exists():
        return {}
    drawn = {name: run_folder / f"{name}.png" for name in ("reward", "timeline")}
    if all(path.exists() and path.stat().st_mtime_ns >= steps.stat().st_mtime_ns for path in drawn.values()):
        return drawn
    report = importlib.import_module("asyncrl.observe.report")  # matplotlib is slow to import, and only the end needs it
    paths: dict[str, Path] = report.write_report(run_folder)
    return paths


# -- drawing -------------------------------------------------------------------------------------------------------------


def render(view: RunView) -> RenderableType:
    """Return the whole display."""
    status, last, remaining_s = view.status, view.steps[-1] if view.steps else None, view.remaining_s()
    if status is None:
        return Text("starting")
    text = Text.assemble((status.phase, _PHASE_STYLE.get(status.phase, "bold cyan")), "  version ")
    text.append(f"{max(status.version, 0)}/{status.num_steps}", style="bold")
    to_go = f", {duration(remaining_s)} to go" if remaining_s is not None and status.phase == "running" else ""
    text.append(f"  {duration(status.uptime_s)}{to_go}", style="dim")
    parts: list[RenderableType] = [text, ProgressBar(total=max(status.num_steps, 1), completed=max(status.version, 0))]
    if last is not None:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        spark = sparkline([report.reward_mean for report in view.steps], 48)
        table.add_row("reward", Text.assemble((f"{last.reward_mean:.3f} ", "bold green"), (spark, "green")))
        table.add_row("staleness", f"mean {last.staleness_mean:.2f}  max {last.staleness_max} versions")
        table.add_row("buffer", f"{last.groups_ready} groups ready  {last.groups_running} running  {last.groups_scoring} scoring")
        speeds = f"{last.generated_tokens_per_s:,.0f} generated  {last.trained_tokens_per_s:,.0f} trained"
        table.add_row("tokens/s", speeds)
        table.add_row("idle", f"learner {last.learner_idle:.0%}  generators {last.generators_idle:.0%}")
        table.add_row("weights", f"live everywhere {last.weight_sync_ms:.0f} ms after they were published")
        if last.dropped:
            table.add_row("dropped", "  ".join(f"{count} {reason}" for reason, count in sorted(last.dropped.items())))
        parts.append(table)
    if status.failures:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold red", no_wrap=True)
        table.add_column(overflow="ellipsis", no_wrap=True)
        for seen in sorted(status.failures, key=lambda seen: -seen.count)[:MOST_FAILURES_SHOWN]:
            table.add_row(f"{seen.count} failed", f"at {seen.stage}: {seen.kind}")
        shares = f"{status.failed_share:.0%} of the newest groups failed, {status.over_limit_share:.0%} of samples over a limit"
        table.add_row("", f"{shares}; a run ends at supervision.max_failed_share")
        parts.append(table)
    parts.append(_processes(status))
    if status.waiting:
        parts.append(Text.assemble(("waiting  ", "dim"), (status.waiting, "yellow")))
    parts += [Text(line, style="dim", overflow="ellipsis", no_wrap=True) for line in view.events]
    title, folder = Text.assemble("asyncrl ", (status.name, "bold")), Text(status.run_folder, style="dim")
    return Panel(Group(*parts), title=title, subtitle=folder, border_style="blue")


def _processes(status: RunStatus) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(style="dim", overflow="ellipsis", no_wrap=True)
    for process in status.processes[:12]:
        doing = f"waits for {process.waiting_for} ({process.waiting_s:.0f} s)" if process.waiting_for else "at work"
        style = "green" if process.state == "ready" else "yellow"
        table.add_row(process.name, Text(process.state, style=style), doing if process.state == "ready" else process.waiting_for)
    if status.guests:
        here, most, lost = (status.guests[name] for name in ("here", "most", "lost"))
        table.add_row("joined", f"{here} of {most}", f"{status.guests['came']} so far, {lost} lost")
    if len(status.processes) > 12:
        table.add_row(f"and {len(status.processes) - 12} more", "", "")
    return table
