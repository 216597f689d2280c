"""The daemon's runs from submission to end: it starts them in order, follows them, finds them again and resumes them.

A run's controller is detached, so it continues when the daemon ends. A new daemon checks every run that had not ended: if the
controller is alive, the run is adopted, in the same attempt; if it is gone, the run is resumed, in the next attempt. `settled` is
set once every run was checked.

Invariants: a run has at most one task that starts or follows it. A lost controller is replaced at most MOST_RESTARTS times in a
row without a new step, after growing pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from asyncrl.client import CONTROLLER_END_S, START_TIMEOUT_S, Run, RunClient, connect, has_done, newest_saved
from asyncrl.clock import Clock
from asyncrl.config.learner import PretrainedModel
from asyncrl.config.load import dump_config, load_config
from asyncrl.config.run import RunConfig
from asyncrl.control.launch.process_main import BY_SIGTERM
from asyncrl.control.launch.processes import find_controllers, is_live, kill_controllers, until_gone
from asyncrl.control.lifecycle.state import DRAIN_TIMED_OUT
from asyncrl.control.lifecycle.supervisor import end_left
from asyncrl.errors import AlreadyRunsError, AsyncRLError, ConfigError, RunError, RunLostError
from asyncrl.observe.steps import EVENTS_FILE, STEPS_FILE, StepReport, Tail, accuracies, newest_row, read_evals, read_events
from asyncrl.schema.samples import ScoreRequest
from asyncrl.schema.status import ENDED, Judged, RunStatus
from asyncrl.serve.machine import Machine, admit, demand_of, in_order, machine, misfits
from asyncrl.serve.records import RECORD_FILE, SUBMITTED_FILE, Answered, Demand, Outcome, Records, RunRecord
from asyncrl.serve.submit import Submission

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Time between two checks of a live run."""
MOST_RESTARTS = 2
BACKOFF_S = 1.0
AGAIN_S = 5.0
LEAST_FREE_BYTES = 256 << 20
"""If the disk has less free space than this, new runs are refused and queued ones wait."""
START = "start"
"""In a fork's folder: the checkpoint to start from, as hard links, since the parent may remove it before the fork starts."""


class _Told(msgspec.Struct, frozen=True):
    """A RunEvent of a controller that may have another version than this daemon: it may have any kind."""

    seq: int
    kind: str
    subject: str = ""
    text: str = ""


