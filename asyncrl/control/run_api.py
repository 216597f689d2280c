"""What the HTTP API may ask of a run: one method a route, over the controller. Called by control/api.py on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from asyncrl.control.life_events import DrainRequested, Event, PauseRequested, ResumeRequested, StopRequested
from asyncrl.control.watchdog import wait_chain
from asyncrl.errors import RunError
from asyncrl.observe.steps import EvalReport, StepReport
from asyncrl.schema.batches import GroupsTaken
from asyncrl.schema.control import Heartbeat
from asyncrl.schema.status import ENDED, ExternalGroup, ProcessStatus, RunStatus, SubmitResult
from asyncrl.schema.weights import WeightsAvailable

if TYPE_CHECKING:
    from asyncrl.control.controller import Controller


LOOK_AGAIN_S = 0.5
"""Several requests share one event; none waits longer than this for a change that another has seen first."""


class RunApi:
    """`RunControl` (see api.py) over a live controller."""

    def __init__(self, controller: Controller) -> None:
        self._run = controller

    def status(self) -> RunStatus:
        """Return the run as it is now."""
        now, counts = self._run.clock.now(), self._run.flow.buffer.counts()
        groups = {state: getattr(counts, state) for state in ("issued", "running", "scoring", "ready", "taken", "trained")}
        groups |= {"dropped": sum(counts.dropped.values()), "failed": sum(counts.failed.values())}
        evaluations = self._run.reporter.evaluations
        return RunStatus(
            name=self._run.config.name,
            run_folder=str(self._run.run_folder),
            phase=self._visible_phase(),
            reason=self._run.lifecycle.reason,
            version=self._run.feed.version,
            num_steps=self._run.config.num_steps,
            groups=groups,
            dropped={**counts.dropped, **counts.failed},
            processes=tuple(self._process_status(now)),
            waiting=wait_chain(self._run.waits(now), now),
            accuracy_before=evaluations[0].accuracy if evaluations else None,
            accuracy_after=evaluations[-1].accuracy if len(evaluations) > 1 else None,
            checkpoint=self._run.checkpoints.folder,
            refused_messages=self._run.listener.refused.total,
            refused_samples=self._run.flow.refused_samples,
            uptime_s=now - self._run.started_s,
            guests=self._run.roster.counts(),
        )

    def _visible_phase(self) -> str:
        """Return the phase; an ended run still shows `draining` until its books are closed."""
        return "draining" if self._run.lifecycle.phase in ENDED and not self._run.over.is_set() else self._run.lifecycle.phase

    def _process_status(self, now: float) -> list[ProcessStatus]:
        beats, pids = self._run.heartbeats(), self._run.supervisor.pids
        rows = []
        for record in self._run.lifecycle.processes.values():
            pid = pids[record.name].pid if record.name in pids else 0
            row = ProcessStatus(record.name, record.kind, pid, record.state, len(record.exit_codes))
            rows.append(_with_wait(row, beats.get(record.name), now))
        for guest in self._run.roster.guests.values():
            row = ProcessStatus(guest.name, "generator", guest.pid, "ready" if guest.is_ready else "starting", joined=True)
            rows.append(_with_wait(row, beats.get(guest.name), now))
        return rows

    def evaluations(self) -> list[EvalReport]:
        """Return the evaluations so far."""
        return list(self._run.reporter.evaluations)

    async def steps_from(self, first: int) -> AsyncIterator[StepReport]:
        """Yield reports from step `first` until the run has ended."""
        reports, sent = self._run.reporter.steps, 0
        while sent < len(reports) or not self._run.over.is_set():
            while sent < len(reports):
                report = reports[sent]
                sent += 1
                if report.step >= first:
                    yield report
            await self._until_moved(partial(self._has_more, sent))

    def _has_more(self, sent: int) -> bool:
        return len(self._run.reporter.steps) > sent or self._run.over.is_set()

    async def _until_moved(self, reached: Callable[[], bool]) -> None:
        """Wait until a step or a phase has made this true."""
        while not reached():
            self._run.moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._run.moved.wait()

    def metrics_text(self) -> str:
        """Return the newest metrics in Prometheus' text form."""
        return self._run.reporter.prometheus_text()

    async def pause(self) -> RunStatus:
        """Hold the run; return once no step is in hand any more (an outside learner's step is in the caller's own hands)."""
        self._request(PauseRequested())
        if self._run.config.learner.kind == "builtin":
            await self._until_moved(lambda: self._run.feed.idle or self._run.lifecycle.phase != "paused")
        return self.status()

    async def resume(self) -> RunStatus:
        """Go on."""
        return self._request(ResumeRequested())

    async def drain(self) -> RunStatus:
        """End the run in good order; return once it has ended."""
        self._request(DrainRequested())
        await self._run.over.wait()
        return self.status()

    async def stop(self) -> RunStatus:
        """End the run at once; return once it has ended."""
        self._request(StopRequested())
        await self._run.over.wait()
        return self.status()

    def _request(self, event: Event) -> RunStatus:
        refusal = self._run.lifecycle.refusal(event)
        if refusal:
            raise RunError(refusal)
        self._run.supervisor.post(event)
        return self.status()

    async def checkpoint(self) -> str:
        """Write a checkpoint; return its folder."""
        return await self._run.checkpoints.wait_for_next(self._run.feed.version)

    async def submit(self, group: ExternalGroup) -> SubmitResult:
        """Take in a group generated elsewhere."""
        if self._run.lifecycle.over:
            raise RunError("the run is over")
        return self._run.flow.submit(group)

    async def take(self) -> GroupsTaken:
        """Hand the next step's groups to an outside learner."""
        self._only_external()
        try:
            return await self._run.feed.take_outside(self._run.ending)
        except RunError as error:
            if not self._run.lifecycle.over:
                raise
            raise RunError(f"{error}: {self._run.lifecycle.reason}") from error

    async def trained(self, step: int, metrics: dict[str, float]) -> None:
        """Note that an outside learner has done a step."""
        self._only_external()
        if self._run.lifecycle.over:
            raise RunError("the run is over")
        now = self._run.clock.now()
        self._run.step_done(self._run.feed.outside_step(step, metrics, now))

    async def announce_weights(self, available: WeightsAvailable, model_folder: str) -> None:
        """Tell the generators about a version that an outside learner has published."""
        self._only_external()
        if self._run.lifecycle.over:
            return
        if model_folder and not self._run.model_folder:
            self._run.model_folder = model_folder
            self._run.tell_model_folder()
        self._run.spread(available)

    def _only_external(self) -> None:
        if self._run.config.learner.kind != "external":
            raise RunError('this run has its own learner; set learner.kind = "external" to train outside')


def _with_wait(row: ProcessStatus, beat: Heartbeat | None, now: float) -> ProcessStatus:
    """Return the row with what its process waits for, by its newest heartbeat."""
    if beat is None or not beat.waiting_for:
        return row
    # A guest's clock is of another machine: its wait is at most as long as the run.
    return msgspec.structs.replace(row, waiting_for=beat.waiting_for, waiting_s=max(0.0, now - beat.waiting_since_s))
