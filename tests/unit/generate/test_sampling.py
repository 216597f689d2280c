from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrl.generate.counter_rng import seed_word, uniforms
from asyncrl.generate.transformers.sampling import DRAW_FIELDS, SamplingBatch, sample
from asyncrl.schema.samples import SamplingParams

ROWS = 8


def params(**sampling) -> SamplingParams:
    return SamplingParams(max_new_tokens=4, **sampling)


def sampling_batch(params_R, seeds_R) -> SamplingBatch:
    rows = [(seed, own.temperature, own.top_p, own.top_k) for own, seed in zip(params_R, seeds_R, strict=True)]
    return SamplingBatch.of(np.array(rows, dtype=DRAW_FIELDS))


def ordinals(value: int, rows: int = ROWS) -> np.ndarray:
    return np.full(rows, value, dtype=np.uint64)


def test_rows_keep_their_own_parameters() -> None:
    logits = torch.randn(4, 40)
    rows = [params(temperature=0.0), params(top_k=1), params(top_p=0.3, temperature=2.0), params()]
    together_tokens, together_logprobs = sample(logits, sampling_batch(rows, range(4)), ordinals(0, 4))
    for row, own in enumerate(rows):
        tokens, logprobs = sample(logits[row : row + 1], sampling_batch([own], [row]), ordinals(0, 1))
        assert (tokens.tolist(), logprobs.tolist()) == ([together_tokens[row]], [together_logprobs[row]])
    assert together_tokens[:2].tolist() == logits[:2].argmax(-1).tolist()
    assert together_logprobs[:2].tolist() == [0.0, 0.0]


def test_uniforms_are_spread_evenly_over_seeds_and_over_positions() -> None:
    over_positions = uniforms(seed_word(7), np.arange(20_000, dtype=np.uint64))
    over_seeds = uniforms(np.arange(20_000, dtype=np.uint64), np.zeros(1, dtype=np.uint64))
    for draws in (over_positions, over_seeds):
        assert draws.min() >= 0
        assert draws.max() < 1
        counts, _ = np.histogram(draws, bins=20, range=(0, 1))
        assert abs(counts - 1000).max() < 150
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


def test_frequencies_follow_the_distribution() -> None:
    rows = 20_000
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(rows, 1)
    tokens, _ = sample(logits, sampling_batch([params(temperature=0.5)] * rows, range(rows)), ordinals(0, rows))
    expected = torch.softmax(torch.tensor([2.0, 1.0, 0.0, -1.0]) / 0.5, -1)
    seen = np.bincount(tokens, minlength=4) / rows
    assert seen == pytest.approx(expected.tolist(), abs=0.012)
