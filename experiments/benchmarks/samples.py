"""Samples as a generator would send them. Without torch: for processes that only send and receive."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.schema.samples import Sample, ids_to_bytes, logprobs_to_bytes
from asyncrl.schema.weights import WeightsAvailable, WeightsManifest


def make_sample(
    group_id: int, index: int, prompt_ids: NDArray[Any], token_ids: NDArray[Any], version: int = 0, **more: Any
) -> Sample:
    """Return a finished sample, all of one version; `more` are further fields."""
    num_tokens = len(token_ids)
    sample = Sample(
        group_id=group_id, index=index, attempt=0, prompt_ids=ids_to_bytes(prompt_ids), token_ids=ids_to_bytes(token_ids),
        logprobs=logprobs_to_bytes(np.full(num_tokens, -9.0)), versions=ids_to_bytes(np.full(num_tokens, version)),
        finish_reason="stop", text="", generator="bench", started_s=1.0, finished_s=2.0,
    )  # fmt: skip
    return msgspec.structs.replace(sample, **more)


def random_sample(num_tokens: int, prompt_tokens: int, generator: str = "generator-0") -> Sample:
    """Return a sample of random tokens with a text of usual length, always the same."""
    rng = np.random.default_rng(7)
    prompt, tokens = rng.integers(0, 50_000, prompt_tokens), rng.integers(0, 50_000, num_tokens)
    logprobs, text = logprobs_to_bytes(-rng.random(num_tokens, np.float32)), "word " * (num_tokens * 4 // 5)
    return make_sample(0, 0, prompt, tokens, logprobs=logprobs, text=text, generator=generator)


def no_weights(version: int) -> WeightsAvailable:
    """Return the announcement of a version that nobody loads."""
    return WeightsAvailable(version, "none", "", WeightsManifest((), 0), "", time.time())  # noqa: TID251 - wall clock of a message
