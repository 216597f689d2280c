"""A request as vLLM wants it: refused where vLLM would be silent or raise in its engine process, then translated.

Ids outside the vocabulary are an IndexError inside vLLM, `max_tokens` is 16 there unless set, and its end-of-sequence rules
depend on a tokenizer that we do not load: all three are settled here. Called by the vLLM engines; imports no vllm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import GenerationError
from asyncrl.generate.engine import EngineRequest

LOWEST_TEMPERATURE = 0.01
"""vLLM raises any lower one to this, 0 apart."""
_SEED_BITS = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class RequestRules:
    """What a request may ask of one engine."""

    vocabulary_size: int
    max_sequence_tokens: int
    end_ids: frozenset[int]

    def check(self, request: EngineRequest) -> None:
        """Raise GenerationError, with the numbers, where the request cannot be served."""
        what = f"request {request.request_id}"
        self.check_ids(request.prompt_ids, what)
        prompt, response, limit = len(request.prompt_ids), request.sampling.max_new_tokens, self.max_sequence_tokens
        if response < 1:
            raise GenerationError(f"{what}: max_new_tokens must be at least 1, got {response}")
        if prompt + response > limit:
            raise GenerationError(
                f"{what}: prompt of {prompt} tokens plus max_new_tokens {response} is {prompt + response}, "
                f"over generate.engine.max_sequence_tokens ({limit}); shorten the prompt, ask for fewer tokens or raise the limit"
            )
        if 0 < request.sampling.temperature < LOWEST_TEMPERATURE:
            raise GenerationError(
                f"{what}: temperature {request.sampling.temperature} is not 0 (greedy) and below {LOWEST_TEMPERATURE}, "
                f"the lowest that vLLM samples at"
            )

    def check_ids(self, token_ids: Sequence[int], what: str) -> None:
        """Raise GenerationError where there are no ids, or one is outside the vocabulary."""
        if not token_ids:
            raise GenerationError(f"{what}: there are no prompt tokens; give at least one (a beginning-of-sequence token, say)")
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self.vocabulary_size:
            wrong = low if low < 0 else high
            raise GenerationError(
                f"{what}: token id {wrong} is outside the vocabulary: allowed are 0 to {self.vocabulary_size - 1}"
            )

    def sampling_arguments(self, request: EngineRequest) -> dict[str, Any]:
        """Return the arguments of vLLM's SamplingParams that do not depend on how outputs travel."""
        sampling = request.sampling
        stop_ids = frozenset() if sampling.ignore_eos else self.end_ids | set(sampling.stop_token_ids)
        return {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": request.seed & _SEED_BITS,
            "stop_token_ids": sorted(stop_ids),
            "ignore_eos": True,
            "logprobs": 0,
        }
