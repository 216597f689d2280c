"""Time as a value that is handed in, so that every decision can be replayed and simulated.

Invariant: `now()` never goes backwards within one process. Production code takes a `Clock`; pure state machines take `now`.
`SystemClock` is anchored to the wall clock once, so that spans of different processes of one machine can be laid side by side.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds, and a way to wait for some."""

    def now(self) -> float:
        """Return seconds since the Unix epoch, monotone within the process."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Return once `delay_s` seconds of this clock have passed."""
        ...


class SystemClock:
    """The machine's time: monotonic, anchored to the wall clock when the process first asked."""

    def __init__(self) -> None:
        self._anchor_s = time.time() - time.monotonic()  # noqa: TID251 - the one place that reads it

    def now(self) -> float:
        """Return seconds since the Unix epoch, never going backwards."""
        return self._anchor_s + time.monotonic()

    async def sleep(self, delay_s: float) -> None:
        """Sleep on the running event loop."""
        await asyncio.sleep(delay_s)


class VirtualClock:
    """A clock that moves only when told to.

    Example:
        >>> clock = VirtualClock()
        >>> clock.advance(2.5)
        >>> clock.now()
        2.5
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        """Return the seconds it was last advanced to."""
        return self._now_s

    async def sleep(self, delay_s: float) -> None:
        """Wait until `advance` has moved past the moment asked for."""
        if delay_s <= 0:
            await asyncio.sleep(0)
            return
        wake = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + delay_s, next(self._order), wake))
        await wake

    def advance(self, delta_s: float) -> None:
        """Move time forward by `delta_s` seconds and wake whoever is due, in order."""
        self._now_s += delta_s
        while self._sleepers and self._sleepers[0][0] <= self._now_s:
            _, _, wake = heapq.heappop(self._sleepers)
            if not wake.done():
                wake.set_result(None)
