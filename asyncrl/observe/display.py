"""The live display of a run, or one line per step if there is no terminal. The only file that imports rich.

The display only reads: closing it does not change the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from textwrap import shorten

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError, RunError, first_fault
from asyncrl.observe.steps import STEPS_FILE, StepReport, read_evals, step_line
from asyncrl.schema.status import ENDED, OVER_LIMIT, RunStatus

BARS = "▁▂▃▄▅▆▇█"
REMEMBERED_STEPS = 400
REMEMBERED_EVENTS = 6
MOST_REASON = 400
"""Maximum number of characters of the reason of a death."""


@dataclass(eq=False)
class RunView:
    """State of a run as far as its follower knows it."""

    status: RunStatus | None = None
    steps: deque[StepReport] = field(default_factory=lambda: deque(maxlen=REMEMBERED_STEPS))
    events: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED_EVENTS))

    def take_status(self, after: RunStatus) -> list[str]:
        """Store a status and return the changes since the status before, one line of text per change."""
        before, news = self.status or RunStatus(name=after.name, run_folder=after.run_folder, phase=""), list[str]()
        if before.phase != after.phase:
            news.append(f"{after.phase}{f': {after.reason}' if after.reason else ''}")
        if after.resumed and not before.resumed:
            news.append(after.resumed)
        deaths_before = {process.name: process.deaths for process in before.processes}
        died = [process for process in after.processes if process.deaths > deaths_before.get(process.name, 0)]
        for process in died:
            times, why = "once" if process.deaths == 1 else f"{process.deaths} times", shorten(process.last_death, MOST_REASON)
            news.append(f"{process.name} died ({times} so far), now {process.state}{f': {why}' if why else ''}")
        then = {process.name for process in before.processes if process.joined}
        now = {process.name for process in after.processes if process.joined}
        lost = after.guests.get("lost", 0) > before.guests.get("lost", 0)
        news += [f"{name} joined" for name in sorted(now - then)]
        news += [f"{name} {'left, or was lost' if lost else 'left'}" for name in sorted(then - now)]
        if after.accuracy_before is not None and before.accuracy_before is None:
            news.append(f"held-out accuracy before training {after.accuracy_before:.3f}")
        if after.accuracy_after is not None and before.accuracy_after != after.accuracy_after:
            news.append(f"held-out accuracy now {after.accuracy_after:.3f}")
        standing = {alarm.rule for alarm in before.alarms}
        news += [f"ALARM {alarm.rule}: {alarm.text}" for alarm in after.alarms if alarm.rule not in standing]
        news += [f"alarm {rule} is over" for rule in sorted(standing - {alarm.rule for alarm in after.alarms})]
        aside = [prompt for prompt in after.set_aside if prompt not in before.set_aside]
        news += [f"prompt {prompt} failed too often and is set aside" for prompt in aside]
        if after.checkpoint and before.checkpoint != after.checkpoint:
            news.append(f"checkpoint {after.checkpoint}")
        self.status = after
        self.events.extend(f"{duration(after.uptime_s)}  {line}" for line in news)
        return news

    def remaining_s(self) -> float | None:
        """Return the remaining seconds at the speed of the last steps; None while the speed is not known."""
        if len(self.steps) < 2 or self.status is None:
            return None
        recent = list(self.steps)[-20:]
        pace_s = (recent[-1].time_s - recent[0].time_s) / (len(recent) - 1)
        return max(self.status.num_steps - recent[-1].version, 0) * pace_s


def sparkline(values: Sequence[float], width: int) -> str:
    """Return values as a line of at most `width` bars; if there are more values, neighbouring values are averaged."""
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
_PHASE_COLOUR = {"running": "green", "paused": "yellow", "draining": "yellow", "failed": "red", "stopped": ""}


class _Output(Console):
    def on_broken_pipe(self) -> None:
        raise  # rich calls this when it handles that error, and its own method would end the process


@contextlib.contextmanager
def _as_first_fault() -> Iterator[None]:
    """Raise a task group's first error instead of the group."""
    try:
        yield
    except ExceptionGroup as group:
        raise (first_fault(group) or group) from group


