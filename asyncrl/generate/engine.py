"""The engine contract: an engine turns prompt token ids into sampled token ids, logprobs and versions.

Invariants, for every implementation (tests/contract/engines/test_engine.py runs over all of them):
- A token's logprob is that of the distribution it was sampled from: after temperature, top-k and top-p.
- A token's version is that of the weights that computed its distribution; versions never decrease within a request.
- The same request (prompt, sampling, seed) under the same weights gives the same tokens, whatever else is in the batch.
- `load_weights` never loses a request: those in flight go on with the new weights, with the KV cache kept (`keep`) or computed
  anew from prompt and tokens so far (`recompute`: later logprobs equal those of a fresh forward under the new weights).
- Nothing is ever sampled from a mixture of two versions.
- An engine that can no longer serve raises EngineDied, from every stream and every later call.
- After `abort` the request's stream ends with reason `abort`; tokens streamed before stay valid.

This module also has what engines share: a request's stream, the limits of requests and weights, the number of requests that fit
the KV cache, and random numbers by seed and position. No torch.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import GenerationError
from asyncrl.schema.samples import FinishReason, SamplingParams

KVPolicy = Literal["keep", "recompute"]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One completion to generate."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    """From 0 to 2^63 - 1."""
    group_key: str = ""
    """Requests with the same non-empty key have the same prompt and may share its prefill."""
    answer_ids: tuple[int, ...] = ()
    """The answer that a replay engine returns; other engines ignore it."""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """One or more tokens of one request, in order."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason | None = None
    """Set on the last chunk, which may be empty of tokens."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of one vLLM request, before its versions are known: all tokens since the last piece."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None = None
    spans: Sequence[tuple[str, int]] | None = None
    """In the last piece, from vLLM 0.32 on: (label of the weights, number of tokens), for the whole completion."""


class Engine(Protocol):
    """A generator of tokens with versioned weights."""

    version: int
    """The version of the current weights; -1 before the first `load_weights`."""

    @property
    def has_weights(self) -> bool:
        """Whether the weights are complete: false after `sleep` or a broken `load_weights`, until a load succeeds."""

    @property
    def num_slots(self) -> int:
        """Maximum number of requests that run at once with the free memory; it may change. More requests wait in the engine."""

    @property
    def num_running(self) -> int:
        """Number of submitted and unfinished requests."""

    async def start(self) -> None:
        """Load the model; ready to submit on return. Raises GenerationError; nothing is left to close then, or if cancelled."""

    def submit(self, request: EngineRequest, news: asyncio.Event | None = None) -> TokenStream:
        """Start a request and return its stream. To abort the request, close the stream.

        Args:
            request: What to generate.
            news: Set when something arrives for this stream; one event may serve many streams. None: the stream has its own.

        Raises:
            GenerationError: Prompt empty, token id outside the vocabulary, or prompt plus `max_new_tokens` beyond the limit.
        """

    def abort(self, request_id: str) -> None:
        """End a request; unknown and finished ids are ignored."""

    async def pause(self) -> None:
        """Stop at a token boundary; requests stay in flight. Returns once no forward is running."""

    async def resume(self) -> None:
        """Go on after `pause`."""

    async def load_weights(self, version: int, tensors: Mapping[str, Any], kv: KVPolicy) -> float:
        """Replace the weights in place at a token boundary.

        Args:
            version: The version of the tensors.
            tensors: Name to CPU tensor, named as the model's parameters; tied ones may be absent. Shapes must match.
                `MappedTensors` (weights/tensors.py) may be loaded from their place, also by another process.
            kv: What happens to requests in flight.

        Returns:
            Milliseconds during which no token was generated.

        Raises:
            GenerationError: A name or shape does not fit; the old weights are complete.
            BroadcastError: The bytes did not arrive, and the old weights are complete. Or the bytes were overwritten during the
                read (`MappedTensors.check`): then `has_weights` is false, and nothing is sampled until a later load succeeds.
        """

    async def sleep(self, kv: KVPolicy = "recompute") -> None:
        """Free the memory of weights and KV cache at a token boundary; requests in flight wait.

        Args:
            kv: `recompute`: keys and values of requests in flight are computed again after `wake`. `keep`: an engine that can
                do so keeps them in host memory; other engines compute them again.

        During sleep, requests may be submitted, aborted and paused; `load_weights` and `score` raise GenerationError. After
        `wake` nothing is sampled until `load_weights`. If already asleep, nothing changes.
        """

    async def wake(self) -> None:
        """Allocate device memory after `sleep`; if awake, nothing happens. Raises GenerationError without enough memory."""

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the logprob of each token after the first under the current weights, temperature 1 (the probe)."""

    async def close(self) -> None:
        """Abort everything and release the model."""


