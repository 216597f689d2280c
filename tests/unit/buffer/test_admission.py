"""How far generation runs ahead of the learner."""

import pytest

from asyncrl.buffer.admission import SHORTER, Lead
from asyncrl.buffer.group import BufferLimits


def lead(max_staleness, *slacks, as_needed=True):
    made = Lead(BufferLimits(4, max_staleness, as_needed=as_needed))
    for slack in slacks:
        made.step_trained(slack)
    return made


@pytest.mark.parametrize("eta", [0, 1, 2, 8])
def test_without_being_asked_for_the_lead_is_the_bound_and_with_it_at_least_one_version(eta):
    assert lead(eta, 0.0, 0.9, as_needed=False).versions == eta
    assert lead(eta).versions == lead(eta, *[0.9] * 50).versions == min(1, eta)
    assert lead(eta, *[0.0] * 50).versions == eta
    assert lead(eta, *[0.0] * 50).groups == 4 * eta


def test_a_learner_that_waits_gets_more_at_once_and_one_that_has_enough_gets_less_little_by_little():
    assert lead(8, 0.0).groups == 5
    assert lead(8, 0.0, 0.25).versions == lead(8, 0.0).versions, "enough, and not too much"
    assert lead(8, 0.0, 0.9).versions == pytest.approx(1.25 - SHORTER)


def test_a_bound_that_changes_while_the_run_goes_on_holds_at_once():
    made = lead(8, *[0.0] * 50)
    for eta, then in ((3, 3.0), (0, 0.0), (5, 1.0)):
        made.follow(BufferLimits(4, eta, as_needed=True))
        assert made.versions == then
