"""Whatever happens to a run, in whatever order, its life stays consistent."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.run import SupervisionConfig
from asyncrl.control.lifecycle import events as ev
from asyncrl.control.lifecycle.state import IllegalTransitionError, Lifecycle

PLAN = [ev.ProcessPlan("learner", "learner"), ev.ProcessPlan("generator-0", "generator"), ev.ProcessPlan("reward-0", "reward")]
KINDS = {item.name: item.kind for item in PLAN}
NAMES = st.sampled_from(sorted(KINDS))

NEXT_PHASES = {
    "starting": {"warming", "draining", "stopped", "failed"},
    "warming": {"evaluating", "running", "draining", "stopped", "failed"},
    "evaluating": {"running", "paused", "draining", "stopped", "failed"},
    "running": {"evaluating", "paused", "draining", "stopped", "failed"},
    "paused": {"evaluating", "running", "draining", "stopped", "failed"},
    "draining": {"stopped", "failed"},
    "stopped": set(),
    "failed": set(),
}

EVENTS: st.SearchStrategy[ev.Event] = st.one_of(
    st.builds(ev.ProcessStarted, NAMES, st.integers(1, 4)),
    st.builds(ev.ProcessReady, NAMES),
    NAMES.flatmap(lambda name: st.builds(ev.ProcessExited, st.just(name), st.integers(-15, 3), st.integers(0, 4))),
    st.just(ev.Tick()),
    st.builds(ev.ProcessFault, NAMES, st.just("broken"), st.just(False)),
    NAMES.map(lambda name: ev.ProcessWanted(name, KINDS[name])),
    st.builds(ev.ProcessUnwanted, NAMES),
    st.sampled_from([ev.EvaluationDone(), ev.StepsDone(), ev.PauseRequested(), ev.ResumeRequested(), ev.Drained()]),
)
ENDINGS: st.SearchStrategy[ev.Event] = st.sampled_from([
    ev.DrainRequested(),
    ev.StopRequested(),
    ev.Stalled("nothing moves"),
    ev.ProcessFault("learner", "loss is nan", fatal=True),
])  # fmt: skip


def live_through(life: Lifecycle, events: list[tuple[ev.Event, float]]) -> list[list[ev.Instruction]]:
    """Tell the lifecycle all of it, checking it after each event; what cannot come must leave it as it was."""
    now, answers = 0.0, []
    for event, passed_s in events:
        now += passed_s
        before = (life.phase, [(item.state, item.incarnation) for item in life.processes.values()])
        try:
            answers.append(life.handle(event, now))
        except IllegalTransitionError:
            assert before == (life.phase, [(item.state, item.incarnation) for item in life.processes.values()])
            answers.append([])
        life.check_invariants()
    return answers


HISTORIES = st.lists(st.tuples(st.one_of(EVENTS, EVENTS, EVENTS, ENDINGS), st.floats(0, 20)), max_size=60)


@settings(max_examples=300)
@given(HISTORIES, st.booleans(), st.integers(0, 4))
def test_a_run_ends_once_by_the_arrows_of_the_drawing_restarts_follow_announced_deaths_and_it_can_always_be_stopped(
    history: list[tuple[ev.Event, float]], evaluate: bool, max_deaths: int
) -> None:
    config = SupervisionConfig(
        max_deaths=max_deaths, death_window_s=50.0, heartbeat_s=15.0, heartbeat_timeout_s=30.0, start_timeout_s=40.0,
        drain_timeout_s=30.0,
    )  # fmt: skip
    life = Lifecycle(PLAN, config, evaluate_first=evaluate, evaluate_last=evaluate)
    answers = live_through(life, [(ev.Begin(), 0.0), *history])
    answers.append(life.handle(ev.StopRequested(), 1e6))
    assert life.over
    flat = [item for answer in answers for item in answer]
    ends = [index for index, item in enumerate(flat) if isinstance(item, ev.EndRun)]
    assert len(ends) == 1
    assert flat[ends[0] + 1 :] == []
    entered = [item.phase for item in flat if isinstance(item, ev.EnterPhase)]
    assert entered[0] == "starting"
    assert all(after in NEXT_PHASES[before] for before, after in itertools.pairwise(entered)), entered
    started, announced = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    has_died, killed = dict.fromkeys(KINDS, False), set[tuple[str, int]]()
    for item in flat:
        if isinstance(item, ev.AnnounceDead):
            announced[item.name] += 1
            has_died[item.name] = not item.was_leaving
        if isinstance(item, ev.StartProcess):
            started[item.name] += 1
            assert item.incarnation == started[item.name]
            assert announced[item.name] == started[item.name] - 1
            assert (item.delay_s > 0) == has_died[item.name]
        if isinstance(item, ev.KillProcess):
            assert (item.name, started[item.name]) not in killed
            killed.add((item.name, started[item.name]))
