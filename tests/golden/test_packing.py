"""Bin counts of best-fit and first-fit decreasing, against published packers."""

import pytest

from asyncrl.packing.pack import num_bins_at_least, pack_lengths
from tests.golden.cases import cases


@pytest.mark.parametrize("case", cases("packing"))
def test_packs_as_a_published_packer_and_into_no_more_bins_than_the_better_one(case):
    lengths, capacity, expected = case["inputs"]["lengths"], case["params"]["capacity"], case["expected"]

    bins = pack_lengths(lengths, capacity)

    assert num_bins_at_least(lengths, capacity) == expected["lower_bound"]
    assert expected["lower_bound"] <= len(bins) <= min(expected["bfd_bins"], expected["ffd_bins"])
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    loads = sorted((sum(lengths[i] for i in members) for members in bins), reverse=True)
    assert loads[0] <= capacity
    assert loads in (expected["bfd_loads"], expected["ffd_loads"])
