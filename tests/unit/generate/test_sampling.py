import numpy as np
import pytest
import torch

from asyncrl.generate.engine import uniforms
from asyncrl.generate.transformers.scheduler import DRAW_FIELDS, SamplingBatch, sample


def test_uniforms_are_spread_evenly_over_seeds_and_over_positions() -> None:
    over_positions = uniforms(np.uint64(7), np.arange(20_000, dtype=np.uint64))
    over_seeds = uniforms(np.arange(20_000, dtype=np.uint64), np.zeros(1, dtype=np.uint64))
    for draws in (over_positions, over_seeds):
        assert draws.min() >= 0
        assert draws.max() < 1
        counts, _ = np.histogram(draws, bins=20, range=(0, 1))
        assert abs(counts - 1000).max() < 150
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


def test_frequencies_follow_the_distribution() -> None:
    rows, logits = 20_000, torch.tensor([2.0, 1.0, 0.0, -1.0])
    draws = SamplingBatch.of(np.array([(seed, 0.5, 1.0, 0) for seed in range(rows)], dtype=DRAW_FIELDS))
    tokens, _ = sample(logits.repeat(rows, 1), draws, np.zeros(rows, dtype=np.uint64))
    seen = np.bincount(tokens, minlength=4) / rows
    assert seen == pytest.approx(torch.softmax(logits / 0.5, -1).tolist(), abs=0.012)
