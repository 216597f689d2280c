"""Prompts that a caller asks groups for."""

import pytest

from asyncrl.errors import RunError
from asyncrl.schema.samples import Progress, Prompt
from asyncrl.schema.status import GroupAsked, GroupsAsked
from asyncrl.tasks.asked import MOST_OVER, AskedPrompts


def test_what_is_taken_or_released_is_forgotten_with_its_tokens_and_what_is_not_ready_is_not():
    asked, both = AskedPrompts(), GroupsAsked("s", tuple(GroupAsked(number, Prompt("p"), is_followed=True) for number in (0, 1)))
    asked.enter(both)
    for group_id in (7, 8):
        asked.issued(asked.queue.popleft(), group_id, 0)
        asked.progress(Progress(group_id, 0, 0, 0, b"", b""))
    assert [len(asked.by_group[group_id].pieces) for group_id in (7, 8)] == [1, 1]
    assert (len(asked.queue), asked.settled(both)) == (0, [])
    asked.forget([7])
    assert 7 in asked.by_group
    asked.ready(7, 0)
    assert asked.settled(both) == [asked.by_group[7]] == asked.enter(both)[:1]
    asked.forget([7, 99])
    assert 7 not in asked.by_group
    moved = asked.moved
    assert asked.close("s") == [8]
    assert moved.is_set()  # whoever waits for the second looks again, and is told
    with pytest.raises(RunError, match="this stream is closed"):
        asked.settled(both)
    asked.progress(Progress(8, 0, 0, 0, b"", b""))
    assert 8 not in asked.by_group


def test_groups_that_never_came_are_forgotten_once_their_caller_asks_for_later_ones_only():
    def wanting(*numbers: int) -> GroupsAsked:
        return GroupsAsked("s", tuple(GroupAsked(number, Prompt("p")) for number in numbers))

    asked = AskedPrompts()
    asked.enter(wanting(0, 1, 2, 3))
    for group_id in (10, 11, 12, 13):
        asked.issued(asked.queue.popleft(), group_id, 0)
    asked.ready(11, 0)
    for group_id in (10, 11, 12):  # the second was given before it became too old
        asked.over(group_id, "dropped: stale")
    asked.enter(wanting(0, 1, 2, 3))
    assert [one.number for one in asked.settled(wanting(0, 1, 2, 3))] == [0, 1, 2]
    asked.enter(wanting(2, 3, 4))
    assert sorted(asked.by_group) == [11, 12, 13]
    asked.enter(wanting(3, 4))
    assert sorted(asked.by_group) == [11, 13]
    assert asked.close("s") == [11, 13]


def test_of_groups_that_were_given_and_are_too_old_the_newest_are_remembered():
    asked = AskedPrompts()
    for group_id in range(MOST_OVER + 10):
        asked.enter(GroupsAsked(str(group_id), (GroupAsked(0, Prompt("p")),)))
        asked.issued(asked.queue.popleft(), group_id, 0)
        asked.ready(group_id, 0)
        asked.over(group_id, "dropped: stale")
    assert len(asked.by_group) == len(asked._streams) == MOST_OVER
    assert 9 not in asked.by_group
