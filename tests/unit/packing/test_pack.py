from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.packing.pack import num_bins_at_least, pack_lengths


def test_a_length_over_the_budget_names_itself_and_the_knob():
    with pytest.raises(ConfigError, match=r"sample 1 has 11 tokens and packing.tokens_per_row is 10.*at least 11"):
        pack_lengths([3, 11, 4], 10)


def test_first_fit_is_used_where_best_fit_needs_a_bin_more():
    lengths = [8, 9, 13, 13, 4, 14, 13, 2, 7, 9, 7, 11, 9, 11, 9, 2, 3, 8, 8, 3, 11, 9, 7, 10, 7, 3, 9, 5]
    assert len(pack_lengths(lengths, 32)) == 7


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120))
def test_every_length_is_whole_in_one_bin_within_the_budget(lengths, capacity):
    bins = pack_lengths(lengths, capacity)

    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= capacity for members in bins)
    assert num_bins_at_least(lengths, capacity) <= len(bins)
    assert all(members == sorted(members) for members in bins)
    assert bins == sorted(bins)
