from __future__ import annotations

import numpy as np
import torch

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


def test_draw_depends_on_seed_and_position_and_not_on_the_row() -> None:
    logits = torch.randn(1, 50).repeat(ROWS, 1)
    batch = sampling_batch([params()] * ROWS, [11] * ROWS)
    tokens, logprobs = sample(logits, batch, ordinals(3))
    assert len(set(tokens)) == 1
    assert len(set(logprobs)) == 1
    drawn = {tuple(sample(logits, batch, ordinals(i))[0]) for i in range(30)}
    assert len(drawn) > 5


def test_rows_keep_their_own_parameters() -> None:
    logits = torch.randn(4, 40)
    rows = [params(temperature=0.0), params(top_k=1), params(top_p=0.3, temperature=2.0), params()]
    together_tokens, together_logprobs = sample(logits, sampling_batch(rows, range(4)), ordinals(0, 4))
    for row, own in enumerate(rows):
        tokens, logprobs = sample(logits[row : row + 1], sampling_batch([own], [row]), ordinals(0, 1))
        assert (tokens.tolist(), logprobs.tolist()) == ([together_tokens[row]], [together_logprobs[row]])
    assert together_tokens[:2].tolist() == logits[:2].argmax(-1).tolist()
    assert together_logprobs[:2].tolist() == [0.0, 0.0]
