"""That a step never waits too long or too little is in tests/properties/test_admission.py."""

import pytest

from asyncrl.buffer.group import choose_by_deadline, choose_oldest


def test_oldest_version_first_then_order_of_issue_and_ids_ascend():
    assert choose_oldest([(2, 5), (1, 9), (2, 4)], 2) == (4, 9)


@pytest.mark.timeout(20)
def test_a_bound_of_any_size_is_no_work():
    eta = 2**53
    bound = {"max_staleness": eta, "groups_per_step": 1}
    assert choose_by_deadline(1, [(1, 8), (0, 4)], [(0, 3)], **bound) == (4,)
    assert choose_by_deadline(eta, [(eta, 8)], [(0, 3)], **bound).group_ids == (3,)
