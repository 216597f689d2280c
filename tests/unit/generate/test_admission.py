from __future__ import annotations

import pytest

from asyncrl.generate.admission import Admission, AdmissionLimits
from asyncrl.generate.admission_events import (
    GeneratorLeaving,
    GeneratorLost,
    GeneratorReady,
    GroupAdded,
    GroupGone,
    GroupIsReady,
    GroupLost,
    IssueGroup,
    IssueReturned,
    LimitSet,
    MembersFinished,
    MembersStarted,
    Paused,
    ReissueGroup,
    Resumed,
    RoomChanged,
    VersionIsLive,
)


def _admission(**limits):
    return Admission(AdmissionLimits(**{"groups_per_step": 8, "group_size": 1, "max_staleness": 2, **limits}))


def _issued(instructions):
    return [i.generator for i in instructions if isinstance(i, IssueGroup)]


def test_eta_2_b_8_admits_24_at_first_and_8_a_version_after():
    admission = _admission()
    assert len(admission.handle(GeneratorReady("g", 1000, 0), 0.0)) == 24
    assert "staleness bound: 24 groups hold a place, version 0 allows 24" in admission.why_nothing()
    assert len(admission.handle(VersionIsLive("g", 1), 0.0)) == 8


def test_a_generator_without_weights_gets_nothing():
    admission = _admission()
    assert admission.handle(GeneratorReady("g", 100, -1), 0.0) == []
    assert admission.why_nothing() == "no generator has weights yet"


def test_the_version_that_counts_is_the_one_live_on_the_generator():
    admission = _admission(groups_per_step=2, max_staleness=0)
    admission.handle(GeneratorReady("old", 100, 0), 0.0)
    assert _issued(admission.handle(GeneratorReady("new", 100, 1), 0.0)) == ["new", "new"]
    assert admission.capacity_on("old") == -2


def test_new_groups_go_to_the_least_loaded_generator():
    admission = _admission(groups_per_step=100, group_size=2)
    admission.handle(Paused(), 0.0)
    admission.handle(GeneratorReady("big", 8, 0), 0.0)
    admission.handle(GeneratorReady("small", 4, 0), 0.0)
    issued = _issued(admission.handle(Resumed(), 0.0))
    assert issued[:3] == ["big", "small", "big"]
    assert (issued.count("big"), issued.count("small")) == (5, 3)


def test_one_group_waits_ahead_of_full_slots_and_no_more():
    admission = _admission(groups_per_step=100, group_size=4)
    assert len(admission.handle(GeneratorReady("g", 10, 0), 0.0)) == 3
    assert admission.members_on("g") == 12
    assert admission.why_nothing() == "every generator that may get a group has its slots full"
    assert admission.handle(MembersFinished("g"), 0.0) == []
    assert len(admission.handle(MembersFinished("g"), 0.0)) == 1


def test_a_group_larger_than_the_slots_is_still_issued():
    assert len(_admission(group_size=16).handle(GeneratorReady("g", 4, 0), 0.0)) == 1


def test_dropped_and_failed_groups_give_their_place_back():
    admission = _admission(groups_per_step=1, max_staleness=0)
    assert len(admission.handle(GeneratorReady("g", 100, 0), 0.0)) == 1
    assert len(admission.handle(GroupGone(0), 0.0)) == 1
    assert admission.handle(GroupIsReady(1), 0.0) == []
    assert len(admission.handle(GroupGone(1, was_ready=True), 0.0)) == 1


def test_lost_groups_go_first_oldest_first_and_to_no_generator_behind_their_version():
    admission = _admission(groups_per_step=4, max_staleness=1)
    admission.handle(GeneratorReady("a", 4, 3), 0.0)
    admission.handle(GeneratorReady("behind", 100, 2), 0.0)
    admission.handle(GeneratorLost("a"), 0.0)
    assert admission.handle(GroupLost(9, 1, 3), 0.0) == []
    assert admission.handle(GroupLost(5, 1, 3), 0.0) == []
    instructions = admission.handle(VersionIsLive("behind", 3), 0.0)
    assert instructions[:2] == [ReissueGroup(5, "behind", 3, 1), ReissueGroup(9, "behind", 3, 1)]


def test_a_lost_group_that_is_dropped_is_not_handed_out_again():
    admission = _admission(max_groups=1)
    admission.handle(GeneratorReady("a", 4, 0), 0.0)
    admission.handle(GeneratorLost("a"), 0.0)
    admission.handle(GroupLost(0, 1, 0), 0.0)
    admission.handle(GroupGone(0), 0.0)
    assert admission.handle(GeneratorReady("b", 4, 0), 0.0) == [IssueGroup("b", 0)]
    admission.check_invariants()


