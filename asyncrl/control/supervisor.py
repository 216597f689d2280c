"""Carries out what the lifecycle decides: starts, watches, kills and restarts the processes of a run.

Invariants:
- Every process has one task here that owns it from its start to its exit; when `run` returns or raises, none is left.
- Processes are killed by the handle they were started with (recorded in RUN/pids.jsonl), never by name.
- Callbacks run on the event loop, inside `post`; they may post further events, which are taken in order.

The controller shell owns the one Supervisor of a run: it runs `run()` in its task group, posts what it learns, and answers
`on_end` by telling the processes to stop over their channels and then awaiting `shutdown(deadline_s)`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncrl.clock import Clock
from asyncrl.config.run import SupervisionConfig
from asyncrl.control.launcher import Launcher, ProcessHandle, ProcessSpec
from asyncrl.control.life_events import (
    AnnounceDead,
    Begin,
    DrainTimeout,
    EndRun,
    EnterPhase,
    Event,
    Instruction,
    KillProcess,
    ProcessExited,
    ProcessStarted,
    RetireProcess,
    StartProcess,
)
from asyncrl.control.lifecycle import Lifecycle
from asyncrl.control.pids import PidFile, PidRecord
from asyncrl.control.signs_of_life import SignsOfLife
from asyncrl.errors import LaunchError
from asyncrl.schema.control import Heartbeat, ProcessKind
from asyncrl.schema.status import Phase

log = logging.getLogger(__name__)

COULD_NOT_START = 127
"""Exit code of a process that never came to be."""
KILL_GRACE_S = 3.0
"""Between asking a process to end and ending it."""


@dataclass(frozen=True, slots=True)
class SupervisorCallbacks:
    """What the controller wants to be told, on the event loop, at once."""

    on_dead: Callable[[str, ProcessKind], None]
    """A process is gone and will come back: issue its groups again, or replay its steps."""
    on_phase: Callable[[Phase], None]
    on_end: Callable[[bool, str], None]
    """The run is over (ok, reason): say Shutdown over the channels, then await `shutdown`."""
    on_leave: Callable[[str], None] = lambda _: None
    """A process is to go: once it holds nothing, say Shutdown over its channel, or `terminate` where it has none."""


class Supervisor:
    """Owns the processes of one run.

    Example:
        >>> supervisor = Supervisor(lifecycle, LocalLauncher(), spec_for, config.supervision, callbacks, clock, run_folder)
        >>> async with asyncio.TaskGroup() as group:
        ...     group.create_task(supervisor.run())
        ...     ...  # on_end fired: say goodbye, then
        ...     await supervisor.shutdown(deadline_s=10.0)
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        launcher: Launcher,
        spec_for: Callable[[str, ProcessKind, int], ProcessSpec],
        config: SupervisionConfig,
        callbacks: SupervisorCallbacks,
        clock: Clock,
        run_folder: Path,
    ) -> None:
        """Wire a supervisor; nothing starts before `run`.

        Args:
            lifecycle: The state machine that decides.
            launcher: Where processes come from.
            spec_for: (name, kind, incarnation) to what is to be started.
            config: Time-outs and heartbeat interval.
            callbacks: What the controller wants to know.
            clock: Time, real or virtual.
            run_folder: Where pids.jsonl lies.
        """
        self._lifecycle = lifecycle
        self._launcher = launcher
        self._spec_for = spec_for
        self._config = config
        self._callbacks = callbacks
        self._clock = clock
        self._pid_file = PidFile(run_folder)
        self._signs = SignsOfLife(config)
        self._heartbeats: dict[str, Heartbeat] = {}
        self._handles: dict[str, ProcessHandle] = {}
        self._pids: dict[str, PidRecord] = {}
        self._inbox: deque[Event] = deque()
        self._handling = False
        self._group: asyncio.TaskGroup | None = None
        self._owners: dict[str, asyncio.Task[None]] = {}
        self._kill_at_s: dict[str, float] = {}
        self._none_left = asyncio.Event()
        self._closing = False
        self._draining_since_s: float | None = None

    @property
    def heartbeats(self) -> Mapping[str, Heartbeat]:
        """Return the newest heartbeat of every live process, by name."""
        return self._heartbeats

    @property
    def pids(self) -> Mapping[str, PidRecord]:
        """Return the live processes, by name."""
        return self._pids

    def post(self, event: Event) -> None:
        """Tell the lifecycle what happened and carry out what follows; safe to call from a callback.

        Raises:
            IllegalTransitionError: The event cannot come now; ask `Lifecycle.refusal` first for what users request.
        """
        self._inbox.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._inbox:
                for instruction in self._lifecycle.handle(self._inbox.popleft(), self._clock.now()):
                    self._carry_out(instruction)
        finally:
            self._handling = False

    def note_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Take a sign of life in."""
        self._signs.beat(heartbeat.name, self._clock.now())
        if heartbeat.name in self._handles:
            self._heartbeats[heartbeat.name] = heartbeat

    async def run(self) -> None:
        """Begin the run; return once it is over, `shutdown` was called, and no process is left.

        Cancelling it kills every process before it returns.
        """
        if self._closing:
            return
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                watching = group.create_task(self._watch(), name="supervisor-watch")
                self.post(Begin())
                await self._none_left.wait()
                watching.cancel()
        finally:
            await self._kill_what_is_left()

    async def shutdown(self, deadline_s: float) -> None:
        """End every process: wait for those that were told to, then terminate, then kill.

        Args:
            deadline_s: How long processes may take to end by themselves.
        """
        self._closing = True
        for name, owner in self._owners.items():
            if name not in self._handles:
                owner.cancel()
        self._note_if_none_left()
        if not await self._gone_within(deadline_s):
            log.warning(
                "still up %.0f s after they were told to stop: %s; terminating them", deadline_s, ", ".join(self._handles)
            )
            for handle in list(self._handles.values()):
                handle.terminate()
        if not await self._gone_within(KILL_GRACE_S):
            log.warning("killing %s", ", ".join(self._handles))
            for handle in list(self._handles.values()):
                handle.kill()
            await self._none_left.wait()

    # -- carrying out ----------------------------------------------------------------------------------------------------

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, StartProcess):
            self._spawn_owner(instruction)
        elif isinstance(instruction, KillProcess):
            log.warning("ending %s: %s", instruction.name, instruction.reason)
            self._end_process(instruction.name)
        elif isinstance(instruction, RetireProcess):
            self._retire(instruction)
        elif isinstance(instruction, AnnounceDead):
            was_wanted = self._lifecycle.processes[instruction.name].state == "left"
            log.log(logging.INFO if was_wanted else logging.WARNING, "%s is gone: %s", instruction.name, instruction.reason)
            self._callbacks.on_dead(instruction.name, instruction.kind)
        elif isinstance(instruction, EnterPhase):
            self._draining_since_s = self._clock.now() if instruction.phase == "draining" else None
            log.info("phase %s", instruction.phase)
            self._callbacks.on_phase(instruction.phase)
        else:
            self._finish(instruction)

    def _finish(self, end: EndRun) -> None:
        log.log(logging.INFO if end.ok else logging.ERROR, "run ended: %s", end.reason)
        self._callbacks.on_end(end.ok, end.reason)

    def _spawn_owner(self, start: StartProcess) -> None:
        assert self._group is not None, "nothing is started before run()"
        task = self._group.create_task(self._own(start), name=f"own-{start.name}-{start.incarnation}")
        self._owners[start.name] = task
        task.add_done_callback(lambda done: self._owner_done(start.name, done))

    def _owner_done(self, name: str, task: asyncio.Task[None]) -> None:
        if self._owners.get(name) is task:
            del self._owners[name]
        self._note_if_none_left()

    def _note_if_none_left(self) -> None:
        if self._closing and not self._owners:
            self._none_left.set()

    def _retire(self, retire: RetireProcess) -> None:
        log.info("%s is not needed any more", retire.name)
        if retire.name in self._handles:
            self._callbacks.on_leave(retire.name)
            return
        owner = self._owners.get(retire.name)
        if owner is not None:
            owner.cancel()
        self.post(ProcessExited(retire.name, retire.kind, 0, retire.incarnation))

    def terminate(self, name: str) -> None:
        """End a process that is to leave and cannot be told over its channel; nothing where it is gone."""
        self._end_process(name)

    def _end_process(self, name: str) -> None:
        handle = self._handles.get(name)
        if handle is not None:
            self._kill_at_s[name] = self._clock.now() + KILL_GRACE_S
            handle.terminate()

    async def _own(self, start: StartProcess) -> None:
        """Start one incarnation and stay with it until it is gone."""
        await self._clock.sleep(start.delay_s)
        log.info("starting %s (incarnation %d)", start.name, start.incarnation)
        try:
            handle = await self._launcher.start(self._spec_for(start.name, start.kind, start.incarnation))
        except LaunchError as error:
            log.error("%s", error)  # noqa: TRY400 - the message is complete
            self.post(ProcessExited(start.name, start.kind, COULD_NOT_START, start.incarnation))
            return
        self._came_up(start, handle)
        code = await handle.wait()
        self._went_away(start.name)
        self.post(ProcessExited(start.name, start.kind, code, start.incarnation))

    def _came_up(self, start: StartProcess, handle: ProcessHandle) -> None:
        now = self._clock.now()
        self._handles[start.name] = handle
        self._signs.started(start.name, now)
        record = self._pids[start.name] = PidRecord(start.name, start.kind, handle.pid, start.incarnation, now)
        self._pid_file.note(record)
        self.post(ProcessStarted(start.name, start.incarnation))

    def _went_away(self, name: str) -> None:
        del self._handles[name]
        ended = msgspec.structs.replace(self._pids.pop(name), ended_s=self._clock.now())
        self._heartbeats.pop(name, None)
        self._signs.gone(name)
        self._kill_at_s.pop(name, None)
        self._pid_file.note(ended)

    # -- watching --------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await self._clock.sleep(self._config.heartbeat_s)
            now = self._clock.now()
            for late in self._signs.overdue(now):
                self.post(late)
            for name in [name for name, at_s in self._kill_at_s.items() if now >= at_s]:
                self._handles[name].kill()
            self._check_drain(now)

    def _check_drain(self, now: float) -> None:
        since_s = self._draining_since_s
        if since_s is not None and now - since_s > self._config.drain_timeout_s:
            self.post(DrainTimeout(now - since_s))

    async def _gone_within(self, deadline_s: float) -> bool:
        """Return whether every process was gone before `deadline_s` had passed."""
        async with asyncio.TaskGroup() as group:
            gone = group.create_task(self._none_left.wait(), name="none-left")
            late = group.create_task(self._clock.sleep(deadline_s), name="deadline")
            await asyncio.wait({gone, late}, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            late.cancel()
        return self._none_left.is_set()

    async def _kill_what_is_left(self) -> None:
        for handle in self._handles.values():
            handle.kill()
        for name, handle in list(self._handles.items()):
            await handle.wait()
            self._went_away(name)
