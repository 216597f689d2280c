"""A row without buckets: each sequence's own tokens as queries, its whole as keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrl.models.attention import build_layout, packed_attention


def ranges(*parts: tuple[int, int]) -> np.ndarray:
    return np.concatenate([np.arange(*part) for part in parts])


@pytest.mark.parametrize(
    ("sequences", "query_ends", "longest"),
    [
        ([ranges((0, 5))], [0, 5], (5, 5)),
        ([ranges((0, 5)), ranges((0, 3), (5, 9))], [0, 5, 9], (5, 7)),
        ([ranges((0, 5)), ranges((0, 4)), ranges((0, 2), (5, 6))], [0, 5, 5, 6], (5, 5)),  # the second has none of its own
        ([ranges((0, 9)), ranges((0, 2), (9, 12)), ranges((0, 2), (9, 11), (12, 13))], [0, 9, 12, 13], (9, 9)),
    ],
)
def test_attention_over_the_runs_is_that_of_the_buckets(sequences, query_ends, longest):
    num_tokens = query_ends[-1]
    layout = build_layout(sequences, num_tokens)
    runs = layout.runs
    assert (runs.query_ends.tolist(), runs.longest) == (query_ends, longest)
    assert runs.key_ends.tolist() == [0, *np.cumsum([len(sequence) for sequence in sequences])]
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, num_tokens, 8, dtype=torch.float64) for _ in range(3))
    expected, _ = packed_attention(torch.nn.Identity(), query, key, value, None, packed_layout=layout)
    for number in range(len(sequences)):
        own, whole = (slice(*ends[number : number + 2].tolist()) for ends in (runs.query_ends, runs.key_ends))
        keys = runs.keys[whole]
        scores = query[0, 0, own] @ key[0, 0, keys].T / 8**0.5
        later = torch.ones(scores.shape, dtype=torch.bool).triu(len(keys) - len(scores) + 1)  # the last query sees the last key
        attended = scores.masked_fill(later, -torch.inf).softmax(-1) @ value[0, 0, keys]
        torch.testing.assert_close(attended, expected[0, own, 0])


@pytest.mark.parametrize("sequences", [[ranges((3, 6)), ranges((0, 3))], [ranges((0, 2), (4, 6)), ranges((2, 4))]])
def test_tokens_in_another_order_have_no_runs(sequences):
    assert build_layout(sequences, 6).runs is None
