from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import GenerationError
from asyncrl.generate.engine import EngineRequest, KVRoom, RequestRules
from asyncrl.schema.samples import SamplingParams

RULES = RequestRules(64, 10, frozenset({1, 2}))


def request(num_prompt: int = 2, max_new_tokens: int = 4, **sampling) -> EngineRequest:
    return EngineRequest("a", (5,) * num_prompt, SamplingParams(max_new_tokens=max_new_tokens, **sampling), 0)


def test_what_is_scored_may_fill_the_limit_that_the_engine_gives() -> None:
    assert RULES.scorable([3] * 10) == (3,) * 10
    assert RULES.scorable([3] * 9, limit=9) == (3,) * 9
    with pytest.raises(GenerationError, match="cannot score 11 tokens: 10 is the most"):
        RULES.scorable([3] * 11)
    with pytest.raises(GenerationError, match="cannot score 10 tokens: 9 is the most"):
        RULES.scorable([3] * 10, limit=9)


def test_a_request_ends_at_the_models_tokens_and_its_own_unless_it_ignores_all() -> None:
    assert RULES.stop_ids(request(stop_token_ids=(7,))) == {1, 2, 7}
    assert RULES.stop_ids(request(stop_token_ids=(7,), ignore_eos=True)) == set()


def _room(**settings) -> KVRoom:
    return KVRoom(**{"most": 64, "block_tokens": 16, "expected_tokens": 160, **settings})


def test_an_idle_engine_takes_as_many_as_its_blocks_hold_whole_sequences():
    assert _room().update(free_blocks=320, running=0) == 32


def test_shorter_sequences_than_expected_make_room_for_more():
    room = _room()
    room.note_finished(80)
    assert room.update(free_blocks=320, running=0) == 64


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
