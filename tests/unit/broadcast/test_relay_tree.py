from asyncrl.broadcast import relay_tree
from asyncrl.broadcast.relay_tree import HOLD_S, LEARNER, MAX_MEMBERS, SILENT_AFTER_S, Left, PlaceAsked, RelayTree
from asyncrl.broadcast.state import Tick


def ask(tree: RelayTree, name: str, now: float = 0.0, **told: object) -> str:
    """Return whom `name` is sent to."""
    told = {"address": f"tcp://{name}:1", "host": "here"} | told
    places = tree.handle(PlaceAsked(name, **told), now)
    tree.check_invariants()
    return places[0].parent if places else ""


def test_the_learner_feeds_fanout_and_they_feed_the_others():
    tree = RelayTree(fanout=2)
    parents = [ask(tree, name) for name in "abcdefg"]
    assert parents[:2] == [LEARNER, LEARNER]
    assert sorted(parents[2:6]) == ["a", "a", "b", "b"]
    assert parents[6] in {"c", "d", "e", "f"}


def test_with_no_fanout_the_learner_feeds_all():
    tree = RelayTree(fanout=0)
    assert {ask(tree, name) for name in "abcdef"} == {LEARNER}


def test_a_place_is_kept_while_its_feeder_lives():
    tree = RelayTree(fanout=1)
    assert [ask(tree, name) for name in "abab"] == [LEARNER, "a", LEARNER, "a"]


def test_late_ones_are_fed_by_those_that_are_whole():
    tree = RelayTree(fanout=1)
    assert ask(tree, "a") == LEARNER
    ask(tree, "a", is_whole=True, have_bytes=10)
    assert ask(tree, "b") == "a"
    ask(tree, "b", is_whole=True, have_bytes=10)
    assert ask(tree, "c") in {"a", "b"}
    assert tree.num_fed_by_learner == 0


def test_the_place_of_one_who_died_on_the_way_is_given_to_another():
    tree = RelayTree(fanout=1)
    assert ask(tree, "a") == LEARNER
    tree.handle(Tick(), SILENT_AFTER_S + 0.1)
    assert ask(tree, "b", now=SILENT_AFTER_S + 0.1) == LEARNER


def test_who_lost_several_feeders_is_fed_by_the_learner():
    tree = RelayTree(fanout=3)
    for name in "abcd":
        ask(tree, name, is_whole=True, have_bytes=10)
    for name in "efg":
        assert ask(tree, name) == LEARNER
    assert ask(tree, "z") != LEARNER
    assert ask(tree, "z", lost=("a",)) != LEARNER
    assert ask(tree, "z", lost=("a", "b")) != "a"
    assert ask(tree, "y", lost=("a", "b")) == LEARNER


def test_a_lost_feeder_is_given_to_nobody_until_it_asks_again():
    tree = RelayTree(fanout=1)
    assert [ask(tree, name) for name in "ab"] == [LEARNER, "a"]
    assert ask(tree, "b", lost=("a",)) == LEARNER
    assert ask(tree, "c") == "b"
    assert ask(tree, "b", lost=("a",), now=1.0) == LEARNER
    ask(tree, "a", now=1.0)
    assert ask(tree, "d", now=1.0) == "a"


def test_who_lost_its_feeder_is_not_sent_to_those_it_feeds():
    tree = RelayTree(fanout=1)
    assert [ask(tree, name) for name in "abc"] == [LEARNER, "a", "b"]
    assert ask(tree, "b", lost=("a",)) == LEARNER


def test_a_silent_one_is_forgotten_and_those_it_fed_find_another():
    tree = RelayTree(fanout=1)
    assert [ask(tree, name) for name in "ab"] == [LEARNER, "a"]
    now = SILENT_AFTER_S + 0.1
    ask(tree, "b", now=SILENT_AFTER_S)
    tree.handle(Tick(), now)
    assert len(tree) == 1
    assert ask(tree, "b", now=now) == LEARNER


def test_who_left_feeds_nobody():
    tree = RelayTree(fanout=1)
    assert [ask(tree, name) for name in "ab"] == [LEARNER, "a"]
    tree.handle(Left("a"), 0.0)
    assert ask(tree, "b") == LEARNER


def test_a_loopback_address_is_told_on_its_own_machine_only():
    tree = RelayTree(fanout=1)
    ask(tree, "a", address="tcp://127.0.0.1:5000", host="one")
    assert ask(tree, "b", host="two") == LEARNER
    assert ask(tree, "c", host="one") == "a"


def test_who_serves_nobody_is_given_to_nobody():
    tree = RelayTree(fanout=1)
    ask(tree, "a", address="")
    assert ask(tree, "b") == LEARNER


def test_those_behind_a_slow_feeder_get_the_learners_one_spare_place_and_the_rest_follow_it():
    tree = RelayTree(fanout=2)
    assert [ask(tree, name) for name in ("slow", "fast", "b", "c", "d")][:2] == [LEARNER, LEARNER]
    behind = [name for name in "bcd" if ask(tree, name) == "slow"]
    ask(tree, "fast", now=HOLD_S, have_bytes=1 << 30)
    for name in behind:
        assert ask(tree, name, now=HOLD_S / 2, have_bytes=1000) == "slow"
    ask(tree, "slow", now=HOLD_S, have_bytes=1000)
    assert ask(tree, behind[0], now=HOLD_S, have_bytes=1000) != "slow"
    assert tree.num_fed_by_learner <= 3


def test_with_nobody_ahead_the_learner_takes_one_of_those_behind_a_slow_feeder_and_no_more():
    tree = RelayTree(fanout=1)
    for name in "abc":
        ask(tree, name)
    assert ask(tree, "b", now=HOLD_S) == LEARNER
    assert tree.num_fed_by_learner == 2
    ask(tree, "a", now=HOLD_S)
    assert ask(tree, "c", now=2 * HOLD_S) in {"b", LEARNER}
    assert tree.num_fed_by_learner == 2


def test_a_feeder_that_gets_its_bytes_is_kept_however_long_it_takes():
    tree = RelayTree(fanout=1)
    ask(tree, "a")
    ask(tree, "b")
    for second in range(1, 60):
        ask(tree, "a", now=float(second), have_bytes=second * 10 * relay_tree.SLOW_BYTES_PER_S)
        assert ask(tree, "b", now=float(second)) == "a"


def test_the_tree_is_bounded():
    tree = RelayTree(fanout=2)
    for number in range(MAX_MEMBERS + 1):
        tree.handle(PlaceAsked(str(number), is_whole=True), 0.0)
    assert len(tree) == MAX_MEMBERS
    tree.check_invariants()
