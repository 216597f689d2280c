"""Run life, decided purely: which phase the run is in, which processes should be up, and when it is over.

Invariants (check_invariants, after every event in tests):
- A process has at most one incarnation that is starting, up, ready, dying or leaving; incarnation numbers only grow.
- Every process that is not up in a live run has a restart on its way; none is started once the run is over.
- A process that left, because it is not wanted, is down and nobody starts it until it is wanted again; that is no death.
- Every death is announced exactly once, when the process is really gone, before its restart is asked for.
- `stopped` and `failed` are final: an `EndRun` is given exactly once, and nothing but exits is expected after it.

Phases: starting -> warming -> (evaluating) -> running -> (evaluating) -> draining -> stopped; paused stands beside evaluating and
running; failed can follow anything. Called by control/supervisor.py, which carries the instructions out, and by plan/simulate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from asyncrl.config.run import SupervisionConfig
from asyncrl.control.life_events import (
    FINAL_PHASES,
    AnnounceDead,
    Begin,
    Drained,
    DrainRequested,
    DrainTimeout,
    EndRun,
    EnterPhase,
    EvaluationDone,
    Event,
    Instruction,
    KillProcess,
    PauseRequested,
    ProcessExited,
    ProcessFault,
    ProcessPlan,
    ProcessReady,
    ProcessSilent,
    ProcessStarted,
    ProcessUnwanted,
    ProcessWanted,
    ResumeRequested,
    RetireProcess,
    Stalled,
    StartProcess,
    StartTimeout,
    StepsDone,
    StopRequested,
)
from asyncrl.control.process_records import ALIVE, ProcessRecord, backoff_s, deaths_in_window, exit_text, too_many_deaths
from asyncrl.schema.control import ProcessKind
from asyncrl.schema.status import Phase

_COMES_IN: dict[type, frozenset[Phase]] = {
    EvaluationDone: frozenset({"evaluating", "draining"}),
    StepsDone: frozenset({"evaluating", "running", "draining"}),
    Drained: frozenset({"draining"}),
}
"""Events that only some phases know; `paused` counts as the phase beneath it."""


class IllegalTransitionError(AssertionError):
    """An event came that cannot come in this phase; the message carries the recent story."""


class Lifecycle:
    """The state machine of one run.

    Example:
        >>> life = Lifecycle([ProcessPlan("learner", "learner")], SupervisionConfig())
        >>> life.handle(Begin(), now=0.0)[0]
        StartProcess(name='learner', kind='learner', incarnation=1, delay_s=0.0)
    """

    def __init__(
        self,
        plan: list[ProcessPlan] | tuple[ProcessPlan, ...],
        config: SupervisionConfig,
        *,
        evaluate_first: bool = False,
        evaluate_last: bool = False,
        logs_folder: str = "logs",
    ) -> None:
        """Plan a run.

        Args:
            plan: Every process the run wants, by unique name; may be empty (everything is outside code).
            config: Deaths allowed, their window, and the back-off.
            evaluate_first: Pass through `evaluating` before `running`.
            evaluate_last: Pass through `evaluating` once the goal is reached.
            logs_folder: Where the processes' logs lie, for messages.
        """
        self.phase: Phase = "starting"
        self.reason = ""
        self.processes = {item.name: ProcessRecord(item.name, item.kind) for item in plan}
        if len(self.processes) != len(plan):
            raise ValueError(f"process names must be unique, got {[item.name for item in plan]}")
        self._config = config
        self._evaluate_first = evaluate_first
        self._evaluate_last = evaluate_last
        self._logs_folder = logs_folder
        self._begun = False
        self._goal_reached = False
        self._resume_to: Phase = "running"
        self._drain_reason = ""
        self._ended = 0
        self._story: deque[str] = deque(maxlen=40)

    @property
    def over(self) -> bool:
        """Return whether the run has ended, well or not."""
        return self.phase in FINAL_PHASES

    @property
    def goal_reached(self) -> bool:
        """Return whether the last step's version has existed, even if a learner has gone back behind it since."""
        return self._goal_reached

    @property
    def story(self) -> list[str]:
        """Return the last events and what they led to, oldest first."""
        return list(self._story)

    def refusal(self, event: Event) -> str:
        """Return why a user's request cannot be met now, or an empty string when it can."""
        if isinstance(event, PauseRequested) and self.phase not in {"running", "evaluating", "paused"}:
            return f"only a running run can be paused; this one is {self.phase}"
        if isinstance(event, ResumeRequested) and self.phase not in {"running", "evaluating", "paused"}:
            return f"only a paused run can go on; this one is {self.phase}"
        if isinstance(event, DrainRequested | StopRequested) and self.over:
            return f"the run is over ({self.phase}: {self.reason})"
        return ""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event in and return what is to be done about it, in order.

        Args:
            event: What happened.
            now: Clock seconds; never less than at the call before.

        Returns:
            Instructions for the supervisor; empty where nothing follows.

        Raises:
            IllegalTransitionError: The event cannot come now (a bug of the caller); the state is unchanged.
        """
        refused = self._cannot_come(event)
        if refused:
            raise IllegalTransitionError(f"{event} at {now:.3f}: {refused}\nrecent story:\n  " + "\n  ".join(self._story))
        instructions = self._decide(event, now)
        self._story.append(f"{now:.3f} {event} -> {instructions or 'nothing'} [{self.phase}]")
        return instructions

    def check_invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        assert self._ended == int(self.over), f"EndRun was given {self._ended} times in phase {self.phase}"
        assert not (self.phase == "failed" and not self.reason), "a failed run has no reason"
        for record in self.processes.values():
            assert (record.state == "planned") == (record.incarnation == 0), record
            if not self.over and self._begun:
                assert record.state not in {"planned", "gone"}, f"{record.name} is down and nobody starts it: {record}"
            if self.over:
                assert record.state != "restarting", f"{record.name} would start after the end"
            else:
                ended = record.incarnation - (record.state not in {"planned", "left"})
                assert len(record.exit_codes) + record.departures == ended, (
                    f"{record.name}: incarnations that ended and exit codes differ: {record}"
                )

    # -- deciding --------------------------------------------------------------------------------------------------------

    def _cannot_come(self, event: Event) -> str:
        if self._begun == isinstance(event, Begin):
            return "the run has begun before" if self._begun else "the run has not begun"
        name = getattr(event, "name", None)
        if name is not None and name not in self.processes and not isinstance(event, ProcessWanted):
            return f"no process of that name; there are {sorted(self.processes)}"
        if isinstance(event, PauseRequested | ResumeRequested):
            return self.refusal(event)
        comes_in = _COMES_IN.get(type(event))
        if comes_in is None or self.over or self._phase_beneath() in comes_in:
            return ""
        return f"it comes in {' or '.join(sorted(comes_in))} only, and this run is {self.phase}"

    def _decide(self, event: Event, now: float) -> list[Instruction]:
        if isinstance(event, ProcessExited):
            return self._exited(event, now)
        if self.over:
            return []
        handlers: dict[type, Callable[[Any], list[Instruction]]] = {
            Begin: self._begin,
            ProcessStarted: self._came_up,
            ProcessReady: self._came_up,
            ProcessSilent: self._unwell,
            StartTimeout: self._unwell,
            ProcessFault: self._unwell,
            ProcessWanted: self._wanted,
            ProcessUnwanted: self._unwanted,
            EvaluationDone: self._evaluated,
            StepsDone: self._goal,
            PauseRequested: self._pause,
            ResumeRequested: self._resume,
            DrainRequested: self._drain,
            Drained: self._drained,
            DrainTimeout: self._drain_too_long,
            StopRequested: lambda stop: self._end(ok=True, reason=stop.reason),
            Stalled: lambda stall: self._end(ok=False, reason=stall.reason),
        }
        return handlers[type(event)](event)

    def _begin(self, _: Begin) -> list[Instruction]:
        self._begun = True
        instructions: list[Instruction] = [EnterPhase("starting")]
        instructions += [self._start(record, delay_s=0.0) for record in self.processes.values()]
        return instructions + self._leave_start()

    def _start(self, record: ProcessRecord, delay_s: float) -> StartProcess:
        record.incarnation += 1
        record.state = "restarting" if delay_s > 0 else "starting"
        record.last_words = ""
        return StartProcess(record.name, record.kind, record.incarnation, delay_s)

    def _came_up(self, event: ProcessStarted | ProcessReady) -> list[Instruction]:
        record = self.processes[event.name]
        if isinstance(event, ProcessStarted):
            if event.incarnation == record.incarnation and record.state in {"starting", "restarting"}:
                record.state = "up"
        elif record.state in {"starting", "up"}:
            record.state = "ready"
        return self._leave_start()

    def _leave_start(self) -> list[Instruction]:
        """Move on from `starting` once all processes are up, from `warming` once one of every kind is ready."""
        instructions: list[Instruction] = []
        states = [record.state for record in self.processes.values()]
        if self.phase == "starting" and all(state in {"up", "ready", "leaving", "left"} for state in states):
            instructions += self._enter("warming")
        if self.phase == "warming" and not self._kinds_not_ready():
            instructions += self._enter("evaluating" if self._evaluate_first else "running")
        return instructions

    def _kinds_not_ready(self) -> set[ProcessKind]:
        wanted = {record.kind for record in self.processes.values() if record.state not in {"leaving", "left"}}
        return wanted - {record.kind for record in self.processes.values() if record.state == "ready"}

    def _unwell(self, event: ProcessSilent | StartTimeout | ProcessFault) -> list[Instruction]:
        record = self.processes[event.name]
        if isinstance(event, ProcessSilent):
            reason = f"{event.name} sent no heartbeat for {event.silent_s:.0f} s"
        elif isinstance(event, StartTimeout):
            reason = f"{event.name} was not ready {event.waited_s:.0f} s after its start"
        else:
            reason = f"{event.name}: {event.reason}"
            if event.fatal:
                return self._end(ok=False, reason=reason)
        late = isinstance(event, StartTimeout) and record.state == "ready"
        if late or record.state not in {"starting", "up", "ready"}:
            return []
        record.state = "dying"
        record.last_words = reason
        return [KillProcess(record.name, reason)]

    def _wanted(self, event: ProcessWanted) -> list[Instruction]:
        record = self.processes.setdefault(event.name, ProcessRecord(event.name, event.kind))
        return [self._start(record, delay_s=0.0)] if record.state in {"planned", "left"} else []

    def _unwanted(self, event: ProcessUnwanted) -> list[Instruction]:
        record = self.processes[event.name]
        if record.state in {"leaving", "left"}:
            return []
        is_going_anyway = record.state == "dying"
        record.state = "leaving"
        return [] if is_going_anyway else [RetireProcess(record.name, record.kind, record.incarnation)]

    def _exited(self, event: ProcessExited, now: float) -> list[Instruction]:
        record = self.processes[event.name]
        stale = event.incarnation not in {0, record.incarnation}
        if stale or record.state not in ALIVE | {"restarting"}:
            return []
        if self.over:
            record.state = "gone"
            return []
        if record.state == "leaving":
            record.state = "left"
            record.departures += 1
            return [AnnounceDead(record.name, record.kind, "it was not needed any more")]
        record.exit_codes.append(event.code)
        record.deaths_s.append(now)
        why = record.last_words or f"{record.name} exited with {exit_text(event.code)}"
        instructions: list[Instruction] = [AnnounceDead(record.name, record.kind, why)]
        deaths = deaths_in_window(self.processes.values(), self._config, now)
        if deaths > self._config.max_deaths:
            record.state = "gone"
            last_words = f"{why}; see {self._logs_folder}/{record.name}.log"
            said = too_many_deaths(self.processes.values(), self._config, deaths, last_words)
            return instructions + self._end(ok=False, reason=said)
        return [*instructions, self._start(record, backoff_s(record, self._config))]

    def _goal(self, _: StepsDone) -> list[Instruction]:
        if self._goal_reached or self.phase == "draining":
            return []
        self._goal_reached = True
        self._drain_reason = "goal reached"
        return self._advance("evaluating" if self._evaluate_last else "draining")

    def _evaluated(self, _: EvaluationDone) -> list[Instruction]:
        if self.phase == "draining":
            return []
        return self._advance("draining" if self._goal_reached else "running")

    def _pause(self, _: PauseRequested) -> list[Instruction]:
        if self.phase == "paused":
            return []
        self._resume_to = self.phase
        return self._enter("paused")

    def _resume(self, _: ResumeRequested) -> list[Instruction]:
        return self._enter(self._resume_to) if self.phase == "paused" else []

    def _drain(self, event: DrainRequested) -> list[Instruction]:
        if self.phase == "draining":
            return []
        self._drain_reason = event.reason
        return self._enter("draining")

    def _drained(self, _: Drained) -> list[Instruction]:
        return self._end(ok=True, reason=self._drain_reason)

    def _drain_too_long(self, event: DrainTimeout) -> list[Instruction]:
        if self.phase != "draining":
            return []
        return self._end(ok=False, reason=f"draining took {event.waited_s:.0f} s, longer than supervision.drain_timeout_s allows")

    def _phase_beneath(self) -> Phase:
        return self._resume_to if self.phase == "paused" else self.phase

    def _advance(self, phase: Phase) -> list[Instruction]:
        """Enter `phase`, or, while paused, remember to enter it when the run goes on."""
        if self.phase != "paused":
            return self._enter(phase)
        self._resume_to = phase
        return []

    def _enter(self, phase: Phase) -> list[Instruction]:
        self.phase = phase
        return [EnterPhase(phase)]

    def _end(self, *, ok: bool, reason: str) -> list[Instruction]:
        self.phase = "stopped" if ok else "failed"
        self.reason = reason
        self._ended += 1
        for record in self.processes.values():
            if record.state == "restarting":
                record.state = "gone"
        return [EnterPhase(self.phase), EndRun(ok, reason)]
