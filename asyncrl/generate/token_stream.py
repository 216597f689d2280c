"""A request's stream: chunks put in by an engine, taken out by one consumer, on one event loop.

Bounded by the request's own `max_new_tokens`: chunks that nobody took yet are the request's tokens, never more.
Called by every engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from asyncrl.errors import GenerationError
from asyncrl.generate.engine import TokenChunk


class TokenStream:
    """The async iterator that `Engine.submit` returns; closing it early aborts the request."""

    def __init__(self, on_early_close: Callable[[], None]) -> None:
        self._on_early_close = on_early_close
        self._ready: deque[TokenChunk | GenerationError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_complete = False
        self._is_closed = False

    def put(self, news: TokenChunk | GenerationError) -> None:
        """Hand the consumer a chunk, or the error that the stream ends with."""
        if self._is_complete:
            return
        self._is_complete = isinstance(news, GenerationError) or news.finish_reason is not None
        self._ready.append(news)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> TokenStream:
        """Return the stream itself."""
        return self

    async def __anext__(self) -> TokenChunk:
        """Return the next chunk.

        Raises:
            GenerationError: The engine could not finish the request.
        """
        while not self._ready:
            if self._is_complete or self._is_closed:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        news = self._ready.popleft()
        if isinstance(news, GenerationError):
            raise news
        return news

    async def aclose(self) -> None:
        """Abort the request unless it is complete; nothing more comes out."""
        self._close()

    def _close(self) -> None:
        if not self._is_closed and not self._is_complete:
            self._on_early_close()
        self._is_closed = True
        self._ready.clear()

    def __del__(self) -> None:
        """Abort a request whose stream was dropped half-way, as `break` out of an `async for` does."""
        self._close()
