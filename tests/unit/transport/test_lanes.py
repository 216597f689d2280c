from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.schema.control import AbortGroup
from asyncrl.transport.lanes import Arrival, InLane, OutLane


def make_in_lane(window: int = 3) -> tuple[InLane, list[bool]]:
    woken: list[bool] = []
    return InLane(window, lambda: woken.append(True)), woken


def test_an_out_lane_has_room_until_its_window_is_full():
    lane = OutLane(2)
    assert [lane.append(AbortGroup(number)) for number in range(2)] == [0, 1]
    assert not lane.has_room
    lane.acknowledge([1, 1, 7])
    assert lane.has_room
    assert list(lane.unacked) == [0]


def test_renumbering_keeps_the_order_of_what_is_unacknowledged():
    lane = OutLane(4)
    for number in range(4):
        lane.append(AbortGroup(number))
    lane.acknowledge([0, 2])
    lane.renumber()
    assert lane.unacked == {0: AbortGroup(1), 1: AbortGroup(3)}
    assert lane.append(AbortGroup(4)) == 2


def test_an_in_lane_takes_only_the_number_it_expects():
    lane, _ = make_in_lane()
    assert lane.classify(1) is Arrival.GAP
    assert lane.classify(0) is Arrival.NEW
    lane.accept(0, AbortGroup(0))
    assert lane.classify(0) is Arrival.REPEAT
    assert lane.acks == []


def test_a_repeat_of_what_was_acknowledged_is_acknowledged_again():
    lane, woken = make_in_lane()
    lane.accept(0, AbortGroup(0))
    lane.acknowledge(0)
    lane.acks.clear()
    assert lane.classify(0) is Arrival.REPEAT
    assert lane.acks == [0]
    assert len(woken) == 2


def test_more_than_the_window_is_not_taken():
    lane, _ = make_in_lane(window=1)
    lane.accept(0, AbortGroup(0))
    assert lane.classify(1) is Arrival.OVER_WINDOW


def test_what_cannot_be_decoded_is_stepped_over_and_acknowledged():
    lane, _ = make_in_lane()
    lane.discard(0)
    assert lane.acks == [0]
    assert lane.classify(1) is Arrival.NEW
    assert not lane.inbox


@given(st.integers(1, 8), st.lists(st.tuples(st.sampled_from(["send", "ack", "lose"]), st.integers(0, 20)), max_size=200))
def test_every_message_is_taken_once_in_order_whatever_is_lost(window, actions):
    """A wire that loses any suffix of what is in flight, and a sender that sends all unacknowledged again."""
    out = OutLane(window)
    inward, _ = make_in_lane(window)
    taken: list[int] = []
    sent = 0

    def transmit(seqs: list[int]) -> None:
        for seq in seqs:
            if inward.classify(seq) is Arrival.NEW:
                message = out.unacked[seq]
                inward.accept(seq, message)
                taken.append(message.group_id)

    for action, number in actions:
        if action == "send" and out.has_room:
            seq = out.append(AbortGroup(sent))
            sent += 1
            transmit([seq] if number % 2 else [])
        elif action == "ack" and inward.unhandled:
            inward.acknowledge(sorted(inward.unhandled)[number % len(inward.unhandled)])
            out.acknowledge(inward.acks)
            inward.acks.clear()
        elif action == "lose":
            transmit(list(out.unacked))
        assert len(out.unacked) <= window
    transmit(list(out.unacked))
    assert taken == list(range(sent))
