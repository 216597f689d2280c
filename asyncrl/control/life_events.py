"""What can happen to a run, and what is to be done about it: the vocabulary of control/lifecycle.py.

Whoever sees something happen (supervisor, controller, watchdog, a user) says so with an event; the lifecycle answers with
instructions; the supervisor carries them out. Plain values: no behaviour here.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.schema.control import ProcessKind
from asyncrl.schema.status import Phase

FINAL_PHASES: frozenset[Phase] = frozenset({"stopped", "failed"})


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """A process that the run wants to have."""

    name: str
    kind: ProcessKind


# -- events --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """Start the run; the first event, and only the first."""


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    """The launcher has a pid for this incarnation."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class ProcessReady:
    """The process can do its work (learner: LearnerReady; generator: EngineReady; inference: ModelsReady; reward: hello)."""

    name: str


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """This incarnation is gone; the code is negative for a signal. `incarnation` 0 means the current one."""

    name: str
    kind: ProcessKind
    code: int
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class ProcessSilent:
    """No heartbeat for `heartbeat_timeout_s`."""

    name: str
    silent_s: float


@dataclass(frozen=True, slots=True)
class StartTimeout:
    """Started `start_timeout_s` ago and still not ready."""

    name: str
    waited_s: float


@dataclass(frozen=True, slots=True)
class ProcessFault:
    """The process says that it cannot go on; fatal: a restart would meet the same end."""

    name: str
    reason: str
    fatal: bool


@dataclass(frozen=True, slots=True)
class ProcessWanted:
    """The run could use one process more; one of that name that left comes back, one that is there stays."""

    name: str
    kind: ProcessKind


@dataclass(frozen=True, slots=True)
class ProcessUnwanted:
    """The run can do without this process: it finishes what it holds and goes."""

    name: str


@dataclass(frozen=True, slots=True)
class EvaluationDone:
    """The evaluation that the phase `evaluating` stands for is finished."""


@dataclass(frozen=True, slots=True)
class StepsDone:
    """The goal is reached: the last step's version exists, or there are no prompts left."""


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """A user wants generation to stand still."""


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """A user wants it to go on."""


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """A user (Ctrl-C), or the time limit, wants an orderly end with a checkpoint."""

    reason: str = "drain requested"


@dataclass(frozen=True, slots=True)
class Drained:
    """Everything that draining waits for is on disk."""


@dataclass(frozen=True, slots=True)
class DrainTimeout:
    """Draining took longer than `drain_timeout_s`."""

    waited_s: float


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A user wants the end now."""

    reason: str = "stop requested"


@dataclass(frozen=True, slots=True)
class Stalled:
    """The watchdog gave up: nothing moved for `stall_timeout_s`; the reason names who waits for whom."""

    reason: str


Event = (
    Begin
    | ProcessStarted
    | ProcessReady
    | ProcessExited
    | ProcessSilent
    | StartTimeout
    | ProcessFault
    | ProcessWanted
    | ProcessUnwanted
    | EvaluationDone
    | StepsDone
    | PauseRequested
    | ResumeRequested
    | DrainRequested
    | Drained
    | DrainTimeout
    | StopRequested
    | Stalled
)

# -- instructions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Start this incarnation after `delay_s` seconds (back-off; 0 at first)."""

    name: str
    kind: ProcessKind
    incarnation: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class KillProcess:
    """End the current incarnation at once; its exit is reported like any other."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class RetireProcess:
    """Let the process finish what it holds and end; one that is not up yet is not started. Its exit is no death."""

    name: str
    kind: ProcessKind
    incarnation: int


@dataclass(frozen=True, slots=True)
class AnnounceDead:
    """The process is gone: issue its groups again (generator, reward) or replay its steps (learner)."""

    name: str
    kind: ProcessKind
    reason: str


@dataclass(frozen=True, slots=True)
class EnterPhase:
    """The run is now in this phase."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class EndRun:
    """Shut every process down; the run ended well or not, and why."""

    ok: bool
    reason: str


Instruction = StartProcess | KillProcess | RetireProcess | AnnounceDead | EnterPhase | EndRun
