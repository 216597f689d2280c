"""The second implementation of `Clock`."""

import asyncio
from operator import itemgetter


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
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        """Return the seconds it was last advanced to."""
        return self._now_s

    async def sleep(self, delay_s: float) -> None:
        """Wait until `advance` has moved past the moment asked for."""
        if delay_s <= 0:
            await asyncio.sleep(0)
            return
        wake = asyncio.get_running_loop().create_future()
        self._sleepers = sorted([*self._sleepers, (self._now_s + delay_s, wake)], key=itemgetter(0))
        await wake

    def advance(self, delta_s: float) -> None:
        """Move time forward by `delta_s` seconds and wake whoever is due, in order."""
        self._now_s += delta_s
        while self._sleepers and self._sleepers[0][0] <= self._now_s:
            _, wake = self._sleepers.pop(0)
            if not wake.done():
                wake.set_result(None)
