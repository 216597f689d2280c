"""Bin counts of best-fit and first-fit decreasing, against published packers."""

from __future__ import annotations

import pytest

from asyncrl.packing.pack import num_bins_at_least, pack_lengths
from tests.golden.cases import cases


@pytest.mark.parametrize("case", cases("packing"))
def test_packs_into_no_more_bins_than_the_better_published_packer(case):
    lengths, capacity, expected = case["inputs"]["lengths"], case["params"]["capacity"], case["expected"]

    bins = pack_lengths(lengths, capacity)

    assert num_bins_at_least(lengths, capacity) == expected["lower_bound"]
    assert expected["lower_bound"] <= len(bins) <= min(expected["bfd_bins"], expected["ffd_bins"])
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in members) for members in bins) <= capacity


@pytest.mark.parametrize("case", cases("packing"))
def test_loads_are_those_of_a_published_packer(case):
    lengths = case["inputs"]["lengths"]

    loads = sorted(
        (sum(lengths[i] for i in members) for members in pack_lengths(lengths, case["params"]["capacity"])), reverse=True
    )

    assert loads in (case["expected"]["bfd_loads"], case["expected"]["ffd_loads"])
