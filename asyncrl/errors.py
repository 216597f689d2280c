"""Every error that a user of asyncrl can see, classified once, at the boundary where it happens.

Wrong input is `ConfigError`. A broken invariant inside asyncrl is an `AssertionError` (a bug, never caught). Errors from the
outside world use the other classes. A message says what happened, the numbers, what is allowed, and what to do.
"""

from __future__ import annotations

import os
import traceback
from pathlib import Path

MOST_TRACE_CHARS = 4000
"""Maximum length of a traceback in a message; its end is kept."""
_STANDARD_LIBRARY = str(Path(os.__file__).parent)


class AsyncRLError(Exception):
    """Base of every error that asyncrl raises on purpose."""


class ConfigError(AsyncRLError, ValueError):
    """The user asked for something that is not possible: the message names the field, the value and what is allowed."""


class GenerationError(AsyncRLError):
    """An engine could not serve a request or take new weights."""


class EngineConfigError(GenerationError, ConfigError):
    """An engine cannot run this model with these settings, however often it is started."""


class EngineDied(GenerationError):  # noqa: N818 - like ConnectionClosed
    """An engine cannot work any more: its process ends too; its requests in flight do not fail but are handed out again."""


class RewardError(AsyncRLError):
    """A reward could not be computed; the sample fails with this reason and the run continues."""


class TransportError(AsyncRLError):
    """A channel could not be opened, or a peer refused or broke the protocol."""


class ConnectionClosed(TransportError):  # noqa: N818 - an ending, and often no error
    """The other end of a connection is gone; the caller must hand out again what was not acknowledged."""


class CodecError(TransportError):
    """Bytes that are not a message of this protocol: truncated, oversized, of an unknown type or version."""


class BroadcastError(AsyncRLError):
    """A weight version could not be published or fetched, or its fingerprint did not match."""


class ResidencyError(AsyncRLError):
    """A component could not be moved to where a phase needs it: no room on the device, in host memory or on disk."""


class LearnerError(AsyncRLError):
    """A step could not be trained (for example, a non-finite loss); the message names the file of the saved batch."""


class LedgerError(AsyncRLError):
    """The ledger on disk cannot be used as it is (locked by another run, of another schema, damaged)."""


class LaunchError(AsyncRLError):
    """A process could not be started, or died more often than the config allows."""


class AlreadyRunsError(LaunchError):
    """The run to be started has a live controller already, or another process is starting it."""


class RunError(AsyncRLError):
    """A run ended without reaching its goal; the message is the recorded reason."""


class RunLostError(RunError):
    """The run does not answer any more: its controller is gone, or cannot be reached."""


def leaves(error: BaseException) -> list[BaseException]:
    """Return the errors inside nested exception groups, in order; for any other error, the error itself."""
    return [each for inner in error.exceptions for each in leaves(inner)] if isinstance(error, BaseExceptionGroup) else [error]


def first_fault(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    """Return the first exception in an exception group that is not a ConnectionClosed, or None."""
    return next((each for each in leaves(group) if not isinstance(each, ConnectionClosed)), None)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def kind_of(error: BaseException) -> str:
    """Return the type and place of an error, `TypeError at rewards.py:12`, by which failures are counted.

    The place is the innermost line outside installed packages and the standard library, or else the innermost line of all.
    """
    frames = traceback.extract_tb(error.__traceback__)
    elsewhere = (_STANDARD_LIBRARY, "<")
    own = [each for each in frames if not each.filename.startswith(elsewhere) and "site-packages" not in each.filename]
    place = next(reversed(own or list(frames)), None)
    name = type(error).__name__
    return f"{name} at {Path(place.filename).name}:{place.lineno}" if place is not None else name


def shown(text: str, most: int = MOST_TRACE_CHARS) -> str:
    """Return the end of a process's or model's output, without control characters, to be shown on a terminal."""
    return "".join(each if each.isprintable() or each in "\n\t" else "?" for each in text[-most:])


def trace_of(error: BaseException) -> str:
    """Return the traceback as text of UTF-8, at most its last `MOST_TRACE_CHARS` characters."""
    return "".join(traceback.format_exception(error))[-MOST_TRACE_CHARS:].encode("utf-8", "replace").decode()
