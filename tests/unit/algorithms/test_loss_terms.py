"""Denominators: what counts, that parts add up, and that nothing left is no division by zero."""

import pytest
import torch

from asyncrl.algorithms.loss_terms import AGGREGATIONS, count_denominators
from asyncrl.algorithms.types import Denominators

MASK = torch.tensor([1, 1, 0, 1, 1, 0, 1], dtype=torch.bool)
KEPT = torch.tensor([1, 0, 1, 0, 0, 0, 1], dtype=torch.bool)
IDS = torch.tensor([0, 0, 0, 1, 1, 2, 3])


def test_all_counts_rejected_tokens_and_kept_does_not():
    assert count_denominators(MASK, KEPT, IDS, 5, constant=3.0) == Denominators(5.0, 3.0, 3.0)
    assert count_denominators(MASK, KEPT, IDS, 5, denominator="kept") == Denominators(2.0, 2.0, 1.0)


def test_counts_of_parts_add_up():
    parts = [count_denominators(MASK[part], KEPT[part], IDS[part] - IDS[part][0], 4) for part in (slice(0, 3), slice(3, 7))]
    whole = count_denominators(MASK, KEPT, IDS, 4)
    assert sum(part.num_tokens for part in parts) == whole.num_tokens
    assert sum(part.num_sequences for part in parts) == whole.num_sequences


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_by_kept_tokens_is_as_if_the_others_were_never_there(name):
    loss = torch.arange(7, dtype=torch.float64)
    kept = MASK & KEPT
    counted = count_denominators(MASK, KEPT, IDS, 4, constant=2.0, denominator="kept")
    got = AGGREGATIONS[name](loss, kept, IDS, 4, counted)
    alone = AGGREGATIONS[name](loss[kept], torch.ones(2, dtype=torch.bool), torch.tensor([0, 1]), 2, Denominators(2, 2, 2.0))
    assert got == alone


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_where_everything_is_rejected_the_loss_is_zero(name):
    nothing = torch.zeros(7, dtype=torch.bool)
    assert AGGREGATIONS[name](torch.ones(7), nothing, IDS, 4, Denominators(0.0, 0.0)) == 0.0
