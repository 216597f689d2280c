"""The live display of a run, and one line a step where there is no terminal. The only file that imports rich.

Called by the CLI with a `Run` or a client of one. It only reads: leaving it does nothing to the run.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Callable
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
from asyncrl.observe.view import RunView, duration, sparkline
from asyncrl.schema.status import ENDED, RunStatus

REFRESH_S = 0.5
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


async def follow_run(run: Followed, *, plain: bool, console: Console | None = None, clock: Clock | None = None) -> None:
    """Show a run until it has ended, then what came of it.

    Args:
        run: An entered run or client.
        plain: One line a step and an event, for pipes and logs.
        console: Where to; standard output by default.
        clock: Paces the looks at the status; the system's by default.

    Raises:
        RunError: The run failed; the message is its reason.
    """
    console = console or Console(highlight=False)
    if plain:
        follower = _Follower(run, clock or SystemClock(), tell=lambda line: _print_line(console, line))
        failure = await follower.follow()
    else:
        with Live(Text("starting"), console=console, auto_refresh=False) as live:
            follower = _Follower(run, clock or SystemClock(), show=lambda view: live.update(render(view), refresh=True))
            failure = await follower.follow()
    for line in await asyncio.to_thread(closing_lines, run.run_folder, follower.view.status):
        _print_line(console, line)
    if failure is not None:
        raise failure


class _Follower:
    """Feeds a view from a run until the run ends."""

    def __init__(
        self,
        run: Followed,
        clock: Clock,
        tell: Callable[[str], None] = lambda _: None,
        show: Callable[[RunView], None] = lambda _: None,
    ) -> None:
        self.view = RunView()
        self._run = run
        self._clock = clock
        self._tell = tell
        self._show = show

    async def follow(self) -> RunError | None:
        """Return once the run has ended: why it failed, if it did."""
        failure: RunError | None = None
        async with asyncio.TaskGroup() as group:
            polling = group.create_task(self._poll(), name="display-poll")
            try:
                async for report in self._run.steps():
                    self._tell(self.view.take_step(report))
            except RunError as error:
                failure = error
            polling.cancel()
        await self._look()
        return failure

    async def _poll(self) -> None:
        while await self._look():
            await self._clock.sleep(REFRESH_S)

    async def _look(self) -> bool:
        """Take one status in; return whether the run answered."""
        try:
            status = await self._run.status()
        except RunError:
            return False
        for line in self.view.take_status(status):
            self._tell(f"{duration(status.uptime_s)} {line}")
        self._show(self.view)
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
    lines += [f"{name:<12}{path}" for name, path in _pictures(run_folder).items()]
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
    status = view.status
    if status is None:
        return Text("starting")
    head = Table.grid(expand=True)
    head.add_row(_headline(view, status))
    head.add_row(ProgressBar(total=max(status.num_steps, 1), completed=max(status.version, 0)))
    parts: list[RenderableType] = [head]
    if view.last is not None:
        parts.append(_figures(view, view.last))
    parts.append(_processes(status))
    if status.waiting:
        parts.append(Text.assemble(("waiting  ", "dim"), (status.waiting, "yellow")))
    parts += [Text(line, style="dim", overflow="ellipsis", no_wrap=True) for line in view.events]
    title, folder = Text.assemble("asyncrl ", (status.name, "bold")), Text(status.run_folder, style="dim")
    return Panel(Group(*parts), title=title, subtitle=folder, border_style="blue")


def _headline(view: RunView, status: RunStatus) -> Text:
    remaining_s = view.remaining_s()
    text = Text.assemble((status.phase, _PHASE_STYLE.get(status.phase, "bold cyan")), "  version ")
    text.append(f"{max(status.version, 0)}/{status.num_steps}", style="bold")
    text.append(f"  {duration(status.uptime_s)}", style="dim")
    if remaining_s is not None and status.phase == "running":
        text.append(f", {duration(remaining_s)} to go", style="dim")
    return text


def _figures(view: RunView, last: StepReport) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
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
    return table


def _processes(status: RunStatus) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
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
