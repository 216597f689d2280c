"""Run life, phase by phase and death by death."""

from __future__ import annotations

from asyncrl.config.run import SupervisionConfig
from asyncrl.control.lifecycle import events as ev
from asyncrl.control.lifecycle.state import LONGEST_BACKOFF_S, Lifecycle

PLAN = [ev.ProcessPlan("learner", "learner"), *(ev.ProcessPlan(f"generator-{number}", "generator") for number in range(2))]
UP = [ev.Begin(), *(ev.ProcessStarted(item.name, 1) for item in PLAN), *(ev.ProcessReady(item.name) for item in PLAN)]
CONFIG = SupervisionConfig(
    max_deaths=3, death_window_s=100.0, backoff_s=1.0, heartbeat_s=1.0, heartbeat_timeout_s=10.0, start_timeout_s=100.0,
    drain_timeout_s=120.0,
)  # fmt: skip


class Told:
    """A lifecycle and a clock that ticks once an event; invariants are checked after each."""

    def __init__(self, *, evaluate: bool = False, config: SupervisionConfig = CONFIG) -> None:
        self.life = Lifecycle(PLAN, config, evaluate_first=evaluate, evaluate_last=evaluate, logs_folder="RUN/logs")
        self.now = 0.0

    def __call__(self, *events: ev.Event) -> list[ev.Instruction]:
        instructions: list[ev.Instruction] = []
        for event in events:
            self.now += 1.0
            instructions += self.life.handle(event, self.now)
            self.life.check_invariants()
        return instructions

    def up(self) -> Told:
        self(*UP)
        return self


def test_pause_and_resume_come_back_to_the_phase_that_was_left() -> None:
    told = Told(evaluate=True).up()
    assert told(ev.PauseRequested(), ev.ResumeRequested()) == [ev.EnterPhase("paused"), ev.EnterPhase("evaluating")]
    told(ev.EvaluationDone())
    twice = [ev.PauseRequested()] * 2 + [ev.ResumeRequested()] * 2
    assert told(*twice) == [ev.EnterPhase("paused"), ev.EnterPhase("running")]
    told(ev.PauseRequested("alarm off_policy.ess"))
    assert told.life.reason == "alarm off_policy.ess"
    told(ev.ResumeRequested())
    assert told.life.reason == ""


def test_back_off_doubles_with_each_death_in_the_window_and_is_bounded() -> None:
    told = Told(config=SupervisionConfig(max_deaths=20, death_window_s=1000.0, backoff_s=1.0)).up()
    delays = []
    for incarnation in range(1, 9):
        (_, start) = told(ev.ProcessExited("learner", 1, incarnation))
        assert isinstance(start, ev.StartProcess)
        delays.append(start.delay_s)
        told(ev.ProcessStarted("learner", incarnation + 1))
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_BACKOFF_S, LONGEST_BACKOFF_S, LONGEST_BACKOFF_S]


def test_one_death_too_many_names_processes_codes_and_log() -> None:
    told = Told().up()
    dead, *_ = told(ev.ProcessExited("generator-0", -9, 1), ev.ProcessStarted("generator-0", 2))
    assert isinstance(dead, ev.AnnounceDead)
    assert "out of memory" in dead.reason
    told(ev.ProcessExited("learner", 1, 1), ev.ProcessStarted("learner", 2))
    told(ev.ProcessExited("learner", 1, 2), ev.ProcessStarted("learner", 3))
    *_, end = told(ev.ProcessExited("learner", 1, 3))
    assert end == ev.EndRun(
        ok=False,
        reason="4 deaths within 100 s, allowed are 3 (supervision.max_deaths): learner ended with code 1, code 1, code 1; "
        "generator-0 ended with signal 9; the last: learner exited with code 1; see RUN/logs/learner.log",
    )


def test_a_process_that_reported_its_error_did_not_end_with_the_signal_that_followed() -> None:
    told = Told(config=SupervisionConfig(max_deaths=0)).up()
    told(ev.ProcessFault("generator-0", "GenerationError: no memory", fatal=False))
    *_, end = told(ev.ProcessExited("generator-0", -15, 1))
    assert isinstance(end, ev.EndRun)
    assert "generator-0 ended with an error; the last: generator-0: GenerationError: no memory; see" in end.reason


def test_the_loss_of_a_node_is_one_death_however_many_processes_were_on_it_and_nobody_s_memory() -> None:
    told = Told(config=SupervisionConfig(max_deaths=1)).up()
    lost = [ev.ProcessExited(item.name, ev.LOST, 1, "10.0.0.7") for item in PLAN]
    dead = [one for one in told(*lost) if isinstance(one, ev.AnnounceDead)]
    assert [one.reason for one in dead] == [f"{one.name} is lost: its node 10.0.0.7, or its actor there, is gone" for one in dead]
    assert (len(dead), told.life.over) == (3, False)
    told(ev.ProcessStarted("learner", 2))
    *_, end = told(ev.ProcessExited("learner", ev.LOST, 2, "10.0.0.7"))
    assert isinstance(end, ev.EndRun)
    assert "2 deaths within 300 s, allowed are 1" in end.reason
    assert "learner ended with the loss of its node, the loss of its node; generator-0 ended" in end.reason