class TokenStream:
    """The stream of chunks of one request: call `take` or iterate. Closing it early aborts the request.

    An engine adds chunks and one consumer takes them, on one event loop. Waiting tokens are at most the request's
    `max_new_tokens`.
    """

    def __init__(self, on_early_close: Callable[[], None], news: asyncio.Event | None = None) -> None:
        self._on_early_close = on_early_close
        self._news = asyncio.Event() if news is None else news
        self._ready: deque[TokenChunk | GenerationError] = deque()
        self._is_complete = False
        """No further chunk follows."""

    def put(self, news: TokenChunk | GenerationError) -> None:
        """Add a chunk, or the error that ends the stream."""
        if self._is_complete:
            return
        self._is_complete = isinstance(news, GenerationError) or news.finish_reason is not None
        self._ready.append(news)
        self._news.set()

    def take(self) -> TokenChunk | None:
        """Return the next chunk; None if none is ready.

        Raises:
            GenerationError: The engine could not finish the request.
        """
        if not self._ready:
            return None
        news = self._ready.popleft()
        if isinstance(news, GenerationError):
            raise news
        return news

    def __aiter__(self) -> TokenStream:
        """Return the stream itself."""
        return self

    async def __anext__(self) -> TokenChunk:
        """Wait for the next chunk; the stream must have its own event. Raises GenerationError as `take`."""
        while (chunk := self.take()) is None:
            if self._is_complete:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return chunk

    def close(self) -> None:
        """Abort the request unless it is complete; no chunk follows."""
        self._ready.clear()
        if not self._is_complete:
            self._is_complete = True
            self._news.set()
            self._on_early_close()


@dataclass(frozen=True, slots=True)
class RequestRules:
    """The limits of one engine and its model."""

    vocabulary_size: int
    max_sequence_tokens: int
    end_ids: frozenset[int] = frozenset()
    """The model's end tokens: each ends a completion."""

    def check(self, request: EngineRequest, running: Container[str]) -> None:
        """Raise GenerationError, with the numbers, if the request cannot be served beside those `running`."""
        what, ids = f"request {request.request_id}", request.prompt_ids
        if not ids:
            raise GenerationError(f"{what}: there are no prompt tokens; give at least one (a beginning-of-sequence token, say)")
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocabulary_size:
            raise GenerationError(
                f"{what}: token id {low if low < 0 else high} is outside the vocabulary: "
                f"allowed are 0 to {self.vocabulary_size - 1}"
            )
        if request.request_id in running:
            raise GenerationError(f"{what} is running already; request ids must be unique")
        prompt, limit, answer = len(ids), self.max_sequence_tokens, len(request.answer_ids)
        response, named = (answer, "an answer of") if answer else (request.sampling.max_new_tokens, "max_new_tokens")
        if response < 1:
            raise GenerationError(f"{what}: max_new_tokens must be at least 1, got {response}")
        if prompt + response > limit:
            raise GenerationError(
                f"{what}: prompt of {prompt} tokens plus {named} {response} is {prompt + response}, "
                f"over generate.engine.max_sequence_tokens ({limit}); shorten the prompt, ask for fewer tokens or raise the limit"
            )

    def stop_ids(self, request: EngineRequest) -> frozenset[int]:
        """Return the tokens that end this request: the model's and its own, or none where it ignores them."""
        return frozenset() if request.sampling.ignore_eos else self.end_ids | set(request.sampling.stop_token_ids)


def check_awake(what: str, *, is_asleep: bool) -> None:
    """Raise GenerationError if the engine is asleep."""
    if is_asleep:
        raise GenerationError(f"cannot {what}: the engine is asleep; wake it first")


