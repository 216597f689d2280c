"""Who takes part in which broadcast: the cases one by one."""

from __future__ import annotations

import pytest

from asyncrl.broadcast.collective_membership import (
    ANSWER_S,
    MAX_ATTEMPTS,
    Answered,
    Asked,
    Dropped,
    Left,
    Membership,
    Offered,
    Progress,
    Refuse,
    Sent,
    Start,
    Stop,
    Tick,
    Withdrawn,
)


@pytest.fixture
def membership() -> Membership:
    """Two members, `a` and `b`, which have version 1, and a group that is kept."""
    membership = Membership(timeout_s=30.0, gather_s=1.0)
    membership.handle(Offered(1), 0.0)
    membership.handle(Asked("a", 1), 0.0)
    membership.handle(Asked("b", 1), 0.5)
    assert membership.handle(Tick(), 1.0) == [Start(1, 1, ("a", "b"), is_new=True)]
    for event in (Answered("a", 1), Sent(1), Answered("b", 1)):
        assert membership.handle(event, 2.0) == []
    return membership


def ask(membership: Membership, version: int, members: str, now: float) -> list[object]:
    return [instruction for member in members for instruction in membership.handle(Asked(member, version), now)]


def test_the_same_members_go_on_in_the_same_group_without_gathering(membership):
    membership.handle(Offered(2), 3.0)
    assert ask(membership, 2, "ab", 3.0) == [Start(1, 2, ("a", "b"), is_new=False)]


def test_a_version_waits_for_a_member_that_is_behind_for_gather_s_at_most_and_then_not_again(membership):
    membership.handle(Offered(2), 3.0)
    assert ask(membership, 2, "a", 3.0) == []
    assert membership.handle(Tick(), 3.9) == []
    assert membership.handle(Tick(), 4.0) == [Stop(1, ("a", "b"), "the members changed"), Start(2, 2, ("a",), is_new=True)]
    membership.handle(Answered("a", 2), 5.0)
    membership.handle(Sent(2), 5.0)
    membership.handle(Offered(3), 6.0)
    assert ask(membership, 3, "a", 6.0) == [Start(2, 3, ("a",), is_new=False)]


def test_a_late_joiner_gets_the_version_in_a_group_of_its_own_and_the_next_one_with_the_others(membership):
    assert ask(membership, 1, "c", 3.0) == []
    assert membership.handle(Tick(), 4.0)[-1] == Start(2, 1, ("c",), is_new=True)
    membership.handle(Answered("c", 2), 5.0)
    membership.handle(Sent(2), 5.0)
    membership.handle(Offered(2), 6.0)
    assert ask(membership, 2, "abc", 6.0)[-1] == Start(3, 2, ("a", "b", "c"), is_new=True)


def test_a_silent_member_is_dropped_and_the_rest_get_the_version_in_a_new_group(membership):
    membership.handle(Offered(2), 3.0)
    ask(membership, 2, "ab", 3.0)
    assert membership.handle(Tick(), 32.9) == []
    (stop,) = membership.handle(Tick(), 33.0)
    assert stop == Stop(1, ("a", "b"), "no progress for 30 s; silent: a, b")
    membership.handle(Answered("a", 1, "told to stop"), 33.1)
    membership.handle(Sent(1, "told to stop"), 33.1)
    assert ask(membership, 2, "a", 33.1) == []
    dropped, start = membership.handle(Tick(), 33.0 + ANSWER_S)
    assert dropped == Dropped("b", "said nothing in epoch 1")
    assert start == Start(2, 2, ("a",), is_new=True)


def test_who_was_dropped_may_come_back(membership):
    membership.handle(Offered(2), 3.0)
    ask(membership, 2, "ab", 3.0)
    membership.handle(Answered("a", 1), 3.5)
    membership.handle(Sent(1), 3.5)
    membership.handle(Tick(), 40.0)
    assert membership.handle(Tick(), 50.0) == [Dropped("b", "said nothing in epoch 1")]
    ask(membership, 2, "b", 60.0)
    assert membership.handle(Tick(), 61.0) == [Start(2, 2, ("b",), is_new=True)]


def test_progress_puts_the_deadline_off(membership):
    membership.handle(Offered(2), 3.0)
    ask(membership, 2, "ab", 3.0)
    membership.handle(Progress(1), 30.0)
    assert membership.handle(Tick(), 59.9) == []
    assert len(membership.handle(Tick(), 60.0)) == 1


def test_one_failure_stops_the_attempt_at_once(membership):
    membership.handle(Offered(2), 3.0)
    ask(membership, 2, "ab", 3.0)
    assert membership.handle(Answered("a", 1, "connection closed"), 3.5) == [Stop(1, ("a", "b"), "a: connection closed")]


def test_a_version_that_fails_again_and_again_is_refused_in_the_end(membership):
    membership.handle(Offered(2), 3.0)
    instructions = ask(membership, 2, "ab", 3.0)
    for attempt in range(MAX_ATTEMPTS):
        epoch = instructions[-1].epoch
        for member in "ab":
            membership.handle(Answered(member, epoch, "damaged"), 4.0 + attempt)
        instructions = [*membership.handle(Asked("a", 2), 4.0 + attempt), *membership.handle(Asked("b", 2), 4.0 + attempt)]
        assert instructions == []
        instructions = membership.handle(Sent(epoch, "stopped"), 4.0 + attempt)
    assert [type(instruction) for instruction in instructions] == [Refuse, Refuse]
    assert not instructions[0].is_gone


def test_an_overwritten_version_is_refused_and_not_sent_any_further(membership):
    membership.handle(Offered(2), 3.0)
    membership.handle(Asked("c", 1), 3.0)
    assert membership.version_in_use == 1
    refused = membership.handle(Withdrawn(1), 3.1)
    assert refused == [Refuse("c", 1, "the learner went on to newer versions", is_gone=True)]
    assert membership.handle(Asked("a", 1), 3.2) == [Refuse("a", 1, "the learner holds 2", is_gone=True)]
    ask(membership, 2, "ab", 3.3)
    membership.handle(Tick(), 5.0)
    assert isinstance(membership.handle(Withdrawn(2), 6.0)[0], Stop)


def test_a_member_that_leaves_is_not_waited_for(membership):
    assert membership.handle(Left("b"), 3.0) == [Stop(1, ("a", "b"), "b left")]
    membership.handle(Offered(2), 4.0)
    assert ask(membership, 2, "a", 4.0) == [Start(2, 2, ("a",), is_new=True)]
