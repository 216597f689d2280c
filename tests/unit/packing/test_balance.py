from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.packing.pack import CostModel, idle_share, pack_lengths, ranks_of_rows, rows_of_ranks, step_cost

COST = CostModel.of_model(64)


def _rows(lengths, capacity, num_ranks, cost=COST):
    return rows_of_ranks(lengths, [cost.of([n]) for n in lengths], capacity, num_ranks)


def _row_costs(rows, lengths, cost=COST):
    return [cost.of(lengths[i] for i in row.members) for row in rows]


def _cheapest_step(costs, num_ranks):
    """Try every order of the rows: R at a time make a turn."""
    padded = [*costs, *[0.0] * (-len(costs) % num_ranks)]
    return min(
        sum(max(order[start : start + num_ranks]) for start in range(0, len(order), num_ranks))
        for order in set(itertools.permutations(padded))
    )


def test_attention_costs_as_much_as_linear_layers_at_twelve_times_the_hidden_size():
    cost = CostModel.of_model(64)
    assert cost.attention * (12 * 64) ** 2 == pytest.approx(cost.linear * 12 * 64)
    assert cost.of([10, 20]) == pytest.approx(30 + 500 / 768)


def test_one_rank_gets_the_rows_of_the_packer():
    lengths = [5, 9, 3, 7, 7, 2]
    rows = _rows(lengths, 12, 1)
    assert [list(row.members) for row in rows] == pack_lengths(lengths, 12)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(40, 100), st.integers(2, 5))
def test_ranks_have_equally_many_rows_within_the_budget(lengths, capacity, num_ranks):
    rows = _rows(lengths, capacity, num_ranks)
    counts = [sum(row.rank == rank for row in rows) for rank in range(num_ranks)]

    assert sorted(i for row in rows for i in row.members) == list(range(len(lengths)))
    assert all(row.members and list(row.members) == sorted(row.members) for row in rows)
    assert max(sum(lengths[i] for i in row.members) for row in rows) <= capacity
    assert max(counts) == -(-len(pack_lengths(lengths, capacity)) // num_ranks)
    if len(lengths) >= max(counts) * num_ranks:
        assert min(counts) == max(counts)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(2, 3))
@settings(max_examples=60, deadline=None)
def test_no_order_of_the_rows_makes_a_shorter_step(costs, num_ranks):
    assert step_cost(costs, num_ranks) == _cheapest_step(costs, num_ranks)


@given(st.lists(st.floats(1, 100), min_size=1, max_size=30), st.integers(2, 4))
def test_turns_are_the_ranks_rows_in_order_and_last_as_long_as_promised(costs, num_ranks):
    placed = ranks_of_rows(costs, num_ranks)
    by_rank = [[costs[row] for row, rank in placed if rank == mine] for mine in range(num_ranks)]
    turns = itertools.zip_longest(*by_rank, fillvalue=0.0)
    assert sum(map(max, turns)) == pytest.approx(step_cost(costs, num_ranks))


def _imbalance(costs, num_ranks):
    """How much more than the mean the rank with most work has over the whole step."""
    loads = [0.0] * num_ranks
    for row, rank in ranks_of_rows(costs, num_ranks):
        loads[rank] += costs[row]
    return max(loads) * num_ranks / sum(loads) - 1.0


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_log_normal_lengths_keep_all_ranks_busy(num_ranks):
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(7.5, 0.85, 1_024), 16, 16_384).astype(int).tolist()
    cost = CostModel.of_model(896)

    rows = _rows(lengths, 16_384, num_ranks, cost)
    costs = _row_costs(rows, lengths, cost)

    assert len(rows) - len(pack_lengths(lengths, 16_384)) < num_ranks
    assert _imbalance(costs, num_ranks) < 0.01
    assert idle_share(costs, num_ranks) < 0.005 * num_ranks


def test_what_is_only_carried_along_counts_for_room_and_not_for_work():
    """Four trained samples and four that are not, of one length: each rank gets two of the trained ones."""
    rows = rows_of_ranks([10] * 8, [1.0, 0.0] * 4, 20, 2)
    trained = [sum(i % 2 == 0 for row in rows if row.rank == rank for i in row.members) for rank in (0, 1)]
    assert trained == [2, 2]
    assert max(len(row.members) for row in rows) <= 2
