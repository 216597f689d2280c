"""Carries out the lifecycle's decisions: starts, watches, kills and restarts the processes of a run.

RUN/pids.jsonl records the pid of each process: one line per start, one line per end; a reader combines them. So a start costs the
same however many processes there are. The file is also used to end processes that a dead controller has left.

Invariants:
- Every process has one task here that owns it from its start to its exit; when `run` returns or raises, no process is left.
- Processes are killed by the handle they were started with (recorded in RUN/pids.jsonl), never by name.
- pids.jsonl is always right: a complete line is appended at once, and a line that a crash cut short is ignored. Each controller
  starts the file again.
- Callbacks run on the event loop, inside `post`; they may post further events, which are handled in order.

The controller runs `run()` in its task group, posts what it learns, and answers `on_end` by telling the processes to stop over
their channels and then awaiting `shutdown(deadline_s)`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from asyncrl.clock import Clock
from asyncrl.config.run import SupervisionConfig
from asyncrl.control.launch.processes import Launcher, ProcessHandle, ProcessSpec
from asyncrl.control.lifecycle import events as ev
from asyncrl.control.lifecycle.state import Lifecycle
from asyncrl.errors import LaunchError
from asyncrl.folders import write_whole
from asyncrl.schema.control import ProcessKind
from asyncrl.schema.status import Phase

log = logging.getLogger(__name__)

COULD_NOT_START = 127
"""Exit code of a process that could not be started."""
KILL_GRACE_S = 3.0
"""Time between SIGTERM and SIGKILL."""
PIDS_FILE = "pids.jsonl"
END_BY_ITSELF_S = 5.0
"""How long a process has to notice that its controller is gone."""


class PidRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One process; its end is not set while it lives."""

    name: str
    kind: ProcessKind
    pid: int
    incarnation: int
    started_s: float
    ended_s: float | None = None


@dataclass(slots=True)
class LiveProcess:
    """A process from its start to its exit."""

    handle: ProcessHandle
    pid: PidRecord
    kill_at_s: float | None = None
    """When it will be killed, after it was asked to end."""


