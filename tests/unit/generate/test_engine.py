from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.generate.engine import EngineRequest, KVRoom, RequestRules
from asyncrl.schema.samples import SamplingParams

RULES = RequestRules(64, 10, frozenset({1, 2}))


def request(num_prompt: int = 2, max_new_tokens: int = 4, **sampling) -> EngineRequest:
    return EngineRequest("a", (5,) * num_prompt, SamplingParams(max_new_tokens=max_new_tokens, **sampling), 0)


def test_a_request_ends_at_the_models_tokens_and_its_own_unless_it_ignores_all() -> None:
    assert RULES.stop_ids(request(stop_token_ids=(7,))) == {1, 2, 7}
    assert RULES.stop_ids(request(stop_token_ids=(7,), ignore_eos=True)) == set()


def test_the_slots_are_what_fits_and_move_only_by_an_eighth_or_to_all_there_are() -> None:
    room = KVRoom(most=64, block_tokens=16, expected_tokens=160)
    found = [room.update(free_blocks, running=0) for free_blocks in (320, 350, 360)]
    room.note_finished(80)
    found += [room.update(free_blocks, running=0) for free_blocks in (300, 310, 320)]
    assert found == [32, 32, 36, 60, 60, 64]


@given(
    st.integers(1, 300),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 300), st.integers(1, 4096)), min_size=1, max_size=30),
)
def test_the_answer_is_at_least_1_at_most_the_configured_number_and_near_what_fits(most, steps):
    room = KVRoom(most, 16, 160)
    for free_blocks, running, length in steps:
        room.note_finished(length)
        told = room.update(free_blocks, running)
        assert 1 <= told <= most
        assert told == room.num_slots == room.update(free_blocks, running)
