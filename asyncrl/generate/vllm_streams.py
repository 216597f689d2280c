"""Requests that vLLM works on: handed over, pulled from its collectors, stamped with versions, put into our streams.

Owns a queue of those that vLLM has not been given yet, and one task for each that it has, in one task group.

Invariants:
- vLLM is given as many requests as have slots, in the order they came, the next one when a slot is about to be free: so what else
  must run now (a score) finds room, and what waits is never bound to old weights.
- A token's version is the one in force when its output is taken from vLLM; `take_all`, called while vLLM is paused, waits until
  its outputs have all come through and takes every one: nothing sampled before a swap is taken after it.
- Where vLLM says itself which weights sampled which tokens, a request whose stamps disagree ends in GenerationError.
- A request that has no token yet when the weights change is handed over anew (`renew`), so that it never meets keys and values
  that others computed for the same prompt under older weights.

Called by generate/vllm_engine.py, on its event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from asyncrl.errors import EngineDied, GenerationError
from asyncrl.generate.engine import EngineRequest, TokenChunk
from asyncrl.generate.kv_room import KVRoom
from asyncrl.generate.request_rules import RequestRules
from asyncrl.generate.token_stream import TokenStream
from asyncrl.generate.vllm_requests import sampling_arguments
from asyncrl.schema.samples import FinishReason

log = logging.getLogger(__name__)

DEATH = "vLLM's engine process died; its last words are in this process's log"
_FINISHED: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass(slots=True, eq=False)
class Flight:
    """One request on its way."""

    request: EngineRequest
    stream: weakref.ref[TokenStream]
    epoch: int = -1
    """Loads of weights that had been made when it was handed over."""
    collector: Any = None
    """vLLM's, while vLLM has the request."""
    follower: asyncio.Task[None] | None = None
    """The task that takes its outputs, while it waits for one."""
    has_slot: bool = False
    is_over: bool = False
    spans: list[list[int]] = field(default_factory=list)
    """[version, number of tokens], in order; two neighbours never of the same version."""

    @property
    def num_tokens(self) -> int:
        """Tokens taken so far."""
        return sum(count for _, count in self.spans)

    def stamp(self, version: int, num_tokens: int) -> None:
        """Note that the next tokens are of `version`."""
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1][1] += num_tokens
        elif num_tokens:
            self.spans.append([version, num_tokens])