async def follow_run(
    ask: Callable[[], Awaitable[RunStatus]], steps: AsyncIterator[StepReport], run_folder: Path, *, plain: bool,
    console: Console | None = None,
) -> RunStatus | None:  # fmt: skip
    """Show a run until it has ended, and then its results.

    Args:
        ask: Returns the current status of the run.
        steps: Past and future steps of the run, until it ends.
        run_folder: Folder of the run.
        plain: Print one line per step and per event, for pipes and logs.
        console: Where to print; standard output by default.

    Returns:
        The last status of the run; None if the run never answered.

    Raises:
        RunError: The run failed; the message is the reason.
        OSError: The output cannot be written.
    """
    console, view, failure = console or _Output(highlight=False), RunView(), None
    live = None if plain else Live(Text("starting"), console=console, auto_refresh=False)
    say = partial(console.print, markup=False, soft_wrap=True)  # print the text unchanged

    def tell(line: str) -> None:
        if live is None:
            say(line)

    async def look() -> None:
        status = await ask()
        known = len(view.status.failures) if view.status else 0
        news = view.take_status(status)
        for line in news:
            tell(f"{duration(status.uptime_s)} {line}")
        if live is not None:
            live.update(render(view), refresh=True)
        for seen in status.failures[known:]:
            what = "a sample scored 0" if seen.stage == OVER_LIMIT else f"a sample failed at {seen.stage} ({seen.kind})"
            say(f"{what}: {seen.reason}\n{seen.trace}".rstrip())

    async def poll() -> None:
        with contextlib.suppress(RunError):  # the run does not answer any more
            while True:
                await look()
                await asyncio.sleep(REFRESH_S)

    with _as_first_fault(), live or contextlib.nullcontext():
        async with asyncio.TaskGroup() as group:
            polling = group.create_task(poll(), name="display-poll")
            try:
                async for report in steps:
                    view.steps.append(report)
                    tell(step_line(report, view.status.num_steps if view.status else 0))
            except RunError as error:
                failure = error
            polling.cancel()
        with contextlib.suppress(RunError):
            await look()
    for line in await asyncio.to_thread(closing_lines, run_folder, view.status):
        say(line)
    if failure is not None:
        raise failure
    return view.status


