"""Where a vLLM runs: in processes below this one (embedded.py), or behind HTTP (server.py).

Every method raises GenerationError alone. Once `fault` says what vLLM died of, nothing works any more.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from asyncrl.config.generate import VLLMEngineConfig, VLLMServerEngineConfig
from asyncrl.generate.engine import EngineRequest, RequestRules, SleepLevel
from asyncrl.generate.vllm.checkpoint import ModelFolder
from asyncrl.generate.vllm.load_request import LoadReply, LoadRequest


@dataclass(frozen=True, slots=True)
class Piece:
    """What arrived of one request: all tokens since the last piece."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None = None
    spans: Sequence[tuple[str, int]] | None = None
    """With the last piece, from vLLM 0.32 on: (label of the weights, number of tokens), over the whole completion."""


class Backend(Protocol):
    """One vLLM. What is no method but `config` and `shared_folder` is known once it has started."""

    config: VLLMEngineConfig | VLLMServerEngineConfig
    shared_folder: str
    """Where weights are written for workers of another machine; empty: in this machine's memory."""
    num_slots: int
    """Most requests at once; vLLM itself takes one more, for a score."""
    block_tokens: int
    """Of a KV block; 0: it does not say."""
    why_no_sleep: str
    """Empty: it can sleep."""
    load_hint: str
    """What to look at where its workers cannot read a file of weights; empty: they are on this machine."""

    @property
    def fault(self) -> str:
        """What vLLM died of, as far as was noticed."""
        ...

    async def start(self, folder: ModelFolder, on_room: Callable[[int, int], object], on_death: Callable[[], None]) -> None:
        """Start it or find it; on error or cancellation the caller closes.

        Args:
            folder: The model's.
            on_room: Told how many KV blocks are free and how many requests run.
            on_death: Called where `fault` appears without anybody having asked.
        """
        ...

    def stream(self, request: EngineRequest, rules: RequestRules, salt: str) -> AsyncGenerator[Piece, None]:
        """Generate a completion; closing it early aborts the request."""
        ...

    async def pause(self, *, clear_cache: bool) -> None:
        """Stop at a token boundary; requests stay. Where the cache is cleared, their keys and values are computed anew.

        Every token sampled before has been yielded when it returns, or comes with spans.
        """
        ...

    async def resume(self) -> None:
        """Go on."""
        ...

    async def load(self, request: LoadRequest) -> list[LoadReply]:
        """Have every worker load; one reply a worker."""
        ...

    async def name_weights(self, label: str) -> None:
        """Name the weights that are there now, in spans."""
        ...

    async def score(self, token_ids: Sequence[int], salt: str) -> list[float]:
        """Return the logprob of each token after the first, temperature 1; not while paused."""
        ...

    async def sleep(self, level: SleepLevel) -> None:
        """Give memory back."""
        ...

    async def wake_up(self, tag: str = "") -> None:
        """Take the memory of `weights` or `kv_cache` again, or all of it. With the last of it vLLM goes on by itself."""
        ...

    async def look(self) -> None:
        """Find out whether it still lives."""
        ...

    async def close(self) -> None:
        """End what `start` began. Safe to repeat."""
        ...


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