class Keeper:
    """Holds the runs. Use as a context manager; `settled` is set when all earlier runs were checked."""

    def __init__(self, records: Records, machine: Machine, clock: Clock) -> None:
        self.records, self.machine, self._clock = records, machine, clock
        self.settled = asyncio.Event()
        self.statuses: dict[str, RunStatus] = {}
        """The newest status of every live run."""
        self._clients: dict[str, RunClient] = {}
        """Clients of the runs that are followed."""
        self._changed = asyncio.Event()
        self._drains = False
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._unsettled: set[str] = set()
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Check earlier runs, then start queued ones, until cancelled; live runs continue afterwards."""
        async with asyncio.TaskGroup() as self._group:
            try:
                begun = [run.id for run in self.records.runs.values() if run.state in {"starting", "live"}]
                self._unsettled = set(begun)
                self._settle("")
                for run in begun:
                    self._begin(run, of_before=True)
                self._group.create_task(self._look_for_gpus(), name="look-for-gpus")
                while True:
                    self._changed.clear()
                    try:
                        self._start_queued()
                    except (OSError, sqlite3.Error) as error:
                        log.error("queued runs cannot be started: %s; tried again in %g s", error, AGAIN_S)  # noqa: TRY400
                        await self._clock.sleep(AGAIN_S)
                    else:
                        await self._changed.wait()
            finally:
                for task in self._tasks.values():
                    task.cancel()

    def _start_queued(self) -> None:
        """Start the runs that fit the machine; a run that can never fit this machine (the folder was moved) has failed.

        Raises:
            OSError: The disk is full.
        """
        queued = [] if self._drains else in_order(self.records.runs.values())
        if not queued:
            return
        if full := self.full_disk():
            raise OSError(full)
        for record in queued:
            if (faults := misfits(self.machine, record.demand)) and not (record.demand.gpus and self.machine.is_asked_again):
                self._ended(replace(record, reason="; ".join(faults)), "failed")
        for run, gpus in admit(self.machine, self.records.runs.values()).items():
            record = self.records.runs[run]
            # The end of an earlier attempt is no longer the run's, also where this daemon is killed before `_start` notes so.
            self.records.put_run(replace(record, state="starting", gpus=gpus, events_before=record.events_told))
            self._begin(run, of_before=False)

    def full_disk(self) -> str:
        """Return that the disk has no room for another run; empty if it has."""
        folder = self.records.run_folder("")
        free_bytes = shutil.disk_usage(folder).free
        return f"the disk of {folder} has {free_bytes >> 20} MiB free: make room" if free_bytes < LEAST_FREE_BYTES else ""

    async def _look_for_gpus(self) -> None:
        if self.machine.is_asked_again:
            log.error("nvidia-smi gives no answer: queued runs that need a GPU wait; it is asked again every %g s", AGAIN_S)
        while self.machine.is_asked_again:
            await self._clock.sleep(AGAIN_S)
            with contextlib.suppress(OSError):
                there = await asyncio.to_thread(machine)
                self.machine = replace(self.machine, gpus=there.gpus, is_asked_again=there.is_asked_again)
            self._changed.set()

    def _settle(self, run: str) -> None:
        """Note that an earlier run was checked."""
        self._unsettled.discard(run)
        if not self._unsettled:
            self.settled.set()

    def _begin(self, run: str, *, of_before: bool) -> None:
        assert self._group is not None
        self._tasks[run] = self._group.create_task(self._hold(run, of_before=of_before), name=f"run-{run}")

    async def _hold(self, run: str, *, of_before: bool) -> None:
        """Keep a run alive to its end; after an error, check it again later. Errors of one run do not affect the others.

        A run that another process holds and that does not answer has failed after START_TIMEOUT_S.
        """
        held_s = 0.0
        while True:
            try:
                lives = await self._find_again(self.records.runs[run]) if of_before else False
                self._settle(run)
                if lives is not None:
                    await self._keep(self.records.runs[run], lives=lives, of_before=of_before)
            except (AlreadyRunsError, OSError, sqlite3.Error) as error:
                held_s = held_s + AGAIN_S if isinstance(error, AlreadyRunsError) else 0.0
                if held_s > START_TIMEOUT_S:
                    self._ended(replace(self.records.runs[run], reason=str(error)), "failed")
                    return
                log.error("the run %s cannot be followed: %s; checked again in %g s", run, error, AGAIN_S)  # noqa: TRY400
            except Exception as error:
                log.exception("the run %s cannot be followed", run)
                if not is_live(self.records.run_folder(run)):
                    with contextlib.suppress(OSError, sqlite3.Error):
                        self._ended(replace(self.records.runs[run], reason=f"it cannot be followed: {error!r}"), "failed")
                        return
            else:
                return
            finally:
                self._settle(run)
            await self._clock.sleep(AGAIN_S)
            of_before = True

    def tell(self, kind: str, run: str = "", text: str = "", who: str = "") -> None:
        """Record an event."""
        self.records.add_event(self._clock.now(), kind, run, text, who)

    # -- what is asked ---------------------------------------------------------------------------------------------------

    def submit(
        self, asked: Submission, config: RunConfig, demand: Demand, who: str, parent: str, answers: tuple[str, Answered] | None
    ) -> RunRecord:
        """Queue a run whose config was checked; `answers`, an idempotency key and its meaning, is stored with it.

        Raises:
            RunError: There is a run with that name, or the checkpoint of a fork has LoRA adapters.
        """
        folder = self.records.run_folder(config.name)
        left = {START, SUBMITTED_FILE, f"{RECORD_FILE}.partial"}  # by a daemon that was killed before the run was queued
        if config.name in self.records.runs or (folder.exists() and {path.name for path in folder.iterdir()} - left):
            raise RunError(f"there is a run {config.name!r}; give this one another name")
        start = Path(config.model.path) if parent and isinstance(config.model, PretrainedModel) else None
        if start is not None and (start / "adapter_config.json").is_file():
            raise RunError(
                f"{start} has LoRA adapters beside its base: merge them into the base (peft's merge_and_unload, then "
                "save_pretrained), and submit a run with that folder as model.path"
            )
        number = 1 + max((record.number for record in self.records.runs.values()), default=0)
        record = RunRecord(
            id=config.name, number=number, priority=asked.priority, project=asked.project, tags=asked.tags, submitted_by=who,
            demand=demand, parent=parent, queued_s=self._clock.now(), num_steps=config.num_steps,
        )  # fmt: skip
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if start is not None:
                shutil.rmtree(folder / START, ignore_errors=True)
                shutil.copytree(
                    start, folder / START, ignore=shutil.ignore_patterns("trainer"),
                    copy_function=lambda source, target: os.link(os.path.realpath(source), target),
                )  # fmt: skip
                config = replace(config, model=replace(config.model, path=str(folder / START)))
            (folder / SUBMITTED_FILE).write_text(dump_config(config), encoding="utf-8")
            self.records.put_run(record, answers)
        except (OSError, sqlite3.Error):
            shutil.rmtree(folder, ignore_errors=True)  # what was refused does not keep the name
            raise
        self.tell("submitted", record.id, who=who)
        self._changed.set()
        return record

    def cancel(self, run: str, who: str) -> RunRecord:
        """Remove a queued run from the queue.

        Raises:
            RunError: The run is not queued.
        """
        record = self.records.runs[run]
        if record.state != "queued":
            raise RunError(f"{run} is {record.state}: only a queued run is cancelled; `stop` or `drain` ends a live one")
        self._ended(replace(record, reason=f"cancelled by {who}"), "cancelled")
        return self.records.runs[run]

    def resume_ended(self, run: str, who: str, num_steps: int = 0) -> RunRecord:
        """Queue an ended run, to continue where it stopped.

        Raises:
            RunError: The run has not ended, has done all its steps, or its folder is gone.
        """
        record = self.records.runs[run]
        if record.state != "ended":
            raise RunError(f"{run} is {record.state}: it needs no resume")
        goal, folder = num_steps or record.num_steps, self._folder(run)
        if record.version >= goal and has_done(folder, goal, record.reason):
            raise RunError(f"{run} has done its {goal} steps; give num_steps to take it further")
        record = replace(record, state="queued", outcome="", reason="", drains=False, num_steps=goal, ended_s=0.0)
        self.records.put_run(record)
        self.tell("asked", run, "resume", who)
        self._changed.set()
        return record

    async def ask(self, run: str, what: str, asker: str, **given: Any) -> Any:  # noqa: ANN401 - what the run's client takes and returns
        """Send an order to a live run: pause, resume, checkpoint, drain, stop, change. A starting run ends once it has started.

        Returns:
            The run's answer; None if it ended before it got the order.

        Raises:
            RunError: The run is not live, or refuses.
        """
        record = self.records.runs[run]
        if record.state in {"starting", "live"} and what in {"drain", "stop"}:
            self.records.put_run(replace(record, drains=True))
            while (record := self.records.runs[run]).state == "starting":  # noqa: ASYNC110 - it has no event of its own
                await asyncio.sleep(LOOK_S)
            if record.state == "ended":
                return None
        if record.state != "live":
            raise RunError(
                f"{run} is {record.state}{f' ({record.outcome})' if record.outcome else ''}: only a live run can {what}"
            )
        self.tell("asked", run, what, asker)
        async with connect(self.records.run_folder(run)) as client:
            return await getattr(client, what)(**given)

    def status(self, run: str) -> RunStatus:
        """Return a live run's own status, or the recorded status of a run that is not live."""
        if (status := self.statuses.get(run)) is not None:
            return status
        record = self.records.runs[run]
        phases = {"queued": "queued", "ended": "failed" if record.outcome == "failed" else "stopped"}
        return RunStatus(
            name=run, run_folder=str(self.records.run_folder(run)), reason=record.reason, version=record.version,
            phase=phases.get(record.state, "starting"), num_steps=record.num_steps,
            accuracy_before=record.accuracy_before, accuracy_after=record.accuracy_after,
        )  # fmt: skip

    async def judge(self, run: str, judged: Judged) -> list[ScoreRequest]:
        """Send a program's scores to a run; return the next samples to score, or none while the run is not live.

        Scores that a lost controller did not receive are requested again by the next one.

        Raises:
            RunError: The run has ended, has its own rewards, or another program scores.
        """
        record, client = self.records.runs[run], self._clients.get(run)
        if record.state == "ended":
            raise RunError(f"{run} has ended: {record.reason or record.outcome}")
        with contextlib.suppress(RunLostError):
            if client is not None:
                try:
                    return await client.judge(judged)
                except RunError:
                    self._take(run, await client.status())  # the program looks whether the run ends
                    raise
        await self._clock.sleep(LOOK_S)
        return []

    async def drain_all(self) -> None:
        """Drain every live run and wait for their ends; no other run is started. The next daemon continues them."""
        self._drains = True

        async def drain(run: str) -> None:
            while self.records.runs[run].state in {"starting", "live"}:
                with contextlib.suppress(AsyncRLError):
                    async with connect(self.records.run_folder(run)) as client:
                        await client.drain()
                await asyncio.wait([self._tasks[run]], timeout=LOOK_S)

        async with asyncio.TaskGroup() as group:
            for record in self.records.runs.values():
                group.create_task(drain(record.id))

    # -- one run ---------------------------------------------------------------------------------------------------------

    def _folder(self, run: str) -> Path:
        """Return a run's folder.

        Raises:
            RunError: It is gone.
        """
        folder = self.records.run_folder(run)
        if not folder.is_dir():
            raise RunError(f"the folder of {run} is gone (moved or deleted): {folder}")
        return folder

    async def _find_again(self, record: RunRecord) -> bool | None:
        """Check a run that an earlier daemon began; if its controller was just starting, wait for it, or kill it after a time.

        Returns:
            Whether it has a live controller; None if the run has ended.
        """
        folder, until_s = self.records.run_folder(record.id), time.monotonic() + START_TIMEOUT_S
        while not is_live(folder) and bool(await asyncio.to_thread(find_controllers, folder)):
            if time.monotonic() > until_s:
                kill_controllers(folder)
            await asyncio.sleep(0.1)
        if is_live(folder):
            self.tell("adopted", record.id)
            return True
        record = self.records.runs[record.id]  # it may have been told to end meanwhile
        end = _told_end(folder, record.events_before)
        if end is not None and (end != ("stopped", BY_SIGTERM) or record.drains):  # else the machine went down
            await self._pass_on(record.id, self._untold(record.id))
            record = self.records.runs[record.id]
            began_s = record.started_s or next(event.time_s for event in read_events(folder))  # it has its last one
            await self._conclude(replace(record, started_s=began_s), *end)
            return None
        return False

    async def _keep(self, record: RunRecord, *, lives: bool, of_before: bool) -> None:
        """Keep a run alive until it ends: start its controller, follow it, and start another if it is lost.

        Raises:
            AlreadyRunsError: The run already has a controller, of whomever, so none was started.
        """
        in_vain = 0
        while True:
            before = record.version
            try:
                if not lives and record.drains:
                    self._ended(replace(record, reason="it was told to end as no controller of it was alive"), "stopped")
                    return
                async with contextlib.AsyncExitStack() as starting:
                    if not lives:
                        await self._start(record, starting, of_before=of_before)
                    record = self.records.runs[record.id]  # it may have been told to end meanwhile
                    self.records.put_run(replace(record, state="live", started_s=record.started_s or self._clock.now()))
                    phase, reason = await self._follow(record.id, starting)
            except RunLostError as error:
                phase, reason = "", str(error)
            except AsyncRLError as error:
                found = self.records.runs[record.id]
                if isinstance(error, AlreadyRunsError) and (of_before or is_live(self.records.run_folder(record.id))):
                    self.records.put_run(replace(found, attempts=record.attempts, events_before=record.events_before))
                    raise  # its controller was not to be seen yet, or somebody else resumed the run: it is adopted
                self._ended(replace(found, reason=str(error)), "failed")
                return
            lives, of_before, record = False, True, self.records.runs[record.id]
            folder, goal = self.records.run_folder(record.id), record.num_steps
            goes_on = phase == "failed" and reason.endswith(DRAIN_TIMED_OUT)
            if phase == "stopped":  # at its goal without a checkpoint, the outside learner would have to come back
                goes_on = record.version < goal or (newest_saved(folder) >= goal and not has_done(folder, goal, reason))
            if self._drains and (phase not in ENDED or (goes_on and not record.drains)):  # by the next daemon
                self.records.put_run(replace(record, state="queued", gpus=()))
                return
            if phase in ENDED:
                await self._conclude(record, phase, reason)
                return
            await asyncio.to_thread(end_left, folder)
            record = self.records.runs[record.id]  # it may have been told to end meanwhile
            in_vain = 0 if record.version > before else in_vain + 1
            if record.drains or in_vain > MOST_RESTARTS:
                why = "its controller was lost" + ("" if record.drains else f" {in_vain} times without a step between: {reason}")
                self._ended(replace(record, reason=why), "stopped" if record.drains else "failed")
                return
            self.records.put_run(replace(record, state="starting"))
            self.tell("lost", record.id, reason)
            await self._clock.sleep(BACKOFF_S * (1 << in_vain))
            record = self.records.runs[record.id]

    async def _start(self, record: RunRecord, starting: contextlib.AsyncExitStack, *, of_before: bool) -> None:
        """Start a run's controller, in the run's folder if there is one already; `starting` holds the run.

        Raises:
            RunLostError: The controller was killed before it answered.
            AlreadyRunsError: The run already has a controller.
            AsyncRLError: The controller could not be started.
        """
        folder = self._folder(record.id)
        resumed = (folder / "config.toml").exists()
        if not of_before:
            await until_gone(folder, CONTROLLER_END_S)  # of a run that has ended
        elif await asyncio.to_thread(find_controllers, folder):  # as it goes on as a fork of itself, one look may see neither
            raise AlreadyRunsError(f"{folder} already runs")
        before = max((event.seq for event in read_events(folder)), default=0)
        record = self.records.runs[record.id]  # it may have been told to end meanwhile
        record = replace(record, state="starting", attempts=record.attempts + 1, events_before=before)
        self.records.put_run(record)
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(record.gpus)} if self.machine.gpus or record.gpus else {}
        source = folder / ("config.toml" if resumed else SUBMITTED_FILE)
        config = await asyncio.to_thread(
            load_config, source, {"num_steps": record.num_steps, "folder": str(folder.parent), "name": record.id}
        )  # fmt: skip
        await starting.enter_async_context(
            Run(config, resume=folder if resumed else None, detached=True, environment=environment)
        )  # fmt: skip
        self.tell("resumed" if resumed else "started", record.id, f"attempt {record.attempts}")

    async def _follow(self, run: str, starting: contextlib.AsyncExitStack) -> tuple[str, str]:
        """Follow a live run; return its last phase and reason; the phase is empty if its controller is lost.

        A live controller that does not answer is asked again, and killed if it has not answered for CONTROLLER_END_S.
        """
        folder, events = self.records.run_folder(run), self._untold(run)
        status: RunStatus | None = None
        lost, until_s = "", 0.0
        while status is None or status.phase not in ENDED:
            try:
                async with connect(folder) as client, contextlib.AsyncExitStack() as following:
                    await starting.aclose()  # not before: owner.grace_s may be 0, and somebody must hold the run
                    self._clients[run], lost = client, ""
                    following.callback(self._clients.pop, run)  # before it is closed
                    while status is None or status.phase not in ENDED:
                        status = await client.status()
                        self._take(run, status)
                        await self._pass_on(run, events)
                        await self._clock.sleep(0 if status.phase in ENDED else LOOK_S)
            except AsyncRLError as error:
                until_s = until_s if lost else self._clock.now() + CONTROLLER_END_S
                lost = str(error)
                if not is_live(folder):
                    break
                if self._clock.now() >= until_s:  # with the next controller two would share the run
                    kill_controllers(folder)
                    break
                await self._clock.sleep(LOOK_S)
        await until_gone(folder, CONTROLLER_END_S)
        await self._pass_on(run, events)
        if status is not None and not lost:
            return status.phase, status.reason
        return _told_end(folder, self.records.runs[run].events_before) or ("", lost)

    def _take(self, run: str, status: RunStatus) -> None:
        self.statuses[run] = status
        record = self.records.runs[run]
        newer = replace(
            record, accuracy_before=status.accuracy_before, accuracy_after=status.accuracy_after,
            version=record.version if status.version < 0 else status.version,  # of a resumed run whose learner is not ready
            num_steps=status.num_steps,  # it may have been changed
        )  # fmt: skip
        told, before = ((one.version // 50, one.accuracy_after, one.num_steps) for one in (newer, record))
        if told != before:
            self.records.put_run(newer)
        else:
            self.records.runs[run] = newer

    def _untold(self, run: str) -> Tail:
        """Return the run's events that the daemon has not recorded yet, also those from times without a daemon."""
        return Tail(self.records.run_folder(run) / EVENTS_FILE, "seq", "event", self.records.runs[run].events_told)

    async def _pass_on(self, run: str, events: Tail) -> None:
        while rows := await events.rows():
            for _, _, line in rows:
                event, demand = msgspec.json.decode(line, type=_Told), self.records.runs[run].demand
                if event.kind == "change" and "generate.num_workers" in event.text:
                    with contextlib.suppress(ConfigError):
                        config = await asyncio.to_thread(load_config, self.records.config_file(run))
                        demand = await asyncio.to_thread(demand_of, config, self.machine)
                        self._changed.set()
                told = replace(self.records.runs[run], events_told=event.seq, demand=demand)
                if event.kind == "swap":  # one a step; the run's own file has them
                    self.records.runs[run] = told
                else:
                    text = f"{event.subject} {event.text}".strip()
                    self.records.add_event(self._clock.now(), event.kind, run, text, record=told)

    async def _conclude(self, record: RunRecord, phase: str, reason: str) -> None:
        """Record the end that a run has reported."""
        folder = self.records.run_folder(record.id)
        newest = await asyncio.to_thread(newest_row, folder / STEPS_FILE, StepReport)
        before, after = accuracies(await asyncio.to_thread(read_evals, folder))
        version = max(record.version, newest.version if newest else -1)
        done = version >= record.num_steps and has_done(folder, record.num_steps, reason)
        outcome: Outcome = "failed" if phase == "failed" else "done" if done else "stopped"
        record = replace(record, accuracy_before=before, accuracy_after=after)
        self._ended(replace(record, version=version, reason=reason), outcome)

    def _ended(self, record: RunRecord, outcome: Outcome) -> None:
        self.statuses.pop(record.id, None)
        self.records.put_run(replace(record, state="ended", outcome=outcome, gpus=(), ended_s=self._clock.now()))
        self.tell("ended", record.id, f"{outcome}: {record.reason}")
        self._changed.set()


def _told_end(folder: Path, after: int) -> tuple[str, str] | None:
    """Return the final phase and reason from a run's events after number `after`; None if they do not report an end."""
    phases = [(event.subject, event.text) for event in read_events(folder, after) if event.kind == "phase"]
    return phases[-1] if phases and phases[-1][0] in ENDED else None
