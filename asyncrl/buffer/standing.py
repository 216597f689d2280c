"""The standing answer to a step that could not be taken, and what must happen before it is worth asking again.

The controller asks after every sample, and to look through all groups each time costs more the larger the run is. But an answer
holds until something changes it: `NotEnough` until so many more groups are ready, `Wait` until so many of those it names are done
with. What could change it in another way (a group's age, a placement, a restart) makes it void.

Pure; called by buffer/ready_groups.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.buffer.events import NotEnough, Wait


@dataclass(slots=True)
class StandingAnswer:
    """What the last question was answered with."""

    answer: NotEnough | Wait
    missing: int
    """Groups that must be ready (`NotEnough`), or done with among those waited for (`Wait`), before the answer can change."""
    _among: dict[int, None] | None = field(init=False)
    """Those waited for that are not done with; None: any group counts."""
    _is_current: bool = True

    def __post_init__(self) -> None:
        """Note whom it waits for."""
        self._among = dict.fromkeys(self.answer.group_ids) if isinstance(self.answer, Wait) else None

    def names(self, group_id: int) -> bool:
        """Return whether it waits for this very group."""
        return self._among is not None and group_id in self._among

    def group_done(self, group_id: int, *, is_ready: bool) -> None:
        """Note that an unfinished group became ready, or ended."""
        if self._among is None:
            self.missing -= is_ready
        elif group_id in self._among:
            del self._among[group_id]
            self.missing -= 1
        else:
            return
        self._is_current = False

    def holds_for(self, step: int) -> bool:
        """Return whether `step` would be answered the same."""
        return self.answer.step == step and self.missing > 0

    def now(self) -> NotEnough | Wait:
        """Return the answer with the numbers of this moment."""
        if not self._is_current:
            self._is_current = True
            if isinstance(self.answer, NotEnough):
                self.answer = NotEnough(self.answer.step, self.answer.need - self.missing, self.answer.need)
            else:
                self.answer = Wait(self.answer.step, tuple(self._among or ()), self.answer.reason)
        return self.answer
