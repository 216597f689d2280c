"""The events and instructions of the lifecycle (state.py).

Supervisor, controller, stall detector and users report what happened as events. The lifecycle answers with instructions, and the
supervisor carries them out. Plain values without behaviour.
"""

from __future__ import annotations

import msgspec

from asyncrl.observe.machine import Value
from asyncrl.schema.control import ProcessKind
from asyncrl.schema.status import Phase

LOST = 256
"""Used instead of an exit code, which is never this large: the process was lost with its node, or with Ray's actor there."""


class ProcessPlan(msgspec.Struct, frozen=True):
    """A process that the run needs."""

    name: str
    kind: ProcessKind


# -- events --------------------------------------------------------------------------------------------------------------


class Begin(Value, frozen=True):
    """Start the run; the first event, and only the first."""


class Tick(Value, frozen=True):
    """Time passed: a heartbeat or the end of a drain may be overdue. Comes every `heartbeat_s`."""


class Heard(Value, frozen=True):
    """A heartbeat of a process arrived; it is ignored if the process is not expected."""

    name: str


class ProcessStarted(Value, frozen=True):
    """The launcher has a pid for this incarnation."""

    name: str
    incarnation: int


class ProcessReady(Value, frozen=True):
    """The process can do its work (learner: LearnerReady; generator: EngineReady; inference: ModelsReady; reward: hello)."""

    name: str


class ProcessExited(Value, frozen=True):
    """This incarnation is gone; the code is negative for a signal. `incarnation` 0 means the current one."""

    name: str
    code: int
    incarnation: int = 0
    node: str = ""
    """The lost node, if the code is LOST."""


class ProcessFault(Value, frozen=True):
    """The process reports that it cannot continue; fatal: a restart would fail in the same way."""

    name: str
    reason: str
    fatal: bool


class ProcessWanted(Value, frozen=True):
    """The run needs this process: it is started again if it has left or is leaving; if it is there, it stays."""

    name: str
    kind: ProcessKind


class ProcessUnwanted(Value, frozen=True):
    """The run does not need this process: it finishes what it holds and ends."""

    name: str


class EvaluationDone(Value, frozen=True):
    """The evaluation of the phase `evaluating` is finished."""


class StepsDone(Value, frozen=True):
    """The goal is reached: the last step's version exists, or there are no prompts left."""


class PauseRequested(Value, frozen=True):
    """A user or an alarm asks to pause."""

    reason: str = ""


class ResumeRequested(Value, frozen=True):
    """A user asked to continue."""


class DrainRequested(Value, frozen=True):
    """A user (Ctrl-C) or the time limit asks for an orderly end with a checkpoint."""

    reason: str = "drain requested"


class Drained(Value, frozen=True):
    """Everything that draining waits for is on disk."""


class StopRequested(Value, frozen=True):
    """A user or an alarm asks for an immediate end."""

    reason: str = "stop requested"


class Stalled(Value, frozen=True):
    """The run cannot succeed: nothing moved for `stall_timeout_s`, or too many samples failed. The reason says which."""

    reason: str


ProcessEvent = ProcessStarted | ProcessReady | ProcessExited | ProcessFault | ProcessWanted | ProcessUnwanted
Request = PauseRequested | ResumeRequested | DrainRequested | StopRequested
Event = Begin | Tick | Heard | ProcessEvent | EvaluationDone | StepsDone | Request | Drained | Stalled

# -- instructions --------------------------------------------------------------------------------------------------------


class StartProcess(Value, frozen=True):
    """Start this incarnation after `delay_s` seconds (back-off; 0 at first)."""

    name: str
    kind: ProcessKind
    incarnation: int
    delay_s: float


class KillProcess(Value, frozen=True):
    """Kill the current incarnation; its exit is reported like any other."""

    name: str
    reason: str


class RetireProcess(Value, frozen=True):
    """Let the process finish what it holds and end; if it is not up yet, do not start it. Its exit does not count as a death."""

    name: str
    kind: ProcessKind
    incarnation: int


class AnnounceDead(Value, frozen=True):
    """The process is gone: issue its groups again (generator, reward) or replay its steps (learner)."""

    name: str
    kind: ProcessKind
    reason: str
    was_leaving: bool = False
    """Whether the process was leaving, so that its end does not count as a death."""


class EnterPhase(Value, frozen=True):
    """The run is now in this phase."""

    phase: Phase


class EndRun(Value, frozen=True):
    """Shut every process down; says whether the run ended well, and why."""

    ok: bool
    reason: str


Instruction = StartProcess | KillProcess | RetireProcess | AnnounceDead | EnterPhase | EndRun
