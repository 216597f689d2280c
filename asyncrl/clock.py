"""Time as a value that is passed in, so that every decision can be replayed and simulated.

Invariant: `now()` never goes backwards within one process. Production code takes a `Clock`; pure state machines take `now`.
`SystemClock` is anchored to the wall clock once, so that spans of different processes on one machine can be compared.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A clock in seconds, with a way to sleep."""

    def now(self) -> float:
        """Return seconds since the Unix epoch, monotone within the process."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Return once `delay_s` seconds of this clock have passed."""
        ...


class SystemClock:
    """The machine's time: monotonic since its boot, anchored to the wall clock once.

    Args:
        anchor_s: The anchor of another clock on this machine; None: anchored to the wall clock now.
    """

    def __init__(self, anchor_s: float | None = None) -> None:
        now_s = time.time()  # noqa: TID251 - the one place that reads it
        self.anchor_s = now_s - time.monotonic() if anchor_s is None else anchor_s

    def now(self) -> float:
        """Return seconds since the Unix epoch, never going backwards."""
        return self.anchor_s + time.monotonic()

    async def sleep(self, delay_s: float) -> None:
        """Sleep on the running event loop."""
        await asyncio.sleep(delay_s)
