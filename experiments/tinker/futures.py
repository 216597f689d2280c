"""Requests and their answers: the SDK sends a request, gets an id, and asks for the answer until it is there.

A request is known by its id, and worked once however often it is sent. What is wrong with it, or goes wrong, is its answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from wire import RefusedError

from asyncrl.errors import AsyncRLError, first_line

MOST_KNOWN = 16384
"""Requests that are remembered with their answers; the oldest are forgotten."""
Answer = bytes | dict[str, Any]
"""Protobuf, or what becomes JSON."""
log = logging.getLogger(__name__)


class Futures:
    """All requests. Used on the event loop.

    Example:
        >>> futures.begin("model:1", work)                         # doctest: +SKIP
        >>> await futures.answer("model:1", timeout_s=20.0)        # doctest: +SKIP
    """

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._known: dict[str, asyncio.Task[Answer]] = {}

    def begin(self, request_id: str, work: Callable[[], Awaitable[Answer]]) -> None:
        """Work a request beside all others; work is begun in the order of the calls. Said again it is the same request."""
        if request_id not in self._known:
            self._known[request_id] = self._tasks.create_task(_answer(work), name=request_id)
            if len(self._known) > MOST_KNOWN:
                del self._known[next(iter(self._known))]

    async def answer(self, request_id: str, timeout_s: float) -> Answer | None:
        """Return the answer; None where it is not there in time.

        Raises:
            RefusedError: There is no such request, or no more.
        """
        if (task := self._known.get(request_id)) is None:
            raise RefusedError(f"there is no request {request_id[:200]!r}, or no more; send it, and ask for its answer soon", 410)
        done, _ = await asyncio.wait([task], timeout=timeout_s)
        return task.result() if done else None

    def cancel_all(self) -> None:
        """End everything."""
        for task in self._known.values():
            task.cancel()


async def _answer(work: Callable[[], Awaitable[Answer]]) -> Answer:
    try:
        return await work()
    except AsyncRLError as error:
        return {"error": str(error), "category": "user"}
    except Exception as error:
        log.exception("a request failed")
        return {"error": f"the server failed: {type(error).__name__}: {first_line(error)}", "category": "server"}