def closing_lines(run_folder: Path, status: RunStatus | None) -> list[str]:
    """Return the results of an ended run for its user: accuracy, pictures, checkpoint, outcome."""
    lines = []
    steps, drawn = run_folder / STEPS_FILE, {name: run_folder / f"{name}.png" for name in ("reward", "timeline")}
    try:
        evals = read_evals(run_folder)
        if len(evals) > 1:
            first, last = evals[0], evals[-1]
            (name, before), (_, after) = first.headline, last.headline
            gain = f"{before:.3f} (version {first.version}{first.failed}) -> {after:.3f} (version {last.version}{last.failed})"
            lines.append(f"held-out {name} {gain}, {last.num_samples} samples each")
        lines += [
            f"WARNING: all held-out samples of version {one.version} failed: its {one.headline[0]} says nothing of the policy"
            for one in evals
            if 0 < one.num_samples == one.num_failed
        ]
        # Unless it was killed, the controller has drawn the pictures at the end; importing matplotlib is slow.
        if not steps.exists() or not load_config(run_folder / "config.toml").observe.pictures:
            drawn = {}
        elif any(not path.exists() or path.stat().st_mtime_ns < steps.stat().st_mtime_ns for path in drawn.values()):
            drawn = importlib.import_module("asyncrl.observe.report").write_report(run_folder)
        lines += [f"{name:<12}{path}" for name, path in drawn.items()]
    except (OSError, ConfigError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        lines.append(f"no pictures: {why}; `asyncrl report {run_folder}` draws them")
    if status is not None and status.checkpoint:
        lines.append(f"{'checkpoint':<12}{status.checkpoint}")
    if status is not None and status.phase in ENDED:
        lines.append(f"{status.phase}{f': {status.reason}' if status.reason else ''}")
    return lines


# -- drawing -------------------------------------------------------------------------------------------------------------


def render(view: RunView) -> RenderableType:
    """Return the whole display."""
    status, last, remaining_s = view.status, view.steps[-1] if view.steps else None, view.remaining_s()
    if status is None:
        return Text("starting")
    text = Text.assemble((status.phase, f"bold {_PHASE_COLOUR.get(status.phase, 'cyan')}"), "  version ")
    text.append(f"{max(status.version, 0)}/{status.num_steps}", style="bold")
    to_go = f", {duration(remaining_s)} to go" if remaining_s is not None and status.phase == "running" else ""
    text.append(f"  {duration(status.uptime_s)}{to_go}", style="dim")
    parts: list[RenderableType] = [text, ProgressBar(total=max(status.num_steps, 1), completed=max(status.version, 0))]
    if last is not None:
        spark = sparkline([report.reward_mean for report in view.steps], 48)
        table = _grid("dim", None)
        rows: dict[str, RenderableType] = {
            "reward": Text.assemble((f"{last.reward_mean:.3f} ", "bold green"), (spark, "green")),
            "staleness": f"mean {last.staleness_mean:.2f}  max {last.staleness_max} versions",
            "buffer": f"{last.groups_ready} groups ready  {last.groups_running} running  {last.groups_scoring} scoring",
            "tokens/s": f"{last.generated_tokens_per_s:,.0f} generated  {last.trained_tokens_per_s:,.0f} trained",
            "idle": f"learner {last.learner_idle:.0%}  generators {last.generators_idle:.0%}",
            "weights": f"live on all generators {last.weight_sync_ms:.0f} ms after publication",
            "dropped": "  ".join(f"{count} {reason}" for reason, count in sorted(last.dropped.items())),
        }
        for name, shown in rows.items():
            if shown:
                table.add_row(name, shown)
        parts.append(table)
    if status.failures:
        table = _grid("bold red", "")
        for seen in sorted(status.failures, key=lambda seen: -seen.count)[:MOST_FAILURES_SHOWN]:
            table.add_row(f"{seen.count} failed", f"at {seen.stage}: {seen.kind}")
        shares = f"{status.failed_share:.0%} of the newest groups failed, {status.over_limit_share:.0%} of samples over a limit"
        table.add_row("", f"{shares}; a run ends at supervision.max_failed_share")
        parts.append(table)
    table = _grid("", "", "dim")
    for process in status.processes[:12]:
        doing = f"waits for {process.waiting_for} ({process.waiting_s:.0f} s)" if process.waiting_for else "at work"
        style = "green" if process.state == "ready" else "yellow"
        table.add_row(process.name, Text(process.state, style=style), doing if process.state == "ready" else process.waiting_for)
    if status.guests:
        here, most, lost = (status.guests[name] for name in ("here", "most", "lost"))
        table.add_row("joined", f"{here} of {most}", f"{status.guests['came']} so far, {lost} lost")
    if len(status.processes) > 12:
        table.add_row(f"and {len(status.processes) - 12} more", "", "")
    parts.append(table)
    if status.waiting:
        parts.append(Text.assemble(("waiting  ", "dim"), (status.waiting, "yellow")))
    parts += [Text(line, style="dim", overflow="ellipsis", no_wrap=True) for line in view.events]
    title, folder = Text.assemble("asyncrl ", (status.name, "bold")), Text(status.run_folder, style="dim")
    return Panel(Group(*parts), title=title, subtitle=folder, border_style="blue")


def _grid(*styles: str | None) -> Table:
    """Return a table without lines. Columns whose style is not None have one line, and the last column may be cut off."""
    table = Table.grid(padding=(0, 2))
    for number, style in enumerate(styles):
        is_last = number == len(styles) - 1
        table.add_column(style=style or None, overflow="ellipsis" if is_last else "fold", no_wrap=style is not None)
    return table
