"""The engine contract: what turns token ids into token ids, logprobs and versions.

Invariants, for every implementation (tests/contract/engines/test_engine.py runs over all of them):
- A token's logprob is that of the distribution it was sampled from: after temperature, top-k and top-p.
- A token's version is that of the weights that computed its distribution; versions never decrease within a request.
- The same request (prompt, sampling, seed) under the same weights gives the same tokens, whatever else is in the batch.
- `load_weights` never loses a request: those in flight go on with the new weights, with the KV cache kept (`keep`) or computed
  anew from prompt and tokens so far (`recompute`: later logprobs equal those of a fresh forward under the new weights).
- Nothing is ever sampled from a mixture of two versions.
- An engine that can serve nothing any more says so by EngineDied, from every stream and every later call.
- After `abort` the request's stream ends with reason `abort`; tokens streamed before stay valid.

Beside the contract stands what engines share: a request's stream, the limits of requests and weights, how many requests the KV
cache has room for, and random numbers by seed and position. No torch.
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
    """What an engine that replays gives back; others do not look at it."""


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
    """What arrived of one request of vLLM, before its versions are known: all tokens since the last piece."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None = None
    spans: Sequence[tuple[str, int]] | None = None
    """With the last piece, from vLLM 0.32 on: (label of the weights, number of tokens), over the whole completion."""


class Engine(Protocol):
    """A generator of tokens with versioned weights."""

    version: int
    """Of the weights that sample now; -1 before the first `load_weights`."""

    @property
    def has_weights(self) -> bool:
        """Whether there are whole ones: not after `sleep`, nor after a `load_weights` that broke off, until one succeeds."""

    @property
    def num_slots(self) -> int:
        """Most requests that run at once, by the memory there is now: it may change. More may be submitted and wait inside."""

    @property
    def num_running(self) -> int:
        """Requests submitted and not finished."""

    async def start(self) -> None:
        """Load the model; ready to submit on return. Raises GenerationError; nothing is left to close then, or if cancelled."""

    def submit(self, request: EngineRequest, news: asyncio.Event | None = None) -> TokenStream:
        """Start a request and return its stream. Who takes no more of it closes it, which aborts the request.

        Args:
            request: What to generate.
            news: Set whenever something came for this stream: one event may serve many. None: it has its own.

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
            version: The version the tensors are.
            tensors: Name to CPU tensor, named as the model's parameters; tied ones may be absent. Shapes must match.
                `MappedTensors` (weights/tensors.py) may be loaded from where they lie, by another process too.
            kv: What happens to requests in flight.

        Returns:
            Milliseconds during which no token was generated.

        Raises:
            GenerationError: A name or shape does not fit; the old weights are still whole.
            BroadcastError: The bytes did not come, and the old weights are whole; or they were overwritten while they were read
                (`MappedTensors.check`): `has_weights` is false then, and nothing is sampled until a later one succeeds.
        """

    async def sleep(self, kv: KVPolicy = "recompute") -> None:
        """Give the memory of weights and KV cache back at a token boundary; requests in flight wait.

        Args:
            kv: `recompute`: keys and values of requests in flight are computed anew after `wake`. `keep`: they are in host memory
                meanwhile, in an engine that can do that, and come back; others compute them anew.

        Requests may be submitted, aborted and paused meanwhile; `load_weights` and `score` raise GenerationError until `wake`.
        After it nothing is sampled until `load_weights`. Asleep already: nothing changes.
        """

    async def wake(self) -> None:
        """Take device memory again after `sleep`; awake already: nothing happens. Raises GenerationError when it is not there."""

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the logprob of each token after the first under the current weights, temperature 1 (the probe)."""

    async def close(self) -> None:
        """Abort everything and release the model."""


class TokenStream:
    """What `Engine.submit` returns: taken from chunk by chunk, or iterated over. Closing it early aborts the request.

    Chunks are put in by an engine and taken out by one consumer, on one event loop. What nobody took yet is at most the request's
    own `max_new_tokens`.
    """

    def __init__(self, on_early_close: Callable[[], None], news: asyncio.Event | None = None) -> None:
        self._on_early_close = on_early_close
        self._news = asyncio.Event() if news is None else news
        self._ready: deque[TokenChunk | GenerationError] = deque()
        self._is_complete = False
        """Nothing follows what is ready."""

    def put(self, news: TokenChunk | GenerationError) -> None:
        """Hand the consumer a chunk, or the error that the stream ends with."""
        if self._is_complete:
            return
        self._is_complete = isinstance(news, GenerationError) or news.finish_reason is not None
        self._ready.append(news)
        self._news.set()

    def take(self) -> TokenChunk | None:
        """Return the next chunk that is here; None where none is.

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
        """Return the next chunk, of a stream whose event is its own. Raises GenerationError as `take`."""
        while (chunk := self.take()) is None:
            if self._is_complete:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return chunk

    def close(self) -> None:
        """Abort the request unless it is complete; nothing more comes out."""
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
    """Of the model: each ends a completion."""

    def check(self, request: EngineRequest, running: Container[str]) -> None:
        """Raise GenerationError, with the numbers, where the request cannot be served beside those `running`."""
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
    """Raise GenerationError where an engine that must be awake is not."""
    if is_asleep:
        raise GenerationError(f"cannot {what}: the engine is asleep; wake it first")


