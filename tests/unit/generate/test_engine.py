import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.generate.engine import KVRoom, uniforms


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


def test_uniforms_are_spread_evenly_over_seeds_and_over_positions() -> None:
    over_positions = uniforms(np.uint64(7), np.arange(20_000, dtype=np.uint64))
    over_seeds = uniforms(np.arange(20_000, dtype=np.uint64), np.zeros(1, dtype=np.uint64))
    for draws in (over_positions, over_seeds):
        assert draws.min() >= 0
        assert draws.max() < 1
        counts, _ = np.histogram(draws, bins=20, range=(0, 1))
        assert abs(counts - 1000).max() < 150
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03
