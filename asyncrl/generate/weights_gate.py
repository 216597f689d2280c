"""Keeps groups and weight swaps apart where `in_flight_updates` is off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


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