def check_weights(
    shapes: Mapping[str, tuple[int, ...]], own: Mapping[str, tuple[int, ...]], needed: Sequence[Sequence[str]]
) -> None:
    """Refuse weights that are not the whole of a model.

    Args:
        shapes: Of the new tensors, by name.
        own: Of all that the model takes.
        needed: What has to come: of each row of names, which are one tensor, at least one.

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
"""Finished sequences over which the mean length is taken, roughly: older ones count less and less."""
_NOTICEABLE = 8
"""A change of less than one in so many is no news."""


@dataclass(slots=True)
class KVRoom:
    """How many requests an engine with paged KV could run now, by the blocks that are free: what admission is told.

    `1 <= num_slots <= most`. It moves only when the answer has moved by at least an eighth, or to `most`. Too low a number
    leaves the batch with gaps, too high a one makes groups wait inside the engine while their weights grow old. Neither is ever
    wrong, since the staleness rule does not depend on it.

    Args:
        most: Never more than this (config's num_slots).
        block_tokens: Tokens of a KV block.
        expected_tokens: Prompt and response of a sequence, until some have finished: the longest allowed is the careful guess.

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
    """As of the last `update`; `most` before the first."""
    _mean_tokens: float = field(init=False)
    _num_finished: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.num_slots, self._mean_tokens = self.most, float(self.expected_tokens)

    def note_finished(self, num_tokens: int) -> None:
        """Take a finished sequence's length (prompt and response) into the mean."""
        self._num_finished += 1
        self._mean_tokens += (num_tokens - self._mean_tokens) / min(self._num_finished, _MEAN_OVER)

    def update(self, free_blocks: int, running: int) -> int:
        """Return the number of slots: requests that run, and as many more as find room for a whole sequence.

        Every running request is given one block first: it will ask for one within the next block's worth of tokens, and who
        gets none is thrown out and computed again. What running requests will need beyond that is taken to be what others give
        back by ending.

        Args:
            free_blocks: KV blocks that nobody holds; blocks of cached prefixes count as free.
            running: Requests in the batch; those that wait inside the engine are not among them.
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

    A request draws its i-th token with `uniforms(seed, i)`, so neither the batch it sits in, nor a pause, nor the order of
    requests can change what it draws. There is no state, and nothing to save or restore.

    Args:
        seeds: Any shape that broadcasts with `positions`.
        positions: Counter within the seed's stream.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), applied to the seed and then to seed plus counter.
    """
    words = _mix(_mix(np.atleast_1d(seeds) + _GOLDEN_GAMMA) + (positions + np.uint64(1)) * _GOLDEN_GAMMA)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
