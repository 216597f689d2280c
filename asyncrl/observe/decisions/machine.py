"""The one door by which events enter the pure state machines of a run: buffer, lifecycle, phases and scaling.

Invariant: a machine changes by `handle` alone. So what went in, in order and with its time, gives the same instructions again in
another process. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

Event = TypeVar("Event")
Instruction = TypeVar("Instruction")
Watch = Callable[[str, Any, float, "Sequence[Any] | str"], None]
"""(machine, event, now, instructions); in place of instructions the error, where the event could not come."""


class Value(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An event or an instruction; in a recording a row of its name and its fields."""


class Machine(Generic[Event, Instruction]):
    """A pure state machine."""

    name: ClassVar[str]
    """In recordings."""
    watchers: tuple[Watch, ...] = ()
    """Told of every event, once it is decided."""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event in and return what is to be done about it, in order.

        Args:
            event: What happened.
            now: Clock seconds; never less than at the call before.

        Raises:
            AssertionError: The event cannot follow what happened before: a bug of the caller.
        """
        if not self.watchers:
            return self._decide(event, now)
        try:
            instructions = self._decide(event, now)
        except AssertionError as error:
            for watch in self.watchers:
                watch(self.name, event, now, str(error))
            raise
        for watch in self.watchers:
            watch(self.name, event, now, instructions)
        return instructions

    def _decide(self, event: Event, now: float, /) -> list[Instruction]:
        raise NotImplementedError
