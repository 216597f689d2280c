from __future__ import annotations

import pytest

from asyncrl.buffer.selection import choose_by_deadline, choose_oldest


def _choose(step, ready, unfinished, eta=2):
    return choose_by_deadline(step, ready, unfinished, max_staleness=eta, groups_per_step=1)


def test_the_oldest_go_first_then_in_order_of_issue_and_none_where_fewer_than_a_step_are_ready():
    assert choose_oldest([(2, 5), (1, 9), (2, 4)], 2).take == (4, 9)
    assert (choose_oldest([(2, 5)], 2).take, choose_oldest([(2, 5)], 2).wait_for) == ((), ())


@pytest.mark.parametrize(
    ("step", "ready", "unfinished", "take", "wait_for"),
    [
        (2, [(1, 8)], [(0, 3), (1, 4)], (), (3,)),  # its last chance
        (1, [(1, 8)], [(0, 3)], (8,), ()),  # the unfinished one has time
        # Two are due by step 2, one a step: were step 1 to take a younger one, one of them would miss its chance.
        (1, [(1, 8)], [(0, 3), (0, 4)], (), (3, 4)),
        (1, [(1, 8), (0, 4)], [(0, 3)], (4,), ()),  # one of the two is ready
    ],
)
def test_a_step_waits_for_groups_that_would_miss_their_last_chance(step, ready, unfinished, take, wait_for):
    choice = _choose(step, ready, unfinished)
    assert (choice.take, choice.wait_for) == (take, wait_for)
    assert not wait_for or choice.due_by == 2


@pytest.mark.timeout(20)
def test_a_bound_of_any_size_is_no_work():
    eta = 2**53
    assert _choose(1, ready=[(1, 8), (0, 4)], unfinished=[(0, 3)], eta=eta).take == (4,)
    assert _choose(eta, ready=[(eta, 8)], unfinished=[(0, 3)], eta=eta).wait_for == (3,)
