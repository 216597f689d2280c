"""What becomes of a group whose last member is scored: ready, or dropped because it teaches nothing.

Owns how many groups in a row the screen objected to. Invariants: without preferences at most `max_resamples` x B are dropped in a
row, then groups are ready as they come, until one comes that the screen likes; a group without a preference pair is never ready,
since a step of such groups could not be trained, now or when it is repeated. So a run of preferences that finds none goes on
sampling, says so at every further `max_resamples` x B, and is ended by the watchdog (control/watchdog.py).

Pure; called by buffer/state.py.
"""

from __future__ import annotations

from asyncrl.algorithms.screening import objection
from asyncrl.buffer.books import BufferLimits
from asyncrl.buffer.events import BufferInstruction, ScreenLifted, ScreenStands
from asyncrl.buffer.group import Group


class Screening:
    """The screen of one run, with its memory.

    Args:
        limits: `screen`, `max_resamples` and `groups_per_step` are read.
    """

    def __init__(self, limits: BufferLimits) -> None:
        self._screen = limits.screen
        self._most = limits.max_resamples * limits.groups_per_step
        self._num_in_row = 0
        """Groups objected to since one was liked; in this process."""

    def judge(self, group: Group) -> tuple[str, list[BufferInstruction]]:
        """Settle a scored group; return why it is to be dropped (nothing: it is ready), and what is to be said about it."""
        group.settle(self._screen)
        reason = objection(group.judged, self._screen)
        self._num_in_row = self._num_in_row + 1 if reason else 0
        if not reason:
            return "", []
        if self._screen.preference is not None:
            due = self._num_in_row % self._most == 0
            return reason, [ScreenStands(group.group_id, reason, self._num_in_row)] if due else []
        if self._num_in_row <= self._most:
            return reason, []
        first = self._num_in_row == self._most + 1
        return "", [ScreenLifted(group.group_id, reason, self._most)] if first else []
