import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.packing.pack import CostModel, Unit, idle_share, pack_lengths, pack_units

COST = CostModel.of_model(64)


def unit_of(prefix, tails, cost=COST):
    return Unit(prefix, tuple(tails), cost.of(prefix), tuple(cost.of(tail, prefix) for tail in tails))


def parts_of(units):
    """(unit, tail) of every part, in their numbers' order."""
    return [(unit, tail) for unit in units for tail in unit.tails]


def row_size(row, units):
    parts = [parts_of(units)[i] for i in row.members]
    return sum(tail for _, tail in parts) + sum({id(unit): unit.prefix for unit, _ in parts}.values())


UNITS = st.lists(st.builds(unit_of, st.integers(0, 30), st.lists(st.integers(1, 30), min_size=1, max_size=9)), max_size=12)


@given(UNITS, st.integers(60, 200), st.integers(1, 4))
def test_every_part_is_in_one_row_of_distinct_tokens_within_the_budget(units, capacity, num_ranks):
    rows = pack_units(units, capacity, num_ranks)

    assert sorted(i for row in rows for i in row.members) == list(range(len(parts_of(units))))
    assert all(row.members == tuple(sorted(row.members)) for row in rows)
    assert all(row_size(row, units) <= capacity for row in rows)
    if num_ranks == 1:
        cut = [unit for unit in units if unit.prefix + sum(unit.tails) > capacity]
        copies_of_prefixes = sum(len({id(parts_of(units)[i][0]) for i in row.members}) for row in rows)
        assert copies_of_prefixes <= len(units) + sum(len(unit.tails) for unit in cut)


def test_whole_groups_fill_rows_by_their_distinct_tokens():
    units = [unit_of(149, [9] * 8) for _ in range(4)]
    assert [row.members for row in pack_units(units, 884)] == [tuple(range(32))]
    assert [row.members for row in pack_units(units, 442)] == [tuple(range(16)), tuple(range(16, 32))]


def rows_of_lengths(lengths, capacity, num_ranks, cost=COST):
    return pack_units([unit_of(0, [length], cost) for length in lengths], capacity, num_ranks)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(40, 100), st.integers(2, 5))
def test_ranks_have_equally_many_rows_within_the_budget(lengths, capacity, num_ranks):
    rows = rows_of_lengths(lengths, capacity, num_ranks)
    counts = [sum(row.rank == rank for row in rows) for rank in range(num_ranks)]

    assert all(row.members for row in rows)
    assert max(counts) == -(-len(pack_lengths(lengths, capacity)) // num_ranks)
    if len(lengths) >= max(counts) * num_ranks:
        assert min(counts) == max(counts)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_log_normal_lengths_keep_all_ranks_busy(num_ranks):
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(7.5, 0.85, 1_024), 16, 16_384).astype(int).tolist()

    rows = rows_of_lengths(lengths, 16_384, num_ranks, CostModel.of_model(896))
    loads = [sum(row.cost for row in rows if row.rank == rank) for rank in range(num_ranks)]

    assert len(rows) - len(pack_lengths(lengths, 16_384)) < num_ranks
    assert max(loads) * num_ranks / sum(loads) < 1.01
    assert idle_share([row.cost for row in rows], num_ranks) < 0.005 * num_ranks