def beating(told: Told, seconds: int, *names: str) -> list[ev.Instruction]:
    """Let time pass, in which these processes send heartbeats."""
    instructions: list[ev.Instruction] = []
    for _ in range(seconds):
        for name in names:
            told.life.handle(ev.Heard(name), told.now)
        instructions += told(ev.Tick())
    return instructions


def test_silent_process_is_killed_once_and_dies_of_it() -> None:
    told = Told().up()
    assert beating(told, 2, "learner", "generator-0", "generator-1") == []
    (kill,) = beating(told, 15, "generator-0", "generator-1")
    assert kill == ev.KillProcess("learner", "learner sent no heartbeat for 11 s")
    announced = told(ev.ProcessExited("learner", -9, 1))[0]
    assert announced == ev.AnnounceDead("learner", "learner", "learner sent no heartbeat for 11 s")
    assert told.life.processes["learner"].last_death == "learner sent no heartbeat for 11 s"
    told(ev.ProcessStarted("learner", 2))
    assert beating(told, 90, "generator-0", "generator-1") == [], "a new incarnation has time to start again"


def test_time_in_which_the_controller_stood_still_is_no_silence() -> None:
    told = Told().up()
    names = [item.name for item in PLAN]
    beating(told, 5, *names)
    told.now += 90.0
    assert beating(told, 3) == []
    assert len(beating(told, 20)) == len(PLAN)


# -- generators that come and go -------------------------------------------------------------------------------------------


def test_a_wanted_process_is_started_once_and_its_leaving_is_no_death() -> None:
    told, name = Told().up(), "generator-2"
    wanted, unwanted = ev.ProcessWanted(name, "generator"), ev.ProcessUnwanted(name)
    assert told(wanted, wanted) == [ev.StartProcess(name, "generator", 1, 0.0)]
    told(ev.ProcessStarted(name, 1))
    assert told(unwanted, unwanted) == [ev.RetireProcess(name, "generator", 1)]
    assert [type(each) for each in told(ev.ProcessExited(name, 0, 1))] == [ev.AnnounceDead]
    assert told.life.processes[name].exit_codes == []
    assert told(wanted) == [ev.StartProcess(name, "generator", 2, 0.0)]
    told(ev.ProcessExited("generator-1", 1, 1))  # one that is to be started again and is not wanted leaves at once
    assert told(ev.ProcessUnwanted("generator-1")) == [ev.RetireProcess("generator-1", "generator", 2)]
    told(ev.ProcessExited("generator-1", 0, 2))
    gone = told.life.processes["generator-1"]
    assert (gone.state, gone.exit_codes) == ("left", [1])


def test_a_start_goes_on_without_the_process_that_it_waited_for_once_that_one_is_not_wanted() -> None:
    told = Told()
    told(*(event for event in UP if event != ev.ProcessStarted("generator-1", 1) and event != ev.ProcessReady("generator-1")))
    assert told.life.phase == "starting"
    told(ev.ProcessUnwanted("generator-1"))
    assert told.life.phase == "running"


def test_a_process_that_is_wanted_again_while_it_leaves_is_started_once_it_is_gone_unless_it_is_unwanted_since() -> None:
    told, name = Told().up(), "generator-1"
    wanted, unwanted = ev.ProcessWanted(name, "generator"), ev.ProcessUnwanted(name)
    left = ev.AnnounceDead(name, "generator", "it was not needed any more", was_leaving=True)
    assert told(unwanted, wanted) == [ev.RetireProcess(name, "generator", 1)]
    assert told(ev.ProcessExited(name, 0, 1)) == [left, ev.StartProcess(name, "generator", 2, 0.0)]
    told(ev.ProcessStarted(name, 2), unwanted, wanted, unwanted)
    assert told(ev.ProcessExited(name, 0, 2)) == [left]
    assert told.life.processes[name].exit_codes == []


def test_a_process_that_hangs_while_it_leaves_is_killed_once_and_that_is_no_death() -> None:
    told, others = Told().up(), ("learner", "generator-0")
    beating(told, 2, *others, "generator-1")
    told(ev.ProcessUnwanted("generator-1"))
    reason = "generator-1 sent no heartbeat for 11 s"
    assert beating(told, 30, *others) == [ev.KillProcess("generator-1", reason)]
    assert told(ev.ProcessExited("generator-1", -9, 1)) == [ev.AnnounceDead("generator-1", "generator", reason, was_leaving=True)]
    assert (told.life.processes["generator-1"].state, told.life.processes["generator-1"].exit_codes) == ("left", [])


def test_drain_timeout_and_stall_end_badly() -> None:
    told = Told().up()
    told(ev.DrainRequested("alarm reward.dead"))
    told.now += 119.0
    told(ev.Tick())
    assert told.life.phase == "draining"
    reason = "alarm reward.dead; draining took 121 s, longer than supervision.drain_timeout_s allows"
    assert told(ev.Tick())[-1] == ev.EndRun(ok=False, reason=reason)
    assert Told().up()(ev.Stalled("learner waits for a batch"))[-1] == ev.EndRun(ok=False, reason="learner waits for a batch")
    told = Told().up()
    told(ev.ProcessExited("learner", ev.LOST, 1, "10.0.0.7"))  # and no node is there for its next start
    reason = "nothing moved; not started yet: learner"
    assert told(ev.Stalled("nothing moved"))[-1] == ev.EndRun(ok=False, reason=reason)
