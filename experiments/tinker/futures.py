"""Requests and their answers: the SDK sends a request, gets an id, and asks for the answer until it is there.

A request is known by its id, and worked once however often it is sent. What is wrong with it, or goes wrong, is its answer.
Invariant: the oldest answers are forgotten where there are too many, and all of a session when it ends; no other request is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from wire import RefusedError

from asyncrl.errors import AsyncRLError, EngineDied, GenerationError, first_line

MOST_ANSWERS, MOST_ANSWER_BYTES = 16384, 256 << 20
"""What is kept of answers; the newest is kept in any case."""
MOST_WAITING_BYTES = 512 << 20
"""Of what requests say that are not answered yet; one alone may be larger."""
MOST_CHARS = 1000
"""Of an error, which may quote what a client has sent."""
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
        self._running: set[asyncio.Task[Answer]] = set()
        self._sizes_bytes: dict[str, int] = {}
        """Of the answers that are there, the oldest first."""
        self._num_bytes = self._waiting_bytes = 0

    def begin(self, request_id: str, work: Callable[[], Awaitable[Answer]], num_bytes: int = 0) -> None:
        """Work a request of this size beside all others; work is begun in the order of the calls. Said again it is the same.

        Raises:
            RefusedError: Requests that wait hold too much; the SDK sends this one again.
        """
        if request_id in self._known:
            return
        if self._waiting_bytes and self._waiting_bytes + num_bytes > MOST_WAITING_BYTES:
            raise RefusedError(f"requests that wait hold {self._waiting_bytes >> 20} MiB: send this one later", 429)

        def done(task: asyncio.Task[Answer]) -> None:
            self._running.discard(task)
            self._waiting_bytes -= num_bytes

        self._waiting_bytes += num_bytes
        self._known[request_id] = task = self._tasks.create_task(self._worked(request_id, work), name=request_id)
        self._running.add(task)
        task.add_done_callback(done)

    async def answer(self, request_id: str, timeout_s: float) -> Answer | None:
        """Return the answer; None where it is not there in time.

        Raises:
            RefusedError: There is no such request, or no more.
        """
        if (task := self._known.get(request_id)) is None:
            raise RefusedError(f"there is no request {request_id[:200]!r}, or no more; send it, and ask for its answer soon", 410)
        done, _ = await asyncio.wait([task], timeout=timeout_s)
        return task.result() if done else None

    def forget(self, session: str) -> None:
        """Forget a session's requests. Those that are running end as they would, and their answers are not kept."""
        for request_id in [one for one in self._known if one.startswith(f"{session}:")]:
            self._drop(request_id)

    def cancel_all(self) -> None:
        """End everything."""
        for task in list(self._running):
            task.cancel()

    async def _worked(self, request_id: str, work: Callable[[], Awaitable[Answer]]) -> Answer:
        answer = await _answer(work)
        if request_id in self._known:
            self._sizes_bytes[request_id] = size = len(answer) if isinstance(answer, bytes) else 0
            self._num_bytes += size
            while len(self._sizes_bytes) > MOST_ANSWERS or (self._num_bytes > MOST_ANSWER_BYTES and len(self._sizes_bytes) > 1):
                self._drop(next(iter(self._sizes_bytes)))
        return answer

    def _drop(self, request_id: str) -> None:
        del self._known[request_id]
        self._num_bytes -= self._sizes_bytes.pop(request_id, 0)


async def _answer(work: Callable[[], Awaitable[Answer]]) -> Answer:
    try:
        return await work()
    except AsyncRLError as error:
        is_of_user = isinstance(error, RefusedError | GenerationError) and not isinstance(error, EngineDied)
        if not is_of_user:
            log.warning("a request failed: %s", error)
        return {"error": str(error)[:MOST_CHARS], "category": "user" if is_of_user else "server"}
    except Exception as error:
        log.exception("a request failed")
        return {"error": f"the server failed: {type(error).__name__}: {first_line(error)}"[:MOST_CHARS], "category": "server"}