@dataclass(eq=False)
class Supervisor:
    """Owns the processes of one run. Nothing starts before `run`. Callbacks are called on the event loop, at once.

    Example:
        >>> supervisor = Supervisor(lifecycle, LocalLauncher(), spec_for, config.supervision, clock, run_folder, on_dead, ...)
        >>> async with asyncio.TaskGroup() as group:
        ...     group.create_task(supervisor.run())
        ...     ...  # on_end fired: say goodbye, then
        ...     await supervisor.shutdown(deadline_s=10.0)
    """

    lifecycle: Lifecycle
    launcher: Launcher
    spec_for: Callable[[str, ProcessKind, int], ProcessSpec]
    """(name, kind, incarnation) -> what to start."""
    config: SupervisionConfig
    clock: Clock
    run_folder: Path
    on_dead: Callable[[ev.AnnounceDead], None]
    """A process is gone: issue its groups again, or replay its steps."""
    on_phase: Callable[[Phase], None]
    on_end: Callable[[bool, str], None]
    """The run is over (ok, reason): say Shutdown over the channels, then await `shutdown`."""
    on_restart: Callable[[PidRecord], None] = lambda _: None
    on_leave: Callable[[str], None] = lambda _: None
    """A process must leave: once it holds nothing, send Shutdown over its channel, or call `terminate` if it has none."""
    live: dict[str, LiveProcess] = field(default_factory=dict, init=False)
    _inbox: deque[ev.Event] = field(default_factory=deque, init=False)
    _handling: bool = field(default=False, init=False)
    _group: asyncio.TaskGroup | None = field(default=None, init=False)
    _owners: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)
    """By process: the task that owns its newest incarnation."""
    _none_left: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def post(self, event: ev.Event) -> None:
        """Tell the lifecycle what happened and carry out what follows; safe to call from a callback.

        Raises:
            IllegalTransitionError: The event is not allowed now; for requests of users call `Lifecycle.refusal` first.
        """
        self._inbox.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._inbox:
                for instruction in self.lifecycle.handle(self._inbox.popleft(), self.clock.now()):
                    self._carry_out(instruction)
        finally:
            self._handling = False

    def terminate(self, name: str) -> None:
        """End a process that cannot be told over its channel; does nothing if it is gone."""
        if (process := self.live.get(name)) is not None:
            process.kill_at_s = self.clock.now() + KILL_GRACE_S
            process.handle.terminate()

    async def run(self) -> None:
        """Start the run; return once it is over, `shutdown` was called, and no process is left.

        Cancelling it kills every process before it returns.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                watching = group.create_task(self._watch(), name="supervisor-watch")
                begin_pids(self.run_folder, self.clock.now())
                self.post(ev.Begin())
                await self._none_left.wait()
                watching.cancel()
        finally:
            for process in self.live.values():
                process.handle.kill()
            for name, process in list(self.live.items()):
                await process.handle.wait()
                self._went_away(name)

    async def shutdown(self, deadline_s: float) -> None:
        """End every process: wait for those that were told to end, then terminate, then kill.

        Args:
            deadline_s: How long processes may take to end by themselves.
        """
        for name, owner in self._owners.items():
            if name not in self.live:
                owner.cancel()
        if self._owners:
            _, staying = await asyncio.wait(self._owners.values(), timeout=deadline_s)
            if staying:
                log.warning("still up %.0f s after they were told to stop: %s; ending them", deadline_s, ", ".join(self.live))
                for name in self.live:
                    self.terminate(name)
                await asyncio.wait(staying, timeout=KILL_GRACE_S)
                for process in self.live.values():
                    process.handle.kill()
                await asyncio.wait(staying)
        self._none_left.set()

    def _carry_out(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.StartProcess(name, _, incarnation):
                assert self._group is not None, "nothing is started before run()"
                self._owners[name] = self._group.create_task(self._own(instruction), name=f"own-{name}-{incarnation}")
            case ev.KillProcess(name, reason):
                log.warning("ending %s: %s", name, reason)
                self.terminate(name)
            case ev.RetireProcess(name, _, incarnation):
                log.info("%s is not needed any more", name)
                if name in self.live:
                    self.on_leave(name)
                    return
                if (owner := self._owners.get(name)) is not None:
                    owner.cancel()
                self.post(ev.ProcessExited(name, 0, incarnation))
            case ev.AnnounceDead(name, _, reason, was_leaving):
                log.log(logging.INFO if was_leaving else logging.WARNING, "%s is gone: %s", name, reason)
                self.on_dead(instruction)
            case ev.EnterPhase(phase):
                log.info("phase %s", phase)
                self.on_phase(phase)
            case ev.EndRun(ok, reason):
                log.log(logging.INFO if ok else logging.ERROR, "run ended: %s", reason)
                self.on_end(ok, reason)

    async def _own(self, start: ev.StartProcess) -> None:
        """Start one incarnation and stay with it until it is gone."""
        await self.clock.sleep(start.delay_s)
        log.info("starting %s (incarnation %d)", start.name, start.incarnation)
        try:
            handle = await self.launcher.start(self.spec_for(start.name, start.kind, start.incarnation))
        except LaunchError as error:
            log.error("%s", error)  # noqa: TRY400 - the message is complete
            self.post(ev.ProcessExited(start.name, COULD_NOT_START, start.incarnation))
            return
        record = PidRecord(start.name, start.kind, handle.pid, start.incarnation, self.clock.now())
        self.live[start.name] = LiveProcess(handle, record)
        note_pid(self.run_folder, record)
        if start.incarnation > 1:
            self.on_restart(record)
        self.post(ev.ProcessStarted(start.name, start.incarnation))
        code = await handle.wait()
        self._went_away(start.name)
        self.post(ev.ProcessExited(start.name, code, start.incarnation, handle.node if code == ev.LOST else ""))

    def _went_away(self, name: str) -> None:
        note_pid(self.run_folder, msgspec.structs.replace(self.live.pop(name).pid, ended_s=self.clock.now()))

    async def _watch(self) -> None:
        while True:
            await self.clock.sleep(self.config.heartbeat_s)
            self.post(ev.Tick())
            now = self.clock.now()
            for process in self.live.values():
                if process.kill_at_s is not None and now >= process.kill_at_s:
                    process.handle.kill()


def end_left(run_folder: Path) -> None:
    """End processes that a dead controller left. A stopped (SIGSTOP) or hanging process does not see that its parent is gone."""
    left = []
    with contextlib.suppress(OSError, KeyError, msgspec.DecodeError):
        for record in read_pids(run_folder).values():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(record.pid)
                if f" {record.name} {run_folder.resolve()} " in " ".join(process.cmdline()):  # and no other program by now
                    left.append(process)
    for process in psutil.wait_procs(left, timeout=END_BY_ITSELF_S)[1]:
        with contextlib.suppress(psutil.Error):
            process.kill()


def begin_pids(run_folder: Path, now: float) -> None:
    """Start the file again, with this process, the controller."""
    first = msgspec.json.encode(PidRecord("controller", "controller", os.getpid(), 0, now)) + b"\n"
    write_whole(run_folder / PIDS_FILE, first, onto_disk=False)


def note_pid(run_folder: Path, record: PidRecord) -> None:
    """Append a process that started, or ended."""
    with (run_folder / PIDS_FILE).open("ab") as file:
        file.write(msgspec.json.encode(record) + b"\n")


def read_pids(run_folder: Path) -> dict[str, PidRecord]:
    """Return the live processes of a run by name, the controller not among them.

    Raises:
        FileNotFoundError: The run has never started a process.
    """
    live: dict[str, PidRecord] = {}
    *lines, _cut_short = (run_folder / PIDS_FILE).read_bytes().split(b"\n")
    for line in lines:
        record = msgspec.json.decode(line, type=PidRecord)
        if record.ended_s is not None:
            live.pop(record.name, None)
        elif record.kind != "controller":
            live[record.name] = record
    return live
