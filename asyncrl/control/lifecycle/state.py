"""The pure state machine of a run's life: which phase the run is in, which processes should be up, and when it is over.

Invariants (check_invariants, after every event in tests):
- A process has at most one incarnation that is starting, up, ready, dying or leaving; incarnation numbers only grow.
- In a live run, every process that is not up has a restart scheduled; after the end none is started.
- A process that left because it was not needed is down, and is not started until it is needed again. This is not a death. If it
  is needed again while it is leaving, it is started once it is gone.
- Every death is announced exactly once, when the process is really gone, before its restart is requested.
- `stopped` and `failed` are final: an `EndRun` is given exactly once, and only exits are expected after it.
- Time during which the controller itself was blocked does not count as silence of a process.

Phases: starting -> warming -> (evaluating) -> running -> (evaluating) -> draining -> stopped; evaluating and running can be
paused; any phase can fail. The supervisor carries out the instructions.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field
from typing import Literal

from asyncrl.config.run import SupervisionConfig
from asyncrl.control.lifecycle import events as ev
from asyncrl.observe.machine import Machine
from asyncrl.schema.control import ProcessKind
from asyncrl.schema.status import ENDED, Phase

ProcessState = Literal["planned", "starting", "up", "ready", "dying", "restarting", "leaving", "left", "gone"]
LONGEST_BACKOFF_S = 30.0
GOAL_REACHED = "goal reached"
"""Reason of the end of a run that did all it was to do, its last evaluation included."""
DRAIN_TIMED_OUT = "longer than supervision.drain_timeout_s allows"
"""End of the reason of a run whose drain took too long."""
OUT_OF_MEMORY = " (where nobody sent it, the machine or the container ran out of memory: fewer slots or processes)"
_COMES_IN: dict[type, frozenset[Phase]] = {
    ev.EvaluationDone: frozenset({"evaluating", "draining"}),
    ev.StepsDone: frozenset({"evaluating", "running", "draining"}),
    ev.Drained: frozenset({"draining"}),
}
"""Events that are allowed only in some phases. While paused, the phase before the pause counts."""


class IllegalTransitionError(AssertionError):
    """An event came that is not allowed in this phase; the message has the recent events."""


@dataclass(slots=True)
class ProcessRecord:
    """The state of one process of the run."""

    name: str
    kind: ProcessKind
    state: ProcessState = "planned"
    incarnation: int = 0
    deaths: list[tuple[float, str, str]] = field(default_factory=list)
    """Its deaths within the window: the time, the node that was lost (empty if none was), and how it ended, as text."""
    exit_codes: list[int] = field(default_factory=list)
    """Exit codes of all incarnations that died. Exits after the run's end, or of processes not needed, are not deaths."""
    departures: int = 0
    """Number of incarnations that left because they were not needed."""
    reason: str = ""
    """Why it was killed, or its own error; empty if unknown."""
    last_death: str = ""
    """Why it died last; empty if it never died."""
    returns: bool = False
    """Whether it is leaving and is needed again, so that it must be started afterwards."""

    @property
    def is_coming(self) -> bool:
        """Return whether it is being started, for the first time or after its death."""
        return self.state in {"dying", "restarting", "starting", "up"}


@dataclass(eq=False)
class Heartbeats:
    """Times of the last heartbeat of each process.

    Before its first heartbeat a process has `start_timeout_s`, because Python, torch and the model are being loaded. After that
    every gap may last `heartbeat_timeout_s`. A process that sends heartbeats is not late, even if it needs long to be ready.
    """

    config: SupervisionConfig
    _heard: dict[str, tuple[float, bool]] = field(default_factory=dict)
    """By process: the time, and whether that was a heartbeat (True) or its start."""
    _looked_s: float | None = None

    def expect(self, name: str, now: float) -> None:
        """Start to wait for the first heartbeat of a new incarnation."""
        self._heard[name] = now, False

    def beat(self, name: str, now: float) -> None:
        """Note a heartbeat; it is ignored if the process is not expected."""
        if name in self._heard:
            self._heard[name] = now, True

    def forget(self, name: str) -> None:
        """Expect no more heartbeats of a process."""
        self._heard.pop(name, None)

    def overdue(self, now: float) -> dict[str, str]:
        """Return the processes that are late at `now`, each with a text about it. Call it every `heartbeat_s`."""
        away_s = 0.0 if self._looked_s is None else now - self._looked_s - self.config.heartbeat_s
        self._looked_s = now
        if away_s > 2 * self.config.heartbeat_s:
            self._heard = {name: (heard_s + away_s, beats) for name, (heard_s, beats) in self._heard.items()}
        late = {}
        for name, (heard_s, beats) in self._heard.items():
            waited_s = now - heard_s
            if waited_s > (self.config.heartbeat_timeout_s if beats else self.config.start_timeout_s):
                late[name] = f"{name} sent no heartbeat " + (
                    f"for {waited_s:.0f} s" if beats else f"in {waited_s:.0f} s since its start"
                )
        return late


