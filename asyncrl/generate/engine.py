"""The engine contract: what turns token ids into token ids, logprobs and versions.

Invariants, for every implementation (tests/contract/test_engine.py runs over all of them):
- A token's logprob is that of the distribution it was sampled from: after temperature, top-k and top-p.
- A token's version is that of the weights that computed its distribution; versions never decrease within a request.
- The same request (prompt, sampling, seed) under the same weights gives the same tokens, whatever else is in the batch.
- `load_weights` never loses a request: those in flight go on with the new weights, with the KV cache kept (`keep`) or computed
  anew from prompt and tokens so far (`recompute`: later logprobs equal those of a fresh forward under the new weights).
- Nothing is ever sampled from a mixture of two versions.
- An engine that can serve nothing any more says so by EngineDied, from every stream and every later call.
- After `abort` the request's stream ends with reason `abort`; tokens streamed before stay valid.

Called by generate/rollout.py and generate/worker.py; never by anything outside this stage.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from asyncrl.schema.samples import FinishReason, SamplingParams

KVPolicy = Literal["keep", "recompute"]
SleepLevel = Literal[1, 2]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One completion to generate."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    group_key: str = ""
    """Requests with the same non-empty key have the same prompt and may share its prefill."""
    answer_ids: tuple[int, ...] = ()
    """What an engine that replays gives back; others do not look at it."""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """One or more tokens of one request, in order."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason | None = None
    """Set on the last chunk, which may be empty of tokens."""


class Engine(Protocol):
    """A generator of tokens with versioned weights."""

    @property
    def version(self) -> int:
        """Version of the weights that sample now; -1 before the first `load_weights`."""
        ...

    @property
    def num_slots(self) -> int:
        """Most requests that run at once, by the memory there is now: it may change. More may be submitted and wait inside."""
        ...

    @property
    def num_running(self) -> int:
        """Requests submitted and not finished."""
        ...

    async def start(self) -> None:
        """Load the model; ready to submit on return. Raises GenerationError; nothing is left to close then, or if cancelled."""
        ...

    def submit(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        """Start a request and return its stream. Closing the stream early aborts the request.

        Raises:
            GenerationError: Prompt empty, token id outside the vocabulary, or prompt plus `max_new_tokens` beyond the limit.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request; unknown and finished ids are ignored."""
        ...

    async def pause(self) -> None:
        """Stop at a token boundary; requests stay in flight. Returns once no forward is running."""
        ...

    async def resume(self) -> None:
        """Go on after `pause`."""
        ...

    async def load_weights(self, version: int, tensors: Mapping[str, Any], kv: KVPolicy) -> float:
        """Replace the weights in place at a token boundary.

        Args:
            version: The version the tensors are.
            tensors: Name to CPU tensor, named as the model's parameters; tied ones may be absent. Shapes must match.
                `MappedTensors` (models/mapped.py) may be loaded from where they lie, by another process too.
            kv: What happens to requests in flight.

        Returns:
            Milliseconds during which no token was generated.

        Raises:
            GenerationError: A name or shape does not fit; the old weights are still whole.
            BroadcastError: The bytes were overwritten while they were read (`MappedTensors.check`): nothing is sampled until a
                later `load_weights` succeeds.
        """
        ...

    async def sleep(self, level: SleepLevel, kv: KVPolicy = "recompute") -> None:
        """Give device memory back at a token boundary; requests in flight wait.

        Args:
            level: 1: the KV cache goes, the weights move to host memory. 2: the weights go too; after `wake` nothing is sampled
                until `load_weights`.
            kv: `recompute`: keys and values of requests in flight are computed anew after `wake`. `keep`: they are in host memory
                meanwhile, in an engine that can do that, and come back; others compute them anew.

        Requests may be submitted, aborted and paused meanwhile; `load_weights` and `score` raise GenerationError until `wake`.
        Asleep already: a higher level goes deeper, any other changes nothing.

        Raises:
            GenerationError: The engine cannot sleep (vLLM on a CPU, or started without `sleep = true`).
        """
        ...

    async def wake(self) -> None:
        """Take device memory again after `sleep`; awake already: nothing happens. Raises GenerationError when it is not there."""
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the logprob of each token after the first under the current weights, temperature 1 (the probe)."""
        ...

    async def close(self) -> None:
        """Abort everything and release the model."""
        ...
