"""What every worker of a run does besides its own work: obey orders until Shutdown, send heartbeats, and end.

A worker supplies its loops, a handler of orders, and a report for heartbeats. It ends when its work ends, at the order Shutdown,
or when the connection closes. Then all loops are cancelled. An error in any of them ends the others and is raised alone.
`telling_from_threads` lets a worker's threads send messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TypeVar

import psutil

from asyncrl.clock import Clock
from asyncrl.errors import ConnectionClosed, first_fault
from asyncrl.schema.control import Heartbeat, Message, Shutdown
from asyncrl.transport.protocol import Connection, Delivery, Lane

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

Loop = Coroutine[object, object, None]
Report = Callable[[], tuple[str, Mapping[str, float]]]
"""What the worker waits for (empty: nothing), and its own gauges."""


class Stage:
    """One worker's side of its connection to the controller.

    Example:
        >>> stage = Stage(connection, SystemClock(), "reward-0", 0.5, lambda: ("", {}))  # doctest: +SKIP
        >>> await stage.run(obey, serve_requests())                                      # doctest: +SKIP
    """

    def __init__(self, connection: Connection, clock: Clock, name: str, heartbeat_s: float, report: Report) -> None:
        self.connection, self.name = connection, name
        self.idle = IdleMeter(clock)
        self.was_told_to_end = False
        """The order Shutdown has arrived, so that a connection that closes is no loss."""
        self._clock, self._heartbeat_s, self._report = clock, heartbeat_s, report
        self._process = psutil.Process()

    async def run(self, obey: Callable[[Message], Awaitable[None]], *loops: Loop, work: Loop | None = None) -> bool:
        """Run everything until the end; return False if it ended because the connection closed.

        Args:
            obey: Called with each order, including Shutdown, before the order is acknowledged.
            loops: Loops to run beside the orders.
            work: The worker ends when this ends; None: it ends with the orders.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                orders = self._orders(obey)
                beside = [*loops, self._beat()] if work is None else [*loops, self._beat(), orders]
                background = [tasks.create_task(loop, name=getattr(loop, "__name__", "")) for loop in beside]
                try:
                    await (orders if work is None else work)
                finally:
                    for task in background:
                        task.cancel()
        except BaseExceptionGroup as group:
            fault = first_fault(group)
            if fault is not None:
                raise fault from fault.__cause__  # traceback and cause stay; the groups around it repeat it
            if not self.was_told_to_end:
                log.warning("the connection to the controller is closed: %s", self.connection.closed_reason)
            return False
        return True

    async def requests(self, kind: type[M]) -> AsyncIterator[tuple[M, Delivery]]:
        """Yield the messages of the data lane; the caller must acknowledge each."""
        while True:
            delivery = await self.connection.receive(Lane.DATA)
            if isinstance(delivery.message, kind):
                yield delivery.message, delivery
            else:
                log.warning("%s has no use for %s", self.name, type(delivery.message).__name__)
                delivery.ack()

    async def tell(self, message: Message) -> None:
        """Send a message on the control lane."""
        await self.connection.send(message, Lane.CONTROL)

    async def _orders(self, obey: Callable[[Message], Awaitable[None]]) -> None:
        while True:
            delivery = await self.connection.receive(Lane.CONTROL)
            await obey(delivery.message)
            delivery.ack()
            if isinstance(delivery.message, Shutdown):
                self.was_told_to_end = True
                log.info("shutting down: %s", delivery.message.reason or "asked to")
                return

    async def _beat(self) -> None:
        while True:
            waiting_for, own = self._report()
            idle_s, busy_s = self.idle.totals_s()
            gauges = {
                "process/idle_s": idle_s,
                "process/busy_s": busy_s,
                "process/resident_bytes": float(self._process.memory_info().rss),
                **own,
            }
            beat = Heartbeat(self.name, self._clock.now(), waiting_for, self.idle.since_s if waiting_for else 0.0, gauges)
            self.connection.try_send(beat, Lane.CONTROL)
            await self._clock.sleep(self._heartbeat_s)


@asynccontextmanager
async def telling_from_threads(connection: Connection) -> AsyncIterator[Callable[[Message], None]]:
    """Yield a function, callable from any thread, that sends a message on the control lane; messages keep their order."""
    loop, told = asyncio.get_running_loop(), asyncio.Queue[Message]()

    async def send_told() -> None:
        with suppress(ConnectionClosed):
            while True:
                await connection.send(await told.get(), Lane.CONTROL)

    def tell(message: Message) -> None:
        loop.call_soon_threadsafe(told.put_nowait, message)

    async with asyncio.TaskGroup() as group:
        sending = group.create_task(send_told(), name="told from threads")
        yield tell
        sending.cancel()


class IdleMeter:
    """Adds up idle time, in which nothing ran or running work was stopped, and busy time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_running = 0
        self._stands_still = False
        self.since_s = clock.now()
        """Clock seconds of the last change between idle and busy."""
        self._idle_s = 0.0
        self._busy_s = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether it is idle now."""
        return self._stands_still or self._num_running == 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count one more running task inside the context."""
        self._change(self._num_running + 1, self._stands_still)
        try:
            yield
        finally:
            self._change(self._num_running - 1, self._stands_still)

    def stand_still(self, stands_still: bool) -> None:
        """Note that all work is stopped from now on, even if tasks are running; or that it continues."""
        self._change(self._num_running, stands_still)

    def totals_s(self) -> tuple[float, float]:
        """Return idle and busy seconds up to now."""
        passed_s = self._clock.now() - self.since_s
        return (self._idle_s + passed_s, self._busy_s) if self.is_idle else (self._idle_s, self._busy_s + passed_s)

    def _change(self, num_running: int, stands_still: bool) -> None:
        was_idle, totals_s = self.is_idle, self.totals_s()
        self._num_running, self._stands_still = num_running, stands_still
        if self.is_idle != was_idle:
            self._idle_s, self._busy_s = totals_s
            self.since_s = self._clock.now()