def check_weights(
    shapes: Mapping[str, tuple[int, ...]], own: Mapping[str, tuple[int, ...]], needed: Sequence[Sequence[str]]
) -> None:
    """Check that new weights have all tensors of a model.

    Args:
        shapes: The shapes of the new tensors, by name.
        own: The shapes of all tensors of the model, by name.
        needed: The required tensors; each item lists the names of one tensor, and at least one of them must be there.

    Raises:
        GenerationError: A name is unknown or missing, or a shape differs.
    """
    if unknown := [name for name in shapes if name not in own]:
        raise GenerationError(
            f"new weights have {len(unknown)} tensors this model does not have, the first: {', '.join(unknown[:5])}; "
            f"it has {len(own)}, the first: {', '.join([*own][:5])}"
        )
    if missing := [names[0] for names in needed if not any(name in shapes for name in names)]:
        raise GenerationError(
            f"new weights lack {len(missing)} of the model's {len(needed)} tensors, the first: {', '.join(missing[:5])}; send all"
        )
    for name, shape in shapes.items():
        if shape != tuple(own[name]):
            raise GenerationError(f"new weights: {name} has shape {shape}, the model's is {tuple(own[name])}")


_MEAN_OVER = 256
"""Approximate number of finished sequences in the moving average of the length."""
_NOTICEABLE = 8
"""A smaller relative change than 1 / this is not reported."""


@dataclass(slots=True)
class KVRoom:
    """The number of requests that an engine with a paged KV cache can run with its free blocks; admission uses it.

    `1 <= num_slots <= most`. It changes only if the result changes by at least an eighth, or reaches `most`. If the number is too
    low, the batch has gaps; if it is too high, groups wait in the engine while their weights become stale. Both are safe, since
    the staleness rule does not depend on it.

    Args:
        most: The maximum (num_slots of the config).
        block_tokens: Tokens per KV block.
        expected_tokens: Length of prompt and response until some sequences have finished; the maximum length is a safe choice.

    Example:
        >>> room = KVRoom(most=256, block_tokens=16, expected_tokens=160)
        >>> room.update(free_blocks=320, running=0)
        32
        >>> room.note_finished(num_tokens=80)
        >>> room.update(free_blocks=320, running=0)
        64
    """

    most: int
    block_tokens: int
    expected_tokens: int
    num_slots: int = field(init=False)
    """The result of the last `update`; `most` before the first."""
    _mean_tokens: float = field(init=False)
    _num_finished: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.num_slots, self._mean_tokens = self.most, float(self.expected_tokens)

    def note_finished(self, num_tokens: int) -> None:
        """Add a finished sequence's length (prompt and response) to the mean."""
        self._num_finished += 1
        self._mean_tokens += (num_tokens - self._mean_tokens) / min(self._num_finished, _MEAN_OVER)

    def update(self, free_blocks: int, running: int) -> int:
        """Return the number of slots: the running requests plus those for which a whole sequence fits.

        One block is reserved for every running request: it will need one within the next block of tokens, and without it the
        request would be preempted and computed again. Further blocks are assumed to come from requests that finish.

        Args:
            free_blocks: Unused KV blocks; blocks of cached prefixes count as free.
            running: Requests in the batch, without those that wait in the engine.
        """
        fits = running + int((free_blocks - running) / math.ceil(self._mean_tokens / self.block_tokens))
        now = min(self.most, max(1, fits))
        if now == self.most or abs(now - self.num_slots) * _NOTICEABLE >= self.num_slots:
            self.num_slots = now
        return self.num_slots


_GOLDEN_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def uniforms(seeds: NDArray[np.uint64] | np.uint64, positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return uniform doubles in [0, 1), one for each (seed, position), that depend on nothing else.

    A request draws its i-th token with `uniforms(seed, i)`, so its draws do not depend on its batch, on pauses or on the order of
    requests. There is no state to save or restore.

    Args:
        seeds: Any shape that broadcasts with `positions`.
        positions: Counter within the seed's stream.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), applied to the seed and then to seed plus counter.
    """
    words = _mix(_mix(np.atleast_1d(seeds) + _GOLDEN_GAMMA) + (positions + np.uint64(1)) * _GOLDEN_GAMMA)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
