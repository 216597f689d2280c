from asyncrl.broadcast.chunks import MAX_LOST
from asyncrl.broadcast.relay_child import (
    ASK_AGAIN_S,
    SILENT_S,
    STARVED_S,
    AskFrom,
    AskPlace,
    GiveUp,
    Gone,
    Heard,
    Lost,
    Placed,
    RelayChild,
)
from asyncrl.broadcast.relay_tree import LEARNER
from asyncrl.broadcast.state import Tick


def fed_by(parent: str) -> RelayChild:
    child = RelayChild(0.0, stalled_after_s=20.0)
    assert child.handle(Tick(), 0.0) == [AskPlace(())]
    assert child.handle(Placed(parent, "there"), 0.0) == [AskFrom(parent, "there")]
    return child


def test_the_learner_is_asked_again_now_and_then():
    child = fed_by("a")
    assert child.handle(Tick(), ASK_AGAIN_S - 0.1) == []
    assert child.handle(Tick(), ASK_AGAIN_S) == [AskPlace(())]
    assert child.handle(Placed("a", "there"), ASK_AGAIN_S) == []


def test_a_silent_feeder_is_left():
    child = fed_by("a")
    child.handle(Heard("a", is_part=False), 1.0)
    child.handle(Tick(), 1.0)
    child.handle(Tick(), 2.9)
    assert child.handle(Tick(), 1.0 + SILENT_S + 0.1) == [AskPlace(("a",))]
    assert child.parent is None


def test_a_feeder_that_lives_and_gives_nothing_is_left_in_the_end():
    child = fed_by("a")
    for second in range(1, int(STARVED_S) + 1):
        child.handle(Heard("a", is_part=False), float(second))
        child.handle(Tick(), float(second))
        assert child.parent == "a"
    child.handle(Heard("a", is_part=False), STARVED_S + 0.1)
    assert child.handle(Tick(), STARVED_S + 0.1) == [AskPlace(("a",))]


def test_the_learner_is_not_left_for_its_silence_but_given_up_in_the_end():
    child = fed_by(LEARNER)
    for second in range(1, 20):
        assert child.handle(Tick(), float(second)) == [AskPlace(())]
    (gave_up,) = child.handle(Tick(), 20.1)
    assert isinstance(gave_up, GiveUp)
    assert gave_up.is_stalled


def test_an_answer_that_crossed_the_loss_of_its_feeder_is_ignored():
    child = fed_by("a")
    child.handle(Lost("a"), 0.5)
    assert child.handle(Placed("a", "there"), 0.6) == []
    assert child.handle(Placed(LEARNER), 0.7) == [AskFrom(LEARNER, "")]


def test_news_of_a_feeder_that_was_left_already_changes_nothing():
    child = fed_by("a")
    assert child.handle(Lost("b"), 0.5) == []
    assert child.handle(Gone("b", "why"), 0.5) == []
    assert child.parent == "a"


def test_a_version_the_learner_dropped_is_still_taken_from_who_has_it():
    child = fed_by("a")
    assert child.handle(Gone(LEARNER, "newer ones"), 0.5) == []
    assert child.handle(Gone("a", "newer ones"), 0.6) == [AskPlace(("a",))]
    assert child.handle(Gone(LEARNER, "newer ones"), 0.7) == [GiveUp("newer ones")]


def test_it_remembers_who_fed_it_and_a_bounded_number_of_lost_ones():
    child = RelayChild(0.0, 20.0, tuple(str(number) for number in range(40)))
    assert len(child.lost) == MAX_LOST
    child.handle(Placed("a"), 0.0)
    child.handle(Heard("a", is_part=True), 0.0)
    child.handle(Lost("a"), 0.0)
    assert child.fed_by == ("a",)
    assert len(child.lost) == MAX_LOST
    assert child.lost[-1] == "a"
