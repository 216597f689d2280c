"""How a stage's process ends: with an exit code, and where it cannot go on with a word to the controller about why.

Invariant: what would only come again after a restart (wrong config, a learner that cannot go on), or be passed over by it (a
model that was exchanged), is a fatal fault; the run ends.
Called by pipeline.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Awaitable, Iterator
from typing import NoReturn

from asyncrl.errors import ConfigError, ConnectionClosed, LearnerError, ModelChangedError
from asyncrl.schema.control import Fault
from asyncrl.transport.channel import Connection, Lane

log = logging.getLogger("asyncrl")

EXIT_OK, EXIT_FAILED, EXIT_WRONG_INPUT, EXIT_FAULT = 0, 1, 2, 3
_FATAL = (ConfigError, LearnerError, ModelChangedError)
TELL_S = 2.0
"""For the controller to be told."""


async def to_its_end(work: Awaitable[None], name: str, connection: Connection) -> int:
    """Await a stage's work and return the exit code; why it cannot go on is told to the controller."""
    try:
        await work
    except ConnectionClosed:
        log.info("the controller is gone")
    except Exception as error:  # noqa: BLE001 - the boundary of a process: whatever it was is told, logged, and ends it
        await _report_fault(name, error, connection)
        return EXIT_FAULT
    return EXIT_OK


def leave(code: int) -> NoReturn:
    """End at once: tearing down an interpreter that has imported torch takes 0.7 s, vLLM seconds, and it frees nothing."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _report_fault(name: str, error: Exception, connection: Connection) -> None:
    causes = list(_leaves(error))
    if all(isinstance(cause, ConnectionClosed) for cause in causes):
        log.info("the controller is gone")
        return
    log.error("%s cannot go on", name, exc_info=error)
    reason = "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes)
    fatal = any(isinstance(cause, _FATAL) for cause in causes)
    with contextlib.suppress(ConnectionClosed, TimeoutError):
        async with asyncio.timeout(TELL_S):
            await connection.send(Fault(name, reason, fatal=fatal), Lane.CONTROL)
            await connection.flush(TELL_S)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors inside nested task groups' exceptions."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
