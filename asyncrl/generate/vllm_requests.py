"""A request as vLLM wants it: refused where vLLM would be silent or raise in its engine process, then translated.

Ids outside the vocabulary are an IndexError inside vLLM, `max_tokens` is 16 there unless set, and its end-of-sequence rules
depend on a tokenizer that we do not load: the first is excluded by generate/request_rules.py, the others here. Called by the vLLM
engines; imports no vllm.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from asyncrl.errors import GenerationError
from asyncrl.generate.engine import EngineRequest
from asyncrl.generate.request_rules import RequestRules

LOWEST_TEMPERATURE = 0.01
"""vLLM raises any lower one to this, 0 apart."""
_SEED_BITS = (1 << 63) - 1
_ONE_TOKEN = 1e-9
"""top_p that only the likeliest token passes, whatever ties with it."""


def check_request(request: EngineRequest, rules: RequestRules, running: Container[str]) -> None:
    """Raise GenerationError as `RequestRules.check`, and at a temperature that vLLM would not take as it is."""
    rules.check(request, running)
    if 0 < request.sampling.temperature < LOWEST_TEMPERATURE:
        raise GenerationError(
            f"request {request.request_id}: temperature {request.sampling.temperature} is not 0 (greedy) and below "
            f"{LOWEST_TEMPERATURE}, the lowest that vLLM samples at"
        )


def sampling_arguments(request: EngineRequest, rules: RequestRules, *, seeds_greedy: bool = False) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams that do not depend on how outputs travel.

    Args:
        request: What is asked for.
        rules: The engine's.
        seeds_greedy: A greedy request, which has no seed in vLLM, would cost the others theirs: ask for its token as the only one
            to sample from.
    """
    sampling = request.sampling
    is_seeded_greedy = sampling.temperature == 0 and seeds_greedy
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": 1.0 if is_seeded_greedy else sampling.temperature,
        "top_p": _ONE_TOKEN if is_seeded_greedy else sampling.top_p,
        "top_k": sampling.top_k,
        "seed": request.seed & _SEED_BITS,
        "stop_token_ids": sorted(rules.stop_ids(request)),
        "ignore_eos": True,
        "logprobs": 0,
    }