def test_pausing_stops_issuing_and_resuming_catches_up():
    admission = _admission()
    admission.handle(Paused(), 0.0)
    assert admission.handle(GeneratorReady("g", 100, 0), 0.0) == []
    assert admission.why_nothing() == "paused"
    assert len(admission.handle(Resumed(), 0.0)) == 24


def test_no_more_groups_hold_a_place_than_the_run_needs():
    admission = _admission(max_groups=5)
    assert len(admission.handle(GeneratorReady("g", 100, 0), 0.0)) == 5
    assert admission.why_nothing() == "every group the run needs is issued"
    assert len(admission.handle(GroupGone(0), 0.0)) == 1
    assert len(admission.handle(LimitSet(8), 0.0)) == 3


def test_most_running_groups_bound_what_is_issued():
    admission = _admission(max_running_groups=3)
    assert len(admission.handle(GeneratorReady("g", 100, 0), 0.0)) == 3
    assert admission.why_nothing() == "3 groups are running, the most that may"
    assert len(admission.handle(GroupIsReady(0), 0.0)) == 1


def test_groups_from_outside_hold_places_like_any_other():
    admission = _admission(groups_per_step=1, max_staleness=0)
    admission.handle(GroupAdded(), 0.0)
    assert admission.handle(GeneratorReady("g", 100, 0), 0.0) == []


def test_when_prompts_run_out_nothing_more_is_issued():
    admission = _admission()
    issued = admission.handle(GeneratorReady("g", 2, 0), 0.0)
    assert admission.handle(IssueReturned(issued[-1].generator), 0.0) == []
    assert (admission.running, admission.members_on("g")) == (len(issued) - 1, len(issued) - 1)
    assert admission.why_nothing() == "no prompt is left"


def test_work_from_elsewhere_takes_slots():
    admission = _admission(groups_per_step=100)
    admission.handle(Paused(), 0.0)
    admission.handle(GeneratorReady("g", 10, 0), 0.0)
    admission.handle(MembersStarted("g", 8), 0.0)
    assert len(admission.handle(Resumed(), 0.0)) == 3


@pytest.mark.parametrize("event", [MembersFinished("gone"), VersionIsLive("gone", 3), GeneratorLost("gone")])
def test_late_words_of_a_lost_generator_change_nothing(event):
    admission = _admission()
    assert admission.handle(event, 0.0) == []
    admission.check_invariants()


def test_after_a_resume_the_places_held_count():
    admission = Admission(AdmissionLimits(8, 1, 2), running=4, accepted=16)
    assert len(admission.handle(GeneratorReady("g", 100, 0), 0.0)) == 4


def test_a_generator_with_more_room_gets_more_groups_at_once():
    admission = _admission(groups_per_step=100, group_size=4)
    assert len(admission.handle(GeneratorReady("g", 8, 0), 0.0)) == 3
    assert len(admission.handle(RoomChanged("g", 16), 0.0)) == 2


def test_a_generator_with_less_room_keeps_what_it_holds_and_gets_nothing_until_it_fits_again():
    admission = _admission(groups_per_step=100, group_size=4)
    admission.handle(GeneratorReady("g", 8, 0), 0.0)
    assert admission.handle(RoomChanged("g", 4), 0.0) == []
    assert admission.members_on("g") == 12
    assert admission.handle(MembersFinished("g", 4), 0.0) == []
    assert "slots full" in admission.why_nothing()
    assert len(admission.handle(MembersFinished("g", 4), 0.0)) == 1


def test_room_of_an_unknown_generator_is_no_news():
    assert _admission().handle(RoomChanged("gone", 4), 0.0) == []


def test_no_room_lets_more_start_than_the_staleness_bound_allows():
    admission = _admission(groups_per_step=2, max_staleness=0)
    admission.handle(GeneratorReady("g", 1, 0), 0.0)
    admission.handle(RoomChanged("g", 1000), 0.0)
    assert (admission.running, admission.capacity_on("g")) == (2, 0)


def test_a_generator_that_is_leaving_gets_nothing_more_and_its_count_goes_on():
    admission = _admission()
    admission.handle(GeneratorReady("goes", 2, 0), 0.0)
    assert admission.handle(GeneratorLeaving("goes"), 0.0) == []
    held = admission.members_on("goes")
    assert admission.handle(MembersFinished("goes", held), 0.0) == []
    assert admission.members_on("goes") == 0
    assert admission.handle(VersionIsLive("goes", 1), 0.0) == []
    assert set(_issued(admission.handle(GeneratorReady("stays", 4, 1), 0.0))) == {"stays"}
    assert _issued(admission.handle(GeneratorReady("goes", 2, 1), 0.0)), "a new incarnation of the name is not leaving"
    admission.check_invariants()
