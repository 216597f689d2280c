"""Who may come in, and what is remembered of those who came."""

from __future__ import annotations

from asyncrl.config.run import SupervisionConfig
from asyncrl.control.life_events import ProcessPlan
from asyncrl.control.roster import Roster
from asyncrl.schema.control import PROTOCOL, Hello, ProcessKind

PLAN = [ProcessPlan("learner", "learner"), ProcessPlan("generator-0", "generator")]


def _hello(name: str, incarnation: str = "a", kind: ProcessKind = "generator") -> Hello:
    return Hello(PROTOCOL, kind, name, incarnation, 7)


def test_planned_processes_come_in_under_their_own_kind_only():
    roster = Roster(PLAN)
    assert roster.judge(_hello("generator-0")) == ""
    assert roster.judge(_hello("generator-0", kind="reward")) == "this run has no reward named 'generator-0'"
    assert roster.judge(_hello("generator-1")) == "this run has no generator named 'generator-1'"


def test_an_expected_process_comes_in_until_it_is_forgotten():
    roster = Roster(PLAN)
    roster.expect("generator-1", "generator")
    assert roster.judge(_hello("generator-1")) == ""
    assert not roster.is_guest("generator-1")
    roster.forget("generator-1")
    assert "no generator named" in roster.judge(_hello("generator-1"))


def test_a_run_without_places_lets_no_generator_join():
    assert "placement.most_joining_generators" in Roster(PLAN).judge(_hello("joined-b-7-0"))


def test_only_generators_join():
    assert "no learner" in Roster(PLAN, most_guests=1).judge(_hello("joined-b-7-0", kind="learner"))


def test_a_place_is_taken_when_a_guest_is_let_in_and_free_when_it_is_gone():
    roster = Roster(PLAN, most_guests=1)
    assert roster.judge(_hello("joined-b-7-0")) == ""
    roster.check_invariants()
    assert "all 1 places" in roster.judge(_hello("joined-b-8-0"))
    roster.gone("joined-b-7-0", said_goodbye=True)
    assert roster.judge(_hello("joined-b-8-0")) == ""
    roster.gone("joined-b-8-0", said_goodbye=False)
    roster.check_invariants()
    assert roster.counts() == {"here": 0, "most": 1, "came": 2, "left": 1, "lost": 1}


def test_a_guest_whose_link_broke_is_let_in_again_and_another_of_its_name_is_not():
    roster = Roster(PLAN, most_guests=1)
    assert roster.judge(_hello("joined-b-7-0")) == ""
    assert roster.judge(_hello("joined-b-7-0")) == ""
    assert roster.num_came == 1
    assert "another generator named" in roster.judge(_hello("joined-b-7-0", incarnation="b"))


def test_a_silent_guest_is_overdue_until_it_is_gone():
    roster = Roster(PLAN, 1, SupervisionConfig(heartbeat_s=100.0, heartbeat_timeout_s=5.0))
    roster.judge(_hello("joined-b-7-0"))
    roster.connected("joined-b-7-0", 0.0)
    roster.beat("joined-b-7-0", 4.0)
    assert roster.overdue(8.0) == {}
    assert roster.overdue(10.0) == {"joined-b-7-0": 6.0}
    roster.gone("joined-b-7-0", said_goodbye=False)
    assert roster.overdue(20.0) == {}


def test_signs_of_life_of_planned_processes_are_not_the_rosters():
    roster = Roster(PLAN, 1)
    roster.beat("generator-0", 0.0)
    assert roster.overdue(1e9) == {}
