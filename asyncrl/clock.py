"""Time as a value that is handed in, so that every decision can be replayed and simulated.

Invariant: `now()` never goes backwards within one process. Production code takes a `Clock`; pure state machines take `now`.
`SystemClock` is anchored to the wall clock once, so that spans of different processes of one machine can be laid side by side.
"""

from __future__ import annotations

import asyncio
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
    """The machine's time: monotonic since its boot, anchored to the wall clock once.

    Args:
        anchor_s: Of another clock of this machine; None: what the wall clock says now is kept to.
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
