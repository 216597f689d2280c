from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.generate.kv_room import KVRoom, requests_that_fit


def _room(**settings) -> KVRoom:
    return KVRoom(**{"most": 64, "block_tokens": 16, "expected_tokens": 160, **settings})


def test_an_idle_engine_takes_as_many_as_its_blocks_hold_whole_sequences():
    assert _room().update(free_blocks=320, running=0) == 32


def test_shorter_sequences_than_expected_make_room_for_more():
    room = _room()
    room.note_finished(80)
    assert room.update(free_blocks=320, running=0) == 64


def test_every_running_request_keeps_a_block_to_grow_into():
    assert requests_that_fit(free_blocks=30, running=20, blocks_each=5) == 22
    assert requests_that_fit(free_blocks=5, running=20, blocks_each=5) == 17


def test_before_anything_is_known_the_configured_number_stands():
    assert _room().num_slots == 64


def test_a_block_more_or_less_is_no_news():
    room = _room()
    assert room.update(free_blocks=320, running=0) == 32
    assert room.update(free_blocks=350, running=0) == 32
    assert room.update(free_blocks=360, running=0) == 36
    assert room.num_slots == 36


def test_an_engine_that_has_room_again_gets_all_of_it():
    room = _room(most=30)
    assert room.update(free_blocks=260, running=0) == 26
    assert room.update(free_blocks=290, running=0) == 26
    assert room.update(free_blocks=300, running=0) == 30


def test_a_mean_follows_what_finished_lately():
    room = _room(most=10_000)
    for _ in range(2000):
        room.note_finished(1600)
    for _ in range(2000):
        room.note_finished(16)
    assert room.update(free_blocks=1000, running=0) >= 500


@given(
    st.integers(1, 300),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 300), st.integers(1, 4096)), min_size=1, max_size=30),
)
def test_the_answer_is_at_least_1_at_most_the_configured_number_and_near_what_fits(most, steps):
    room = _room(most=most)
    for free_blocks, running, length in steps:
        room.note_finished(length)
        told = room.update(free_blocks, running)
        assert 1 <= told <= most
        assert told == room.num_slots == room.update(free_blocks, running)
