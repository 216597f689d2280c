"""What a request may ask of an engine, and which tokens end it: alike for all engines, in the same words.

Pure; no model, no torch. Called by every engine before it takes a request.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from asyncrl.errors import GenerationError
from asyncrl.generate.engine import EngineRequest


@dataclass(frozen=True, slots=True)
class RequestRules:
    """The limits of one engine and its model."""

    vocabulary_size: int
    max_sequence_tokens: int
    end_ids: frozenset[int] = frozenset()
    """Of the model: each ends a completion."""

    def check(self, request: EngineRequest, running: Container[str]) -> None:
        """Raise GenerationError, with the numbers, where the request cannot be served beside those `running`."""
        what = f"request {request.request_id}"
        self.check_ids(request.prompt_ids, what)
        refuse_running(request, running)
        prompt, response, limit = len(request.prompt_ids), request.sampling.max_new_tokens, self.max_sequence_tokens
        if response < 1:
            raise GenerationError(f"{what}: max_new_tokens must be at least 1, got {response}")
        if prompt + response > limit:
            raise GenerationError(
                f"{what}: prompt of {prompt} tokens plus max_new_tokens {response} is {prompt + response}, "
                f"over generate.engine.max_sequence_tokens ({limit}); shorten the prompt, ask for fewer tokens or raise the limit"
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

    def scorable(self, token_ids: Sequence[int], limit: int = 0) -> tuple[int, ...]:
        """Return the ids of a sequence to score.

        Args:
            token_ids: At least one.
            limit: The most that the engine takes; 0: `max_sequence_tokens`.

        Raises:
            GenerationError: There are none, too many, or one is outside the vocabulary.
        """
        ids, most = tuple(int(token) for token in token_ids), limit or self.max_sequence_tokens
        self.check_ids(ids, "score")
        if len(ids) > most:
            raise GenerationError(f"cannot score {len(ids)} tokens: {most} is the most (generate.engine.max_sequence_tokens)")
        return ids

    def stop_ids(self, request: EngineRequest) -> frozenset[int]:
        """Return the tokens that end this request: the model's and its own, or none where it ignores them."""
        return frozenset() if request.sampling.ignore_eos else self.end_ids | set(request.sampling.stop_token_ids)


def refuse_running(request: EngineRequest, running: Container[str]) -> None:
    """Raise GenerationError where the request's id is in use."""
    if request.request_id in running:
        raise GenerationError(f"request {request.request_id} is running already; request ids must be unique")
