"""An engine without a model: deterministic tokens, scripted lengths and latencies, any number of requests.

A request's tokens follow from its seed. Their times follow from an engine time that stops while paused. So there is no work per
token: one task sleeps until the next request is due, and chunks end where versions change.

With engine kind `replay` it returns given answers: so the pipeline of online runs trains on a file of preferences. Nothing is
drawn then, so behaviour logprobs are 0 (no preference loss reads them). Every token has the version that was current when it was
returned: staleness measures how long a pair was in the buffer. Nothing is returned before the first version.

Invariants: those of generate/engine.py, with a made-up distribution; no torch anywhere.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.clock import Clock
from asyncrl.config.generate import FakeEngineConfig, ReplayEngineConfig
from asyncrl.errors import GenerationError
from asyncrl.generate.engine import EngineRequest, KVPolicy, KVRoom, RequestRules, TokenChunk, TokenStream, check_awake, uniforms
from asyncrl.schema.samples import FinishReason

_BLOCK_TOKENS = 16
_ANY_TOKEN = 1 << 31
"""Vocabulary size for replayed answers: ids are int32."""
_LENGTH_SALT = 1 << 40
"""From this position on, a seed's random stream determines the length; earlier positions determine tokens and logprobs."""


@dataclass(slots=True, eq=False)
class _Scripted:
    """One request: its whole completion, and its progress."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    stream: TokenStream
    started_s: float = -1.0
    """Engine seconds; negative while it waits for a slot."""
    num_told: int = 0


class FakeEngine:
    """See `asyncrl.generate.engine.Engine`."""

    def __init__(self, config: FakeEngineConfig | ReplayEngineConfig, clock: Clock) -> None:
        self._replays = isinstance(config, ReplayEngineConfig)
        if isinstance(config, ReplayEngineConfig):
            slots, limit = config.num_slots, config.max_sequence_tokens
            config = FakeEngineConfig(num_slots=slots, max_sequence_tokens=limit, token_latency_s=0.0, vocabulary_size=_ANY_TOKEN)
        self._config, self._clock = config, clock
        self.version = -1
        self._by_id: dict[str, _Scripted] = {}
        self._waiting: deque[_Scripted] = deque()
        self._due: list[tuple[float, int, _Scripted]] = []
        self._num_placed = 0
        self._engine_s = 0.0
        self._running_since_s: float | None = None
        self._holds: set[str] = {"no weights"} if self._replays else set()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._rules = RequestRules(config.vocabulary_size, config.max_sequence_tokens)
        self._room = KVRoom(config.num_slots, _BLOCK_TOKENS, config.max_sequence_tokens)

    @property
    def has_weights(self) -> bool:
        """Whether a version was loaded since the last sleep."""
        return "no weights" not in self._holds

    @property
    def num_slots(self) -> int:
        """Maximum number of requests that run at once: the config's, or fewer if `kv_blocks` is set and too small."""
        if not self._config.kv_blocks:
            return self._config.num_slots
        running = [scripted for scripted in self._by_id.values() if scripted.started_s >= 0]
        held = sum(-(-(scripted.prompt_tokens + self._num_done(scripted)) // _BLOCK_TOKENS) for scripted in running)
        return self._room.update(max(0, self._config.kv_blocks - held), len(running))

    @property
    def num_running(self) -> int:
        """Number of submitted and unfinished requests."""
        return len(self._by_id)

    async def start(self) -> None:
        """Start the task that finishes requests."""
        self._running_since_s = None if self._holds else self._clock.now()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="fake-engine")

    def submit(self, request: EngineRequest, news: asyncio.Event | None = None) -> TokenStream:
        """Compute the whole completion; its tokens come out over time. See `Engine.submit`."""
        if self._task is not None and self._task.done():
            raise GenerationError("the engine is closed")
        self._rules.check(request, self._by_id)
        token_ids, logprobs = request.answer_ids, (0.0,) * len(request.answer_ids)
        finish_reason: FinishReason = "stop"
        if not self._replays:
            limit, mean, sigma = request.sampling.max_new_tokens, self._config.mean_tokens, self._config.sigma
            u1, u2 = uniforms(np.uint64(request.seed), np.array([_LENGTH_SALT, _LENGTH_SALT + 1], dtype=np.uint64))
            if request.sampling.ignore_eos:
                length = math.inf
            elif self._config.length_distribution == "fixed":
                length = mean
            elif self._config.length_distribution == "uniform":
                length = 1 + u1 * (2 * mean - 1)
            else:  # a log-normal one of the configured mean
                normal = math.sqrt(-2 * math.log(1 - u1)) * math.cos(2 * math.pi * u2)
                length = mean * math.exp(sigma * normal - sigma**2 / 2)
            num_tokens, vocabulary = limit if length >= limit else max(1, round(length)), self._config.vocabulary_size
            draws = uniforms(np.uint64(request.seed), np.arange(2 * num_tokens, dtype=np.uint64))
            token_ids = tuple((draws[:num_tokens] * vocabulary).astype(np.int64).tolist())
            logprobs = tuple((-2 * math.log(vocabulary) * draws[num_tokens:]).astype(np.float32).tolist())
            finish_reason = "length" if num_tokens == limit else "stop"
        request_id = request.request_id
        stream = TokenStream(lambda: self.abort(request_id), news)
        scripted = _Scripted(request_id, token_ids, logprobs, finish_reason, len(request.prompt_ids), stream)
        self._by_id[request_id] = scripted
        self._waiting.append(scripted)
        self._changed.set()
        return stream

    def abort(self, request_id: str) -> None:
        """End a request; see `Engine.abort`."""
        scripted = self._by_id.get(request_id)
        if scripted is not None:
            self._tell(scripted, self._num_done(scripted), "abort")
            self._changed.set()

    async def pause(self) -> None:
        """Stop engine time; see `Engine.pause`."""
        self._hold("pause")

    async def resume(self) -> None:
        """Let engine time go on."""
        self._let_go("pause")

    async def sleep(self, kv: KVPolicy = "recompute") -> None:
        """Stop engine time until the engine is awake and has new weights; see `Engine.sleep`."""
        del kv
        self._hold("sleep")
        self._hold("no weights")

    async def wake(self) -> None:
        """Let engine time go on."""
        self._let_go("sleep")

    async def load_weights(self, version: int, tensors: Mapping[str, Any], kv: KVPolicy) -> float:
        """Give later tokens this version; the tensors are ignored."""
        del tensors, kv
        check_awake("load weights", is_asleep="sleep" in self._holds)
        before_s = self._clock.now()
        for scripted in self._by_id.values():
            self._tell(scripted, self._num_done(scripted), None)
        self.version = version
        self._let_go("no weights")
        return (self._clock.now() - before_s) * 1000

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the logprobs of a uniform model."""
        check_awake("score", is_asleep="sleep" in self._holds)
        return [-math.log(self._config.vocabulary_size)] * (len(token_ids) - 1)

    async def close(self) -> None:
        """Abort all requests and end the task."""
        for request_id in list(self._by_id):
            self.abort(request_id)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        """Place, finish, sleep until the next request is due or something changed."""
        while True:
            self._changed.clear()
            while self._due and not self._holds and self._due[0][0] <= self._now_s() + 1e-9:
                _, _, scripted = heapq.heappop(self._due)
                if self._by_id.get(scripted.request_id) is scripted:  # not aborted; its id may be another's by now
                    self._tell(scripted, len(scripted.token_ids), scripted.finish_reason)
                    self._room.note_finished(scripted.prompt_tokens + len(scripted.token_ids))
            while self._waiting and not self._holds and len(self._by_id) - len(self._waiting) < self.num_slots:
                scripted = self._waiting.popleft()
                scripted.started_s = self._now_s()
                self._num_placed += 1
                due_s = scripted.started_s + len(scripted.token_ids) * self._config.token_latency_s
                heapq.heappush(self._due, (due_s, self._num_placed, scripted))
            if self._holds or not self._due:
                await self._changed.wait()
            elif (delay_s := self._due[0][0] - self._now_s()) > 0:
                async with asyncio.TaskGroup() as tasks:
                    waits = [tasks.create_task(work) for work in (self._clock.sleep(delay_s), self._changed.wait())]
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                    for wait in waits:
                        wait.cancel()
            else:
                await asyncio.sleep(0)

    def _now_s(self) -> float:
        """Return engine time: seconds without pause or sleep."""
        since_s = self._running_since_s
        return self._engine_s + (self._clock.now() - since_s if since_s is not None else 0.0)

    def _hold(self, why: str) -> None:
        self._engine_s, self._running_since_s = self._now_s(), None
        self._holds.add(why)
        self._changed.set()

    def _let_go(self, why: str) -> None:
        self._holds.discard(why)
        if not self._holds and self._running_since_s is None:
            self._running_since_s = self._clock.now()
        self._changed.set()

    def _num_done(self, scripted: _Scripted) -> int:
        if scripted.started_s < 0:
            return 0
        if not self._config.token_latency_s:
            return len(scripted.token_ids)
        steps = (self._now_s() - scripted.started_s + 1e-9) / self._config.token_latency_s
        return min(len(scripted.token_ids) - 1, int(steps))

    def _tell(self, scripted: _Scripted, num_done: int, finish_reason: FinishReason | None) -> None:
        """Send the tokens since the last chunk; with a finish reason the request then ends."""
        start, scripted.num_told = scripted.num_told, num_done
        if num_done > start or finish_reason is not None:
            ids, logprobs = scripted.token_ids[start:num_done], scripted.logprobs[start:num_done]
            scripted.stream.put(TokenChunk(ids, logprobs, (self.version,) * len(ids), finish_reason))
        if finish_reason is None:
            return
        del self._by_id[scripted.request_id]
        if scripted.started_s < 0:
            self._waiting.remove(scripted)
