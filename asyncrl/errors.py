"""Every error a user of asyncrl can meet, classified once, at the boundary where it happens.

Wrong input is `ConfigError`. A broken invariant inside asyncrl is an `AssertionError` (a bug, never caught). Everything the
outside world does to us is one of the other classes. A message says what happened, the numbers, what is allowed, what to do.
"""

from __future__ import annotations

import os
import traceback
from pathlib import Path

MOST_TRACE_CHARS = 4000
"""Of a traceback that travels; its end is kept."""
_STANDARD_LIBRARY = str(Path(os.__file__).parent)


class AsyncRLError(Exception):
    """Base of every error that asyncrl raises on purpose."""


class ConfigError(AsyncRLError, ValueError):
    """The user asked for something that cannot be: the message names the field, the value, what is allowed."""


class GenerationError(AsyncRLError):
    """An engine could not serve a request or take new weights."""


class EngineDied(GenerationError):  # noqa: N818 - like ConnectionClosed
    """An engine can serve nothing any more: its process ends with it; what it had in flight is handed out again, not failed."""


class RewardError(AsyncRLError):
    """A reward could not be computed; the sample is failed with this reason and the run goes on."""


class TransportError(AsyncRLError):
    """A channel could not be opened, or a peer refused or broke the protocol."""


class ConnectionClosed(TransportError):  # noqa: N818 - an ending, and often no error
    """The other end of a connection is gone; whatever it had not acknowledged is the caller's to hand out again."""


class CodecError(TransportError):
    """Bytes that are not a message of this protocol: truncated, oversized, of an unknown type or version."""


class BroadcastError(AsyncRLError):
    """A weight version could not be published or fetched, or its fingerprint did not match."""


class ResidencyError(AsyncRLError):
    """A component could not be brought where a phase needs it: no room on the device, in host memory or on disk."""


class LearnerError(AsyncRLError):
    """A step could not be taken (non-finite loss, say); the batch is saved where the message says."""


class LedgerError(AsyncRLError):
    """The ledger on disk cannot be used as it is (locked by another run, of another schema, damaged)."""


class LaunchError(AsyncRLError):
    """A process could not be started, or died more often than the config allows."""


class AlreadyRunsError(LaunchError):
    """The run that is to be started has a controller that lives, or another process is starting it."""


class RunError(AsyncRLError):
    """A run ended without reaching its goal; the message is the recorded reason."""


class RunLostError(RunError):
    """The run does not answer any more: its controller is gone, or not to be reached."""


def leaves(error: BaseException) -> list[BaseException]:
    """Return the errors inside nested task groups' exceptions, in order; of any other error itself."""
    return [each for inner in error.exceptions for each in leaves(inner)] if isinstance(error, BaseExceptionGroup) else [error]


def first_fault(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    """Return the first exception in a task group's that is not a connection's end, or None."""
    return next((each for each in leaves(group) if not isinstance(each, ConnectionClosed)), None)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def kind_of(error: BaseException) -> str:
    """Return the type and place of an error, `TypeError at rewards.py:12`: what failures are counted by.

    The place is the innermost line that is in no installed package and not in the standard library, else the innermost of all.
    """
    frames = traceback.extract_tb(error.__traceback__)
    elsewhere = (_STANDARD_LIBRARY, "<")
    own = [each for each in frames if not each.filename.startswith(elsewhere) and "site-packages" not in each.filename]
    place = next(reversed(own or list(frames)), None)
    name = type(error).__name__
    return f"{name} at {Path(place.filename).name}:{place.lineno}" if place is not None else name


def shown(text: str, most: int = MOST_TRACE_CHARS) -> str:
    """Return what a process or a model said as it can be put on a terminal: its end, without control characters."""
    return "".join(each if each.isprintable() or each in "\n\t" else "?" for each in text[-most:])


def trace_of(error: BaseException) -> str:
    """Return the traceback as text of UTF-8, at most its last `MOST_TRACE_CHARS` characters."""
    return "".join(traceback.format_exception(error))[-MOST_TRACE_CHARS:].encode("utf-8", "replace").decode()
