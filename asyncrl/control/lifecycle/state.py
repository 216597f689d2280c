"""Run life, decided purely: which phase the run is in, which processes should be up, and when it is over.

Invariants (check_invariants, after every event in tests):
- A process has at most one incarnation that is starting, up, ready, dying or leaving; incarnation numbers only grow.
- Every process that is not up in a live run has a restart on its way; none is started once the run is over.
- A process that left because it is not wanted is down, and nobody starts it until it is wanted again. That is no death. One
  that is wanted again while it leaves is started once it is gone.
- Every death is announced exactly once, when the process is really gone, before its restart is asked for.
- `stopped` and `failed` are final: an `EndRun` is given exactly once, and nothing but exits is expected after it.
- Time during which the controller itself stood still is not counted as silence of a process.

Phases: starting -> warming -> (evaluating) -> running -> (evaluating) -> draining -> stopped; paused stands beside evaluating and
running; failed can follow anything. The supervisor carries the instructions out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field
from typing import Literal

from asyncrl.config.run import SupervisionConfig
from asyncrl.control.lifecycle import events as ev
from asyncrl.observe.decisions import Machine
from asyncrl.schema.control import ProcessKind
from asyncrl.schema.status import ENDED, Phase

ProcessState = Literal["planned", "starting", "up", "ready", "dying", "restarting", "leaving", "left", "gone"]
LONGEST_BACKOFF_S = 30.0
OUT_OF_MEMORY = " (where nobody sent it, the machine or the container ran out of memory: fewer slots or processes)"
_COMES_IN: dict[type, frozenset[Phase]] = {
    ev.EvaluationDone: frozenset({"evaluating", "draining"}),
    ev.StepsDone: frozenset({"evaluating", "running", "draining"}),
    ev.Drained: frozenset({"draining"}),
}
"""Events that can come in some phases only. While paused it is the phase that was left that counts."""


class IllegalTransitionError(AssertionError):
    """An event came that cannot come in this phase; the message carries the recent story."""


@dataclass(slots=True)
class ProcessRecord:
    """What the run knows about one of its processes."""

    name: str
    kind: ProcessKind
    state: ProcessState = "planned"
    incarnation: int = 0
    deaths: list[tuple[float, str]] = field(default_factory=list)
    """When it died, within the window, and the node that it was lost with; empty where it was not."""
    exit_codes: list[int] = field(default_factory=list)
    """Of every incarnation that died. Exits after the run's end, and of processes that were not wanted, are no deaths."""
    departures: int = 0
    """Incarnations that left because the run could do without them."""
    reason: str = ""
    """Why it was killed or said it would die; empty where nobody knows."""
    returns: bool = False
    """It is leaving, and was wanted again since."""


@dataclass(eq=False)
class Heartbeats:
    """When each process was last heard of.

    From its start to its first heartbeat a process has `start_timeout_s`: Python, torch and the model are being loaded. After
    that every gap may last `heartbeat_timeout_s`. A process that beats and is not ready yet is not late: preparing may take long.
    """

    config: SupervisionConfig
    _heard: dict[str, tuple[float, bool]] = field(default_factory=dict)
    """When, and whether that was a heartbeat; else its start."""
    _looked_s: float | None = None

    def expect(self, name: str, now: float) -> None:
        """Begin to wait for the first heartbeat of a new incarnation."""
        self._heard[name] = now, False

    def beat(self, name: str, now: float) -> None:
        """Note a heartbeat; of a process that is not expected it is ignored."""
        if name in self._heard:
            self._heard[name] = now, True

    def forget(self, name: str) -> None:
        """Expect nothing more of it."""
        self._heard.pop(name, None)

    def overdue(self, now: float) -> dict[str, str]:
        """Return who is late at `now`, and in words by how much. Call it every `heartbeat_s`."""
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
    """Every process the run wants, by unique name; may be empty (everything is outside code)."""
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
        """The last step's version has existed, even if a learner has gone back behind it since."""
        self._begun = False
        self._now = 0.0
        self._phase_since_s = 0.0
        self._resume_to: Phase = "running"
        self._drain_reason = "goal reached"
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
        """Raise IllegalTransitionError, with the state unchanged, where the event cannot come now."""
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
        """Raise AssertionError where the state contradicts itself."""
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
                    self._end(
                        ok=False, reason=f"draining took {waited_s:.0f} s, longer than supervision.drain_timeout_s allows"
                    )  # fmt: skip
            case ev.StepsDone() if not self.goal_reached and self.phase != "draining":
                self.goal_reached = True
                self._advance("evaluating" if self.evaluate_last else "draining")
            case ev.EvaluationDone() if self.phase != "draining":
                self._advance("draining" if self.goal_reached else "running")
            case ev.PauseRequested() if self.phase != "paused":
                self._resume_to = self.phase
                self._enter("paused")
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
        """Enter `phase`, or, while paused, remember to enter it when the run goes on."""
        if self.phase == "paused":
            self._resume_to = phase
        else:
            self._enter(phase)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._phase_since_s = self._now
        self._out.append(ev.EnterPhase(phase))

    def _end(self, *, ok: bool, reason: str) -> None:
        self._enter("stopped" if ok else "failed")
        self.reason = reason
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

    def _start(self, record: ProcessRecord, delay_s: float) -> None:
        record.incarnation += 1
        record.state = "restarting" if delay_s > 0 else "starting"
        record.reason = ""
        self._out.append(ev.StartProcess(record.name, record.kind, record.incarnation, delay_s))

    def _kill(self, record: ProcessRecord, reason: str) -> None:
        """End a process, once; the end of one that is leaving is still no death."""
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
        record.deaths.append((self._now, event.node))
        exited = f"{record.name} exited with {_exit_text(event.code)}{OUT_OF_MEMORY * (event.code == -9)}"
        lost = f"{record.name} is lost: its node {event.node}, or its actor there, is gone"
        why = record.reason or (lost if event.code == ev.LOST else exited)
        self._out.append(ev.AnnounceDead(record.name, record.kind, why))
        window_s = self.config.death_window_s
        for each in self.processes.values():
            each.deaths = [death for death in each.deaths if self._now - death[0] <= window_s]
        deaths = {each.name: len(each.deaths) for each in self.processes.values() if each.deaths}
        num_deaths = self._num_deaths()
        if num_deaths <= self.config.max_deaths:
            doublings = min(deaths[record.name] - 1, 30)
            self._start(record, float(min(self.config.backoff_s * 2**doublings, LONGEST_BACKOFF_S)))
            return
        record.state = "gone"
        listing = "; ".join(
            f"{name} ended with {', '.join(map(_exit_text, self.processes[name].exit_codes[-number:]))}"
            for name, number in deaths.items()
        )
        self._end(
            ok=False,
            reason=f"{num_deaths} deaths within {window_s:.0f} s, allowed are {self.config.max_deaths} "
            f"(supervision.max_deaths): {listing}; the last: {why}; see {self.logs_folder}/{record.name}.log",
        )

    def _num_deaths(self) -> int:
        """Return how many deaths there were in the window; those of all that was lost with one node are one."""
        own, nodes = 0, Counter[str]()
        for record in self.processes.values():
            lost = Counter(node for _, node in record.deaths)
            own += lost.pop("", 0)
            nodes |= lost
        return own + nodes.total()


def _exit_text(code: int) -> str:
    """Return an exit code in words, `signal 9` for -9."""
    if code == ev.LOST:
        return "the loss of its node"
    return f"signal {-code}" if code < 0 else f"code {code}"
