"""Bins of best-fit decreasing, against a published packer."""

import pytest

from asyncrl.packing.pack import pack_lengths
from tests.golden.cases import cases


@pytest.mark.parametrize("case", cases("packing"))
def test_packs_as_a_published_packer(case):
    lengths, capacity, expected = case["inputs"]["lengths"], case["params"]["capacity"], case["expected"]

    bins = pack_lengths(lengths, capacity)

    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    loads = sorted((sum(lengths[i] for i in members) for members in bins), reverse=True)
    assert loads == expected["bfd_loads"]
