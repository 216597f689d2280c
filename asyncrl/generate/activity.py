"""Who may generate when, and for how long nobody did.

`WeightsGate` keeps groups and weight swaps apart where `in_flight_updates` is off; `IdleMeter` measures time without a request,
or asleep.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from asyncrl.clock import Clock


class WeightsGate:
    """Many groups at once, or one swap; a waiting swap goes before groups that have not started.

    Where updates are taken in flight (`is_off`) it holds nobody up.
    """

    def __init__(self, *, is_off: bool) -> None:
        self._is_off = is_off
        self._changed = asyncio.Condition()
        self._num_groups = 0
        self._swap_wanted = False

    @asynccontextmanager
    async def group(self) -> AsyncIterator[None]:
        """Hold off swaps; wait for one that is wanted or under way."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_off or not self._swap_wanted)
            self._num_groups += 1
        try:
            yield
        finally:
            self._num_groups -= 1
            async with self._changed:
                self._changed.notify_all()

    @asynccontextmanager
    async def swap(self) -> AsyncIterator[None]:
        """Hold off new groups and wait until those that run are done."""
        self._swap_wanted = True
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._is_off or self._num_groups == 0)
            yield
        finally:
            self._swap_wanted = False
            async with self._changed:
                self._changed.notify_all()


class IdleMeter:
    """Adds up the time in which nothing ran, and that in which whatever was there stood still."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_running = 0
        self._stands_still = False
        self._since_s = clock.now()
        self._idle_s = 0.0
        self._busy_s = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs now."""
        return self._stands_still or self._num_running == 0

    @property
    def since_s(self) -> float:
        """Clock seconds at which it last became idle or busy."""
        return self._since_s

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count one more thing that runs."""
        self._change(self._num_running + 1, self._stands_still)
        try:
            yield
        finally:
            self._change(self._num_running - 1, self._stands_still)

    def stand_still(self) -> None:
        """Note that nothing goes on until `go_on`, whatever is there."""
        self._change(self._num_running, True)

    def go_on(self) -> None:
        """Note that it does again."""
        self._change(self._num_running, False)

    def totals_s(self) -> tuple[float, float]:
        """Return idle and busy seconds up to now."""
        passed_s = self._clock.now() - self._since_s
        return (self._idle_s + passed_s, self._busy_s) if self.is_idle else (self._idle_s, self._busy_s + passed_s)

    def _change(self, num_running: int, stands_still: bool) -> None:
        was_idle, totals_s = self.is_idle, self.totals_s()
        self._num_running, self._stands_still = num_running, stands_still
        if self.is_idle != was_idle:
            self._idle_s, self._busy_s = totals_s
            self._since_s = self._clock.now()
