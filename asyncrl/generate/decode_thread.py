"""The one thread that touches the model: runs what the event loop asks for at token boundaries, decodes in between.

Owns the thread and the `SlotDecoder` inside it. The event loop hands work over with `call` and gets news back in batches:
requests that ended at once, tokens of running ones every `_NEWS_INTERVAL_S`, one `call_soon_threadsafe` each time.

Invariants:
- Requests (submit, abort, pause, weights, score) are served in the order they were handed over, between two steps.
- An exception in a step ends the thread and every request with an EngineDied; later calls raise it.

Called by generate/transformers_engine.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from asyncrl.errors import BroadcastError, EngineDied, GenerationError
from asyncrl.generate.slot_decoder import Emission, SlotDecoder

_NEWS_INTERVAL_S = 0.05

T = TypeVar("T")


class DecodeThread:
    """A `SlotDecoder` with a thread of its own."""

    def __init__(
        self,
        make_decoder: Callable[[], SlotDecoder],
        on_news: Callable[[list[Emission]], None],
        on_fault: Callable[[EngineDied], None],
    ) -> None:
        """Prepare; nothing runs before `start`.

        Args:
            make_decoder: Loads the model; called in the thread.
            on_news: Called on the event loop that called `start`.
            on_fault: Likewise, once, when the thread can do no more; every request is lost then.
        """
        self._make_decoder = make_decoder
        self._on_news = on_news
        self._on_fault = on_fault
        self._wake = threading.Condition()
        self._asked: deque[tuple[Callable[[SlotDecoder], None], Future[Any]]] = deque()
        self._is_paused = False
        self._is_closing = False
        self._fault: EngineDied | None = None
        self._thread = threading.Thread(target=self._main, name="decode", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started: Future[None] = Future()

    async def start(self) -> None:
        """Start the thread and wait for the model; whatever goes wrong, call `close`.

        Raises:
            GenerationError: It cannot be loaded.
        """
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await asyncio.wrap_future(self._started)

    def post(self, act: Callable[[SlotDecoder], T]) -> Future[T]:
        """Have `act` run in the thread at the next token boundary; thread-safe, returns at once."""
        done: Future[T] = Future()

        def run(decoder: SlotDecoder) -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(act(decoder))
            except (GenerationError, BroadcastError) as error:
                done.set_exception(error)
            except BaseException as error:
                done.set_exception(_death_by(error))
                raise

        with self._wake:
            if self._is_closing or self._fault is not None:
                done.set_exception(self._fault or GenerationError("the engine is closed"))
                return done
            self._asked.append((run, done))
            self._wake.notify()
        return done

    async def call(self, act: Callable[[SlotDecoder], T]) -> T:
        """Like `post`, and wait for the result."""
        return await asyncio.wrap_future(self.post(act))

    @property
    def fault(self) -> EngineDied | None:
        """What the thread died of."""
        return self._fault

    async def set_paused(self, paused: bool) -> None:
        """Stop before the next step, or go on; returns once no forward is running."""

        def act(_: SlotDecoder) -> None:
            self._is_paused = paused

        await self.call(act)

    async def close(self) -> None:
        """End the thread after the step it is in, its requests with reason `abort`."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    def _main(self) -> None:
        if not self._started.set_running_or_notify_cancel():  # from here on a start that is cancelled does not cancel it
            return
        try:
            decoder = self._make_decoder()
        except BaseException as error:  # noqa: BLE001 - carried over to `start`, which raises it
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        try:
            self._decode(decoder)
            self.tell(decoder.abort_all())
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: a bug here must not leave requests hanging
            self._fail(_death_by(error))

    def _decode(self, decoder: SlotDecoder) -> None:
        """Serve and step until closed."""
        told_s = time.monotonic()
        while self._serve(decoder):
            if self._is_paused or not decoder.can_step or not decoder.has_work:
                self.tell(decoder.chunks())
                self._wait()
                continue
            news = decoder.step()
            now_s = time.monotonic()
            if now_s - told_s >= _NEWS_INTERVAL_S:
                news += decoder.chunks()
                told_s = now_s
            self.tell(news)

    def _serve(self, decoder: SlotDecoder) -> bool:
        """Run everything asked for; return False once closing."""
        while True:
            with self._wake:
                if not self._asked:
                    return not self._is_closing
                run, _ = self._asked.popleft()
            run(decoder)

    def _wait(self) -> None:
        with self._wake:
            while not self._asked and not self._is_closing:
                self._wake.wait()

    def _fail(self, fault: EngineDied) -> None:
        with self._wake:
            self._fault = fault
            unserved = list(self._asked)
            self._asked.clear()
        for _, done in unserved:
            if done.set_running_or_notify_cancel():
                done.set_exception(fault)
        self._on_loop(lambda: self._on_fault(fault))

    def tell(self, news: list[Emission]) -> None:
        """Hand news to the event loop; called in the thread."""
        if news:
            self._on_loop(lambda: self._on_news(news))

    def _on_loop(self, act: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop is gone, and so is everyone who could listen
            self._loop.call_soon_threadsafe(act)


def _death_by(error: BaseException) -> EngineDied:
    death = EngineDied(f"the decode loop failed: {type(error).__name__}: {error}")
    death.__cause__ = error
    return death