@dataclass(eq=False)
class Lifecycle(Machine[ev.Event, ev.Instruction]):
    """The state machine of one run.

    Example:
        >>> life = Lifecycle([ev.ProcessPlan("learner", "learner")], SupervisionConfig())
        >>> life.handle(ev.Begin(), now=0.0)[0]
        EnterPhase(phase='starting')
    """

    name = "lifecycle"

    plan: InitVar[Iterable[ev.ProcessPlan]]
    """Every process that the run needs, by unique name; may be empty (everything is outside code)."""
    config: SupervisionConfig
    evaluate_first: bool = False
    evaluate_last: bool = False
    logs_folder: str = "logs"

    def __post_init__(self, plan: Iterable[ev.ProcessPlan]) -> None:
        self.phase: Phase = "starting"
        self.reason = ""
        self.processes = {item.name: ProcessRecord(item.name, item.kind) for item in plan}
        self._heartbeats = Heartbeats(self.config)
        self.goal_reached = False
        """Whether the last step's version has existed, even if a learner went back to an earlier version since."""
        self._begun = False
        self._now = 0.0
        self._phase_since_s = 0.0
        self._resume_to: Phase = "running"
        self._drain_reason = GOAL_REACHED
        self._out: list[ev.Instruction] = []
        self._story: deque[str] = deque(maxlen=40)

    @property
    def over(self) -> bool:
        """Return whether the run has ended, well or not."""
        return self.phase in ENDED

    def refusal(self, event: ev.Event) -> str:
        """Return why a user's request cannot be met now, or an empty string when it can."""
        if isinstance(event, ev.PauseRequested | ev.ResumeRequested) and self.phase not in {"running", "evaluating", "paused"}:
            wanted = "only a running run can be paused" if isinstance(event, ev.PauseRequested) else "only a paused run can go on"
            return f"{wanted}; this one is {self.phase}"
        if isinstance(event, ev.DrainRequested | ev.StopRequested) and self.over:
            return f"the run is over ({self.phase}: {self.reason})"
        return ""

    def _decide(self, event: ev.Event, now: float) -> list[ev.Instruction]:
        """Raise IllegalTransitionError, with the state unchanged, if the event is not allowed now."""
        refused, comes_in = "", _COMES_IN.get(type(event))
        phase = self._resume_to if self.phase == "paused" else self.phase
        if self._begun == isinstance(event, ev.Begin):
            refused = "the run has begun before" if self._begun else "the run has not begun"
        elif isinstance(event, ev.ProcessEvent) and event.name not in self.processes and not isinstance(event, ev.ProcessWanted):
            refused = f"no process of that name; there are {sorted(self.processes)}"
        elif isinstance(event, ev.PauseRequested | ev.ResumeRequested):
            refused = self.refusal(event)
        elif comes_in is not None and not self.over and phase not in comes_in:
            refused = f"it comes in {' or '.join(sorted(comes_in))} only, and this run is {self.phase}"
        if refused:
            raise IllegalTransitionError(f"{event} at {now:.3f}: {refused}\nrecent story:\n  " + "\n  ".join(self._story))
        self._now, self._out = now, []
        if isinstance(event, ev.ProcessExited):
            self._exited(event)
        elif self.over:
            pass
        elif isinstance(event, ev.ProcessEvent):
            self._process_event(event)
        else:
            self._run_event(event)
        if self._out or not isinstance(event, ev.Tick | ev.Heard):
            self._story.append(f"{now:.3f} {event} -> {self._out or 'nothing'} [{self.phase}]")
        return self._out

    def check_invariants(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        assert not (self.phase == "failed" and not self.reason), "a failed run has no reason"
        for record in self.processes.values():
            assert (record.state == "planned") == (record.incarnation == 0), record
            assert not record.returns or record.state == "leaving" or self.over, record
            if not self.over and self._begun:
                assert record.state not in {"planned", "gone"}, f"{record.name} is down and nobody starts it: {record}"
            if self.over:
                assert record.state != "restarting", f"{record.name} would start after the end"
            else:
                ended = record.incarnation - (record.state not in {"planned", "left"})
                assert len(record.exit_codes) + record.departures == ended, (
                    f"{record.name}: incarnations that ended and exit codes differ: {record}"
                )

    # -- the run's phases --------------------------------------------------------------------------------------------------

    def _run_event(self, event: ev.Event) -> None:
        match event:
            case ev.Begin():
                self._begun = True
                self._enter("starting")
                for record in self.processes.values():
                    self._start(record, delay_s=0.0)
                self._leave_start()
            case ev.Heard(name):
                self._heartbeats.beat(name, self._now)
            case ev.Tick():
                for name, reason in self._heartbeats.overdue(self._now).items():
                    self._kill(self.processes[name], reason)
                waited_s = self._now - self._phase_since_s
                if self.phase == "draining" and waited_s > self.config.drain_timeout_s:
                    self._end(ok=False, reason=f"{self._drain_reason}; draining took {waited_s:.0f} s, {DRAIN_TIMED_OUT}")
            case ev.StepsDone() if not self.goal_reached and self.phase != "draining":
                self.goal_reached = True
                self._advance("evaluating" if self.evaluate_last else "draining")
            case ev.EvaluationDone() if self.phase != "draining":
                self._advance("draining" if self.goal_reached else "running")
            case ev.PauseRequested(reason) if self.phase != "paused":
                self._resume_to = self.phase
                self._enter("paused", reason)
            case ev.ResumeRequested() if self.phase == "paused":
                self._enter(self._resume_to)
            case ev.DrainRequested(reason) if self.phase != "draining":
                self._drain_reason = reason
                self._enter("draining")
            case ev.Drained():
                self._end(ok=True, reason=self._drain_reason)
            case ev.StopRequested(reason):
                self._end(ok=True, reason=reason)
            case ev.Stalled(reason):
                absent = [each.name for each in self.processes.values() if each.state in {"starting", "restarting"}]
                self._end(ok=False, reason=f"{reason}; not started yet: {', '.join(absent)}" if absent else reason)

    def _leave_start(self) -> None:
        """Move on from `starting` once all processes are up, from `warming` once one of every kind is ready."""
        wanted = [record for record in self.processes.values() if record.state not in {"leaving", "left"}]
        if self.phase == "starting" and all(record.state in {"up", "ready"} for record in wanted):
            self._enter("warming")
        ready = {record.kind for record in wanted if record.state == "ready"}
        if self.phase == "warming" and all(record.kind in ready for record in wanted):
            self._enter("evaluating" if self.evaluate_first else "running")

    def _advance(self, phase: Phase) -> None:
        """Enter `phase`, or, while paused, remember to enter it when the run continues."""
        if self.phase == "paused":
            self._resume_to = phase
        else:
            self._enter(phase)

    def _enter(self, phase: Phase, reason: str = "") -> None:
        self.phase, self.reason = phase, reason
        self._phase_since_s = self._now
        self._out.append(ev.EnterPhase(phase))

    def _end(self, *, ok: bool, reason: str) -> None:
        self._enter("stopped" if ok else "failed", reason)
        for record in self.processes.values():
            if record.state == "restarting":
                record.state = "gone"
        self._out.append(ev.EndRun(ok, reason))

    # -- its processes -----------------------------------------------------------------------------------------------------

    def _process_event(self, event: ev.ProcessEvent) -> None:
        match event:
            case ev.ProcessStarted(name, incarnation):
                record = self.processes[name]
                if incarnation == record.incarnation:
                    self._heartbeats.expect(name, self._now)
                    if record.state in {"starting", "restarting"}:
                        record.state = "up"
                self._leave_start()
            case ev.ProcessReady(name):
                record = self.processes[name]
                if record.state in {"starting", "up"}:
                    record.state = "ready"
                self._leave_start()
            case ev.ProcessFault(name, reason, fatal):
                if fatal:
                    self._end(ok=False, reason=f"{name}: {reason}")
                else:
                    self._kill(self.processes[name], f"{name}: {reason}")
            case ev.ProcessWanted(name, kind):
                record = self.processes.setdefault(name, ProcessRecord(name, kind))
                record.returns = record.state == "leaving"
                if record.state in {"planned", "left"}:
                    self._start(record, delay_s=0.0)
            case ev.ProcessUnwanted(name):
                record = self.processes[name]
                record.returns = False
                if record.state not in {"leaving", "left"}:
                    is_going_anyway = record.state == "dying"
                    record.state = "leaving"
                    self._out += [] if is_going_anyway else [ev.RetireProcess(name, record.kind, record.incarnation)]
                    self._leave_start()

    def _start(self, record: ProcessRecord, delay_s: float) -> None:
        record.incarnation += 1
        record.state = "restarting" if delay_s > 0 else "starting"
        record.reason = ""
        self._out.append(ev.StartProcess(record.name, record.kind, record.incarnation, delay_s))

    def _kill(self, record: ProcessRecord, reason: str) -> None:
        """Kill a process, once; if it was leaving, its end still does not count as a death."""
        if record.state in {"starting", "up", "ready", "leaving"} and not record.reason:
            if record.state != "leaving":
                record.state = "dying"
            record.reason = reason
            self._out.append(ev.KillProcess(record.name, reason))

    def _exited(self, event: ev.ProcessExited) -> None:
        record = self.processes[event.name]
        if event.incarnation not in {0, record.incarnation} or record.state in {"planned", "left", "gone"}:
            return
        self._heartbeats.forget(record.name)
        if self.over:
            record.state = "gone"
            return
        if record.state == "leaving":
            record.state = "left"
            record.departures += 1
            why = record.reason or "it was not needed any more"
            self._out.append(ev.AnnounceDead(record.name, record.kind, why, was_leaving=True))
            if record.returns:
                record.returns = False
                self._start(record, delay_s=0.0)
            return
        record.exit_codes.append(event.code)
        ended = "an error" if record.reason else _exit_text(event.code)  # the signal after an error is our own
        record.deaths.append((self._now, event.node, ended))
        exited = f"{record.name} exited with {_exit_text(event.code)}{OUT_OF_MEMORY * (event.code == -9)}"
        lost = f"{record.name} is lost: its node {event.node}, or its actor there, is gone"
        why = record.last_death = record.reason or (lost if event.code == ev.LOST else exited)
        self._out.append(ev.AnnounceDead(record.name, record.kind, why))
        window_s = self.config.death_window_s
        for each in self.processes.values():
            each.deaths = [death for death in each.deaths if self._now - death[0] <= window_s]
        num_deaths = self._num_deaths()
        if num_deaths <= self.config.max_deaths:
            doublings = min(len(record.deaths) - 1, 30)
            self._start(record, float(min(self.config.backoff_s * 2**doublings, LONGEST_BACKOFF_S)))
            return
        record.state = "gone"
        listing = "; ".join(
            f"{each.name} ended with {', '.join(ended for _, _, ended in each.deaths)}"
            for each in self.processes.values()
            if each.deaths
        )
        self._end(
            ok=False,
            reason=f"{num_deaths} deaths within {window_s:.0f} s, allowed are {self.config.max_deaths} "
            f"(supervision.max_deaths): {listing}; the last: {why}; see {self.logs_folder}/{record.name}.log",
        )

    def _num_deaths(self) -> int:
        """Return the number of deaths in the window; all processes lost with one node count as one death."""
        own, nodes = 0, Counter[str]()
        for record in self.processes.values():
            lost = Counter(node for _, node, _ in record.deaths)
            own += lost.pop("", 0)
            nodes |= lost
        return own + nodes.total()


def _exit_text(code: int) -> str:
    """Return an exit code as text, `signal 9` for -9."""
    if code == ev.LOST:
        return "the loss of its node"
    return f"signal {-code}" if code < 0 else f"code {code}"
