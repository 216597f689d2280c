from __future__ import annotations

import pytest

from asyncrl.buffer.selection import choose_by_deadline, choose_oldest


def _choose(step, ready, unfinished, eta=2, per_step=1):
    return choose_by_deadline(step, ready, unfinished, max_staleness=eta, groups_per_step=per_step)


def test_oldest_version_first_then_order_of_issue_and_ids_ascend():
    assert choose_oldest([(2, 5), (1, 9), (2, 4)], 2).take == (4, 9)


def test_nothing_is_taken_when_fewer_than_a_step_are_ready():
    choice = choose_oldest([(2, 5)], 2)
    assert (choice.take, choice.wait_for) == ((), ())


def test_a_group_whose_last_chance_it_is_is_waited_for():
    choice = _choose(2, ready=[(1, 8)], unfinished=[(0, 3), (1, 4)])
    assert (choice.take, choice.wait_for, choice.due_by) == ((), (3,), 2)


def test_a_younger_group_is_taken_while_an_unfinished_one_has_time():
    assert _choose(1, ready=[(1, 8)], unfinished=[(0, 3)]).take == (8,)


def test_a_step_waits_when_more_groups_are_due_later_than_later_steps_can_take():
    """Two groups are due by step 2, one a step: were step 1 to take a younger one, one of them would miss its chance."""
    choice = _choose(1, ready=[(1, 8)], unfinished=[(0, 3), (0, 4)])
    assert (choice.take, choice.wait_for, choice.due_by) == ((), (3, 4), 2)


def test_once_one_of_them_is_ready_it_goes_first():
    assert _choose(1, ready=[(1, 8), (0, 4)], unfinished=[(0, 3)]).take == (4,)


@pytest.mark.timeout(20)
def test_a_bound_of_any_size_is_no_work():
    eta = 2**53
    assert _choose(1, ready=[(1, 8), (0, 4)], unfinished=[(0, 3)], eta=eta).take == (4,)
    assert _choose(eta, ready=[(eta, 8)], unfinished=[(0, 3)], eta=eta).wait_for == (3,)
