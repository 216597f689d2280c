"""Samples as a generator would send them, and a local Ray. Without torch: for processes that only send and receive."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from asyncrl.schema.samples import Sample, ids_to_bytes, logprobs_to_bytes
from asyncrl.schema.weights import WeightsAvailable, WeightsManifest


def make_sample(
    group_id: int,
    index: int,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    logprobs: Sequence[float] | float = -9.0,
    version: int = 0,
    text: str = "",
    generator: str = "bench",
) -> Sample:
    """Return a finished sample, all of one version."""
    num_tokens = len(token_ids)
    return Sample(
        group_id=group_id, index=index, attempt=0, prompt_ids=ids_to_bytes(np.asarray(prompt_ids)),
        token_ids=ids_to_bytes(np.asarray(token_ids)), logprobs=logprobs_to_bytes(np.broadcast_to(logprobs, num_tokens)),
        versions=ids_to_bytes(np.full(num_tokens, version)), finish_reason="stop", text=text, generator=generator,
        started_s=1.0, finished_s=2.0,
    )  # fmt: skip


def random_sample(num_tokens: int, prompt_tokens: int, generator: str = "generator-0") -> Sample:
    """Return a sample of random tokens with a text of usual length, always the same."""
    rng = np.random.default_rng(7)
    prompt, tokens = rng.integers(0, 50_000, prompt_tokens), rng.integers(0, 50_000, num_tokens)
    text = "word " * (num_tokens * 4 // 5)
    return make_sample(0, 0, prompt.tolist(), tokens.tolist(), (-rng.random(num_tokens)).tolist(), 0, text, generator)


def no_weights(version: int) -> WeightsAvailable:
    """Return the announcement of a version that nobody loads."""
    return WeightsAvailable(version, "none", "", WeightsManifest((), 0), "", time.time())  # noqa: TID251 - wall clock of a message


@contextmanager
def local_ray(**more: Any) -> Iterator[Any]:
    """Start Ray on this machine and yield its module; None where it is not installed."""
    try:
        import ray
    except ImportError:
        yield None
        return
    # A cluster of its own, whatever was left running.
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error", **more)
    try:
        yield ray
    finally:
        ray.shutdown()