class Flights:
    """All requests of an engine; see the module."""

    def __init__(self, llm: Any, rules: RequestRules, room: KVRoom, *, seeds_greedy: bool) -> None:  # noqa: ANN401 - an AsyncLLM
        """Note whom requests go to.

        Args:
            llm: Started.
            rules: Of this engine.
            room: Told of every request that finishes; its `most` is the number of slots.
            seeds_greedy: As `sampling_arguments`.
        """
        self._llm = llm
        self._rules = rules
        self._room = room
        self._seeds_greedy = seeds_greedy
        self._by_id: dict[str, Flight] = {}
        self._waiting: deque[Flight] = deque()
        self._num_in_slots = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._is_closing = asyncio.Event()
        self._home: asyncio.Task[None] | None = None
        params = import_module("vllm.sampling_params")
        self._make_params: Callable[..., Any] = params.SamplingParams
        self._delta = params.RequestOutputKind.DELTA
        self._scored = itertools.count()
        self.version = -1
        self.epoch = 0
        """Grows with every load of weights; salts the prefix cache."""
        self.met_non_finite = False
        """Whether logits were non-finite since somebody last looked: keys and values may be too."""

    @property
    def num_running(self) -> int:
        """Requests submitted and not finished."""
        return len(self._by_id)

    def __contains__(self, request_id: object) -> bool:
        """Return whether a request is not finished."""
        return request_id in self._by_id

    async def open(self) -> None:
        """Begin; the caller closes."""
        is_open = asyncio.Event()
        self._home = asyncio.get_running_loop().create_task(self._house(is_open), name="vllm-flights")
        await is_open.wait()

    async def close(self) -> None:
        """End every request with reason `abort`."""
        for request_id in list(self._by_id):
            self.abort(request_id)
        self._is_closing.set()
        if self._home is not None:
            await self._home

    def submit(self, request: EngineRequest) -> TokenStream:
        """Start a request that was checked; return its stream."""
        request_id = request.request_id
        stream = TokenStream(on_early_close=lambda: self.abort(request_id))
        flight = self._by_id[request_id] = Flight(request, weakref.ref(stream))
        self._waiting.append(flight)
        self._refill()
        return stream

    def abort(self, request_id: str) -> None:
        """End a request at once, with the tokens that have come; unknown ids are ignored."""
        if (flight := self._by_id.get(request_id)) is not None:
            self._take_waiting(flight)
            self._finish(flight, TokenChunk((), (), (), "abort"))

    async def take_all(self) -> None:
        """Take every output that vLLM has made; it must be paused."""
        if self._llm.output_handler is not None:
            milestone = _Milestone()
            outputs = import_module("vllm.v1.engine").EngineCoreOutputs(outputs=milestone)
            self._llm.engine_core.outputs_queue.put_nowait(outputs)
            await milestone.reached.wait()
        for flight in list(self._by_id.values()):
            self._take_waiting(flight)

    async def renew(self) -> None:
        """Have requests without a token handed over anew, under the present epoch; vLLM is paused."""
        for flight in list(self._by_id.values()):
            if flight.collector is not None and not flight.spans and flight.epoch != self.epoch:
                await self._withdraw(flight)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the logprob of each token after the first, temperature 1; vLLM must not be paused.

        Prompt logprobs are taken before any temperature or filter, whatever `logprobs_mode` says, and never from cached prompts.
        """
        params = self._make_params(max_tokens=1, seed=0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        request_id = f"asyncrl-score-{next(self._scored)}"
        final = None
        async for output in self._llm.generate({"type": "token", "prompt_token_ids": list(token_ids)}, params, request_id):
            final = output
        assert final is not None
        return [position[token].logprob for position, token in zip(final.prompt_logprobs[1:], token_ids[1:], strict=True)]

    def fail_all(self, fault: EngineDied) -> None:
        """End every request with an error: nothing more will come."""
        for flight in list(self._by_id.values()):
            self._finish(flight, EngineDied(str(fault)))

    async def _house(self, is_open: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            is_open.set()
            await self._is_closing.wait()

    def _refill(self) -> None:
        """Give vLLM requests that wait, as long as there are slots."""
        assert self._tasks is not None
        while self._waiting and self._num_in_slots < self._room.most:
            flight = self._waiting.popleft()
            if not flight.is_over:
                flight.has_slot = True
                self._num_in_slots += 1
                self._tasks.create_task(self._follow(flight), name=f"vllm-{flight.request.request_id}")

    def _give_up_slot(self, flight: Flight) -> None:
        if flight.has_slot:
            flight.has_slot = False
            self._num_in_slots -= 1
            self._refill()

    async def _follow(self, flight: Flight) -> None:
        """Take a request's outputs as they come."""
        try:
            while not flight.is_over:
                if flight.collector is None:
                    await self._hand_over(flight)
                else:
                    self._take(flight, await self._next_output(flight))
        except Exception as error:  # noqa: BLE001 - the boundary to vLLM: whatever it raises ends this request alone
            self._finish(flight, self._fault_of(error))
        finally:
            await self._withdraw(flight)

    @staticmethod
    async def _next_output(flight: Flight) -> Any:  # noqa: ANN401 - vLLM's RequestOutput
        """Wait for an output; `_finish` cancels the wait, for after a last output that `_take_waiting` took none would come."""
        flight.follower = asyncio.current_task()
        try:
            return await flight.collector.get()
        finally:
            flight.follower = None

    async def _hand_over(self, flight: Flight) -> None:
        flight.epoch = self.epoch
        request = flight.request
        params = self._make_params(
            **sampling_arguments(request, self._rules, seeds_greedy=self._seeds_greedy),
            detokenize=False,
            flat_logprobs=True,
            output_kind=self._delta,
        )
        prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids), "cache_salt": f"asyncrl-{flight.epoch}"}
        flight.collector = await self._llm.add_request(request.request_id, prompt, params)
        if flight.epoch != self.epoch:
            await self._withdraw(flight)

    async def _withdraw(self, flight: Flight) -> None:
        """Take a request back from vLLM, which may die of something else meanwhile."""
        collector, flight.collector = flight.collector, None
        if collector is None or self._llm.errored:
            return
        try:
            await self._llm.abort(collector.request_id, internal=True)
        except Exception as error:  # noqa: BLE001 - the boundary to vLLM; a request that is gone needs no withdrawing
            log.warning("request %s was not withdrawn from vLLM: %r", flight.request.request_id, error)

    def _fault_of(self, error: Exception) -> GenerationError:
        """Return what a request ends with: the engine's death ends them all, and none of them failed by it."""
        if isinstance(error, GenerationError):
            return error
        return EngineDied(DEATH) if self._llm.errored else GenerationError(f"vLLM failed: {error!r}")

    def _take_waiting(self, flight: Flight) -> None:
        """Take what lies in the collector, without waiting."""
        if flight.collector is None or flight.is_over:
            return
        try:
            output = flight.collector.get_nowait()
        except Exception as error:  # noqa: BLE001 - the boundary to vLLM, as in `_follow`
            self._finish(flight, self._fault_of(error))
            return
        if output is not None:
            self._take(flight, output)

    def _take(self, flight: Flight, output: Any) -> None:  # noqa: ANN401 - vLLM's RequestOutput
        """Put one output into the stream."""
        completion = output.outputs[0]
        if flight.is_over or (completion.finish_reason == "abort" and flight.collector is None):
            return
        token_ids = tuple(completion.token_ids)
        logprobs = self._logprobs(flight.request, completion)
        flight.stamp(self.version, len(token_ids))
        if not all(map(math.isfinite, logprobs)):
            self.met_non_finite = True
            told = f"the model gave non-finite logits under version {self.version}, within {flight.num_tokens} tokens"
            self._finish(flight, GenerationError(told))
            return
        reason: str | None = completion.finish_reason
        if reason is not None:
            flight.collector = None
        if reason not in {None, *_FINISHED}:
            self._finish(flight, GenerationError(f"vLLM ended the request with {reason!r} after {flight.num_tokens} tokens"))
        elif (fault := _disagreement(flight, completion)) is not None:
            self._finish(flight, fault)
        else:
            chunk = TokenChunk(token_ids, logprobs, (self.version,) * len(token_ids), _FINISHED.get(reason))
            self._finish(flight, chunk) if reason is not None else _put(flight, chunk)
            if flight.num_tokens == flight.request.sampling.max_new_tokens - 1:
                self._give_up_slot(flight)  # a step early: vLLM has one slot more than are given out

    @staticmethod
    def _logprobs(request: EngineRequest, completion: Any) -> tuple[float, ...]:  # noqa: ANN401
        num_tokens = len(completion.token_ids)
        if request.sampling.temperature == 0 or not num_tokens:
            return (0.0,) * num_tokens
        flat = completion.logprobs
        return tuple(flat.logprobs[start] for start in flat.start_indices)

    def _finish(self, flight: Flight, news: TokenChunk | GenerationError) -> None:
        if flight.is_over:
            return
        flight.is_over = True
        if flight.follower is not None:
            flight.follower.cancel()
        self._by_id.pop(flight.request.request_id, None)
        self._give_up_slot(flight)
        if isinstance(news, TokenChunk) and news.finish_reason != "abort":
            self._room.note_finished(len(flight.request.prompt_ids) + flight.num_tokens)
        _put(flight, news)


class _Milestone(list[Any]):
    """A batch without outputs: vLLM's output loop asks for its length once everything before it is in the collectors."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = asyncio.Event()

    def __len__(self) -> int:
        self.reached.set()
        return 0


def _put(flight: Flight, news: TokenChunk | GenerationError) -> None:
    stream = flight.stream()
    if stream is not None and (isinstance(news, GenerationError) or news.token_ids or news.finish_reason is not None):
        stream.put(news)


def _disagreement(flight: Flight, completion: Any) -> GenerationError | None:  # noqa: ANN401
    """Compare our counts with vLLM's own, where it has them."""
    theirs = getattr(completion, "weight_versions", None)
    if theirs is None:
        return None
    counted = [[span.version, span.end - span.start] for span in theirs if span.end > span.start]
    if counted == [[str(version), count] for version, count in flight.spans]:
        return None
    return GenerationError(f"versions disagree: we counted {flight.spans} (version, tokens), vLLM {counted}")
