"""The transformers engine: continuous batching in slots over any transformers causal LM, on any machine.

`TransformersEngine` is the asyncio interface: it checks requests, keeps their streams and passes all other work to the one thread
that uses the model. That thread runs the event loop's calls at token boundaries and decodes in between. It sends news in batches,
one `call_soon_threadsafe` each: finished requests at once, and every `_NEWS_INTERVAL_S` the requests with `_NEWS_TOKENS` new
tokens. So short completions arrive whole.

generate/engine.py has the contract. It is implemented in scheduler.py (slots, refill, draws, versions), model.py and kv_cache.py
(forwards of fixed shape).

Invariants:
- Calls (submit, abort, pause, weights, score) are served in order, between two steps.
- An exception in a step ends the thread, and every request with an EngineDied; later calls raise it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from asyncrl.config.generate import TransformersEngineConfig
from asyncrl.config.learner import LoRAConfig
from asyncrl.errors import BroadcastError, EngineDied, GenerationError
from asyncrl.generate.engine import EngineRequest, KVPolicy, RequestRules, TokenStream
from asyncrl.generate.transformers.model import SlotModel
from asyncrl.generate.transformers.scheduler import InFlight, News, SlotDecoder
from asyncrl.weights.tensors import ArrivingTensors, DeferredTensors, Receiver, make_receiver

_NEWS_INTERVAL_S = 0.05
_NEWS_TOKENS = 16

T = TypeVar("T")


_Work = tuple[Callable[[SlotDecoder], Any], "Future[Any] | None"]
"""A call for the thread, and the future for its result if one is awaited."""


class TransformersEngine:
    """See `asyncrl.generate.engine.Engine`.

    Example:
        >>> engine = TransformersEngine(TransformersEngineConfig(), Path("model"))  # doctest: +SKIP
        >>> await engine.start()                                                    # doctest: +SKIP
        >>> async for chunk in engine.submit(request): ...                          # doctest: +SKIP
    """

    def __init__(
        self,
        config: TransformersEngineConfig,
        model_folder: Path,
        *,
        trust_remote_code: bool = False,
        fp32_head: bool = False,
        lora: LoRAConfig | None = None,
    ) -> None:
        """Store what `start` will load; see `SlotModel.load`."""
        self._config = config
        self._load = partial(
            SlotModel.load, model_folder, config, trust_remote_code=trust_remote_code, fp32_head=fp32_head, lora=lora
        )
        self._streams: dict[str, TokenStream] = {}
        self.version, self.has_weights = -1, True
        self.resident: dict[str, int] = {}
        """Bytes of weights and KV cache that are on the device now."""
        self._rules = RequestRules(0, config.max_sequence_tokens)
        self._receiver: Receiver | None = None
        self._wake = threading.Condition()
        """Lock for the next four attributes, which both threads use."""
        self._asked: deque[_Work] = deque()
        self._is_paused = False
        self._is_closing = False
        self._fault: EngineDied | None = None
        self._thread = threading.Thread(target=self._main, name="decode", daemon=True)
        self._started: Future[None] = Future()

    # -- on the event loop -------------------------------------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        """Maximum number of requests that run at once. Raises EngineDied once the decode thread is dead."""
        if self._fault is not None:
            raise EngineDied(str(self._fault))
        return self._config.slots

    @property
    def num_running(self) -> int:
        """Number of submitted and unfinished requests."""
        return len(self._streams)

    async def start(self) -> None:
        """Load the model; see `Engine.start`."""
        try:
            self._loop = asyncio.get_running_loop()
            self._thread.start()
            await asyncio.wrap_future(self._started)
        except BaseException:
            await self.close()
            raise

    def submit(self, request: EngineRequest, news: asyncio.Event | None = None) -> TokenStream:
        """Start a request; see `Engine.submit`."""
        self._rules.check(request, self._streams)
        request_id, flight = request.request_id, InFlight(request, self._rules.stop_ids(request))
        stream = TokenStream(lambda: self.abort(request_id), news)
        self._post(lambda decoder: decoder.submit(flight))
        self._streams[request_id] = stream
        return stream

    def abort(self, request_id: str) -> None:
        """End a request; see `Engine.abort`."""
        if request_id in self._streams:
            with contextlib.suppress(GenerationError):  # closed or dead: the request has ended
                self._post(lambda decoder: self._tell(decoder.abort(request_id)))

    async def pause(self) -> None:
        """Stop at a token boundary; see `Engine.pause`."""
        await self._call(lambda _: setattr(self, "_is_paused", True))

    async def resume(self) -> None:
        """Continue after `pause`."""
        await self._call(lambda _: setattr(self, "_is_paused", False))

    async def sleep(self, kv: KVPolicy = "recompute") -> None:
        """Free memory; see `Engine.sleep`."""
        await self._call(lambda decoder: decoder.sleep(kv))

    async def wake(self) -> None:
        """Allocate memory again after `sleep`."""
        await self._call(SlotDecoder.wake)

    async def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor], kv: KVPolicy) -> float:
        """Replace the weights between two tokens; see `Engine.load_weights`."""
        arriving: ArrivingTensors | None = None
        if isinstance(tensors, DeferredTensors):  # generation continues until the version begins to arrive
            if self._receiver is None:
                self._receiver = make_receiver(tensors.receiver, tensors.arguments)
            device = torch.device(self._config.device)
            arriving = await asyncio.to_thread(ArrivingTensors, self._receiver, tensors.available, device)

        def swap(decoder: SlotDecoder) -> float:
            started_s = time.perf_counter()
            with contextlib.nullcontext(tensors) if arriving is None else contextlib.closing(arriving) as coming:
                decoder.load_weights(version, coming, kv)
            self.version = version
            return (time.perf_counter() - started_s) * 1000

        return await self._call(swap)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the probe's logprobs; see `Engine.score`."""
        return await self._call(lambda decoder: decoder.score(token_ids))

    async def close(self) -> None:
        """End the thread after its current step, and all requests with reason `abort`."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    async def _call(self, act: Callable[[SlotDecoder], T]) -> T:
        done: Future[T] = Future()
        self._post(act, done)
        return await asyncio.wrap_future(done)

    def _post(self, act: Callable[[SlotDecoder], T], done: Future[T] | None = None) -> None:
        """Run `act` in the thread at the next token boundary; returns at once. Raises if the thread has ended."""
        with self._wake:
            if self._is_closing or self._fault is not None:
                raise EngineDied(str(self._fault)) if self._fault is not None else GenerationError("the engine is closed")
            self._asked.append((act, done))
            self._wake.notify()

    def _hear(self, all_news: list[News] | EngineDied) -> None:
        """Pass news to the requests' streams, or the error that ended all of them."""
        if isinstance(all_news, EngineDied):
            all_news = [(request_id, EngineDied(str(all_news))) for request_id in self._streams]
        for request_id, news in all_news:
            self._streams[request_id].put(news)
            if isinstance(news, GenerationError) or news.finish_reason is not None:
                del self._streams[request_id]

    # -- in the thread -----------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        if not self._started.set_running_or_notify_cancel():  # from here on a cancelled start does not cancel it
            return
        try:
            torch.set_num_threads(self._config.num_threads)
            model = self._load()
            self._rules = RequestRules(model.vocabulary_size, self._config.max_sequence_tokens, model.end_ids)
            self.resident = model.resident
            decoder = SlotDecoder(model, self._config.slots)
        except BaseException as error:  # noqa: BLE001 - carried over to `start`, which raises it
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        try:
            self._decode(decoder)
            self._tell(decoder.abort())
        except BaseException as error:  # noqa: BLE001 - the boundary of the thread: a bug here must not leave anyone waiting
            fault = EngineDied(f"the decode loop failed: {type(error).__name__}: {error}")
            fault.__cause__ = error
            with self._wake:
                self._fault = fault
            for _, done in self._asked:
                with contextlib.suppress(InvalidStateError):  # cancelled
                    if done is not None:
                        done.set_exception(fault)
            self._tell(fault)

    def _decode(self, decoder: SlotDecoder) -> None:
        """Serve calls and step, until closed."""
        told_s = time.monotonic()
        while self._serve(decoder):
            if self._is_paused or not decoder.has_work:
                self._tell(decoder.chunks())
                with self._wake:
                    self._wake.wait_for(lambda: self._asked or self._is_closing)
                continue
            news = decoder.step()
            now_s = time.monotonic()
            if now_s - told_s >= _NEWS_INTERVAL_S:
                news += decoder.chunks(_NEWS_TOKENS)
                told_s = now_s
            self._tell(news)

    def _serve(self, decoder: SlotDecoder) -> bool:
        """Run all queued calls; return False when closing."""
        while self._asked:
            act, done = self._asked[0]
            if done is None:
                act(decoder)
            elif done.set_running_or_notify_cancel():
                try:
                    try:
                        result = act(decoder)
                    finally:
                        self.resident, self.has_weights = decoder.model.resident, not decoder.is_torn
                    done.set_result(result)
                except (GenerationError, BroadcastError) as error:
                    done.set_exception(error)
            self._asked.popleft()  # removed only now: if the call raises, it fails together with the waiting ones
        return not self._is_closing

    def _tell(self, news: list[News] | EngineDied) -> None:
        if news:
            with contextlib.suppress(RuntimeError):  # the event loop is closed, and so are all streams
                self._loop.call_soon_threadsafe(self._hear, news)
