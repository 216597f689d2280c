"""What is alike in a vLLM that runs in processes below this one (embedded.py) and one behind HTTP (server.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.generate.engine import EngineRequest, RequestRules


@dataclass(frozen=True, slots=True)
class Piece:
    """What arrived of one request: all tokens since the last piece."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None = None
    spans: Sequence[tuple[str, int]] | None = None
    """With the last piece, from vLLM 0.32 on: (label of the weights, number of tokens), over the whole completion."""


def sampling_arguments(request: EngineRequest, rules: RequestRules) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams that do not depend on how outputs travel.

    `max_tokens` is 16 in vLLM unless set, and its end-of-sequence rules depend on a tokenizer that is not loaded.
    """
    sampling = request.sampling
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": request.seed & ((1 << 63) - 1),
        "stop_token_ids": sorted(rules.stop_ids(request)),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
