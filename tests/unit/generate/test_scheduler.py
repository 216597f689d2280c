"""How prompts are laid into prefill forwards, and which rows may lend their keys and values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.generate.engine import EngineRequest
from asyncrl.generate.transformers.model import _forwards, forward_tokens, rows_for
from asyncrl.generate.transformers.scheduler import InFlight, SlotTable
from asyncrl.schema.samples import SamplingParams

LENGTHS = forward_tokens(32)


def flight(name: str, group_key: str = "g", prompt: tuple[int, ...] = (4, 5, 6)) -> InFlight:
    return InFlight(EngineRequest(name, prompt, SamplingParams(max_new_tokens=5), 0, group_key), frozenset())


@given(st.lists(st.integers(0, 700), max_size=12), st.sampled_from([1, 32, 256, 2000]))
def test_every_token_is_prefilled_once_in_order_and_within_the_forward(lengths: list[int], num_slots: int) -> None:
    forwards = _forwards(((row, list(range(length))) for row, length in enumerate(lengths)), forward_tokens(num_slots))
    seen: dict[int, list[int]] = {row: [] for row in range(len(lengths))}
    for pieces, num_tokens in forwards:
        assert sum(len(piece.token_ids) for piece in pieces) <= num_tokens
        for piece in pieces:
            assert piece.start == len(seen[piece.row])
            seen[piece.row].extend(piece.token_ids)
    assert [seen[row] for row in range(len(lengths))] == [list(range(length)) for length in lengths]


@given(st.integers(1, 700), st.lists(st.integers(1, 700), max_size=8))
def test_a_sequences_forward_lengths_do_not_depend_on_its_company(length: int, company: list[int]) -> None:
    def own(sequences) -> list[tuple[int, int, int]]:
        found = [(p.start, len(p.token_ids), num) for pieces, num in _forwards(sequences, LENGTHS) for p in pieces if p.row == 0]
        return sorted(found)

    mine = (0, list(range(length)))
    others = [(row + 1, list(range(other))) for row, other in enumerate(company)]
    assert own([mine]) == own([*others, mine])


@pytest.mark.parametrize(("slots", "rows"), [(1, 8), (8, 8), (9, 16), (31, 32), (32, 32), (33, 64)])
def test_rows_leave_no_remainder_to_vector_kernels(slots: int, rows: int) -> None:
    assert rows_for(slots) == rows


def test_donor_is_a_row_of_the_same_group_prompt_and_weights() -> None:
    table = SlotTable(4, 8, 16)
    table.place(flight("a"), weights_epoch=0)
    assert table.donor_row(flight("b"), 0) == 0
    assert table.donor_row(flight("b"), 1) is None
    assert table.donor_row(flight("b", group_key="h"), 0) is None
    assert table.donor_row(flight("b", prompt=(4, 5, 7)), 0) is None
    assert table.donor_row(flight("b", group_key=""), 0) is None


def test_freed_row_still_donates_and_is_taken_itself_by_the_next_of_its_group() -> None:
    table = SlotTable(4, 8, 16)
    first, other = flight("a"), flight("x", group_key="")
    table.place(first, 0)
    table.place(other, 0)
    table.release(first)
    second, third = flight("b"), flight("c")
    table.place(second, 0, table.donor_row(second, 0))
    assert second.row == 0
    table.place(third, 0, table.donor_row(third, 0))
    assert third.row == 2
    assert table.num_free == 1


def test_requests_of_high_rows_move_to_free_low_ones_with_all_they_have() -> None:
    table = SlotTable(4, 8, 16)
    flights = [flight(name, group_key=name) for name in "abcd"]
    for each in flights:
        table.place(each, 0)
    table.advance(np.arange(10, 18), np.linspace(-1, -2, 8, dtype=np.float32), version=3)
    for each in flights[:3]:
        table.release(each)
    assert table.move_below(2) == [(3, 0, 3)]
    moved = flights[3]
    assert (moved.row, table.tokens_R[0], table.positions_R.tolist()) == (0, 13, [3, -1, -1, -1, -1, -1, -1, -1])
    assert table.take_chunk(moved).token_ids == (13,)
    assert table.num_free == 3
    assert table.donor_row(flight("x", group_key="d"), 0) in {0, 3}
    assert table.donor_row(flight("x", group_key="a"), 0) is None
    assert table.move_below(2) == []


def test_only_occupied_rows_donate_after_a_recompute() -> None:
    table = SlotTable(2, 8, 16)
    gone, here = flight("a", group_key="gone"), flight("b", group_key="here")
    table.place(gone, 0)
    table.place(here, 0)
    table.release(gone)
    table.renew_donors(1)
    assert table.donor_row(flight("c", group_key="gone"), 1) is None
    assert table.donor_row(flight("d", group_key="here"), 1) == 1
