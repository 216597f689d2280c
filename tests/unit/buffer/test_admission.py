"""How far generation runs ahead of the learner."""

import pytest

from asyncrl.buffer.admission import WAITING, Lead
from asyncrl.buffer.group import BufferLimits


def lead(max_staleness, *waited, as_needed=True):
    made = Lead(BufferLimits(4, max_staleness, as_needed=as_needed))
    for share in waited:
        made.step_taken(share)
    return made


@pytest.mark.parametrize("eta", [0, 1, 2, 8])
def test_without_being_asked_for_the_lead_is_the_bound_and_with_it_at_least_one_version(eta):
    assert lead(eta, 0.9, 0.0, as_needed=False).versions == eta
    assert lead(eta).versions == lead(eta, *[0.0] * 50).versions == min(1, eta)
    assert lead(eta, *[0.9] * 50).versions == eta
    assert lead(eta, *[0.9] * 50).groups == 4 * eta


def test_it_grows_while_the_learner_waits_and_shrinks_while_it_does_not_but_for_one_step_that_was_late():
    made = lead(8)
    waiting = [made.versions for _ in range(4) if made.step_taken(0.9) is None]
    busy = [made.versions for _ in range(20) if made.step_taken(0.0) is None][10:]
    assert waiting == sorted({1.0, *waiting})[1:]
    assert busy == sorted(set(busy), reverse=True)
    assert lead(8, *[0.0] * 20, 0.3).versions == 1.0
    assert lead(8, *[0.9] * 4, *[WAITING] * 60).versions == pytest.approx(lead(8, *[0.9] * 4, *[WAITING] * 61).versions)


def test_a_bound_that_changes_while_the_run_goes_on_holds_at_once():
    made = lead(8, *[0.9] * 50)
    for eta, then in ((3, 3.0), (0, 0.0), (5, 1.0)):
        made.follow(BufferLimits(4, eta, as_needed=True))
        assert made.versions == then
