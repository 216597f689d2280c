"""Entry of every event of a run's pure state machines (buffer, lifecycle, phases, scaling), where they can be watched.

Invariant: only `handle` changes a machine. So the same events, in order and with their times, give the same instructions in
another process (decisions.py records them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

Event = TypeVar("Event")
Instruction = TypeVar("Instruction")
Watch = Callable[[str, Any, float, "Sequence[Any] | str"], None]
"""(machine, event, now, instructions); the error instead of instructions if the event was not allowed."""


class Value(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An event or an instruction; in a recording it is an array of its name and its fields."""


class Machine(Generic[Event, Instruction]):
    """A pure state machine."""

    name: ClassVar[str]
    """Name in recordings."""
    watchers: tuple[Watch, ...] = ()
    """Functions that receive every event after the machine has decided about it."""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Process one event and return the instructions to carry out, in order.

        Args:
            event: What happened.
            now: Clock seconds; never less than at the previous call.

        Raises:
            AssertionError: The event is not allowed after the events before it, which is a bug of the caller.
        """
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
