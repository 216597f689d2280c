"""The moves of groups as the ledger is told of them, and what goes with them: payloads of ended groups, prompts that return.

Owns the prompts that wait to be issued again. Invariant: with the move that ends a group its payloads go, and its prompt stays
here exactly where the state says that it returns. Called by buffer/buffer.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.buffer.events import BufferInstruction, GroupMoved
from asyncrl.buffer.payloads import Payloads
from asyncrl.buffer.records import MovedRecord
from asyncrl.buffer.state import BufferState
from asyncrl.schema.samples import Prompt


class Moves:
    """Moves of one run's groups.

    Args:
        state: Which prompts return, and how often they failed.
        payloads: Of live groups.
        returned: Prompts that wait to be issued again, by the group that was dropped or failed.
    """

    def __init__(self, state: BufferState, payloads: Payloads, returned: dict[int, Prompt]) -> None:
        self.returned = returned
        self._state = state
        self._payloads = payloads

    def records(self, instructions: Iterable[BufferInstruction], now: float) -> list[MovedRecord]:
        """Return the moves among these instructions, and let go of what belongs to groups that are over."""
        return [self._record(moved, now) for moved in instructions if isinstance(moved, GroupMoved)]

    def _record(self, moved: GroupMoved, now: float) -> MovedRecord:
        returns = -1
        if moved.after in {"dropped", "failed"}:
            prompt = self._payloads.drop_group(moved.group_id)
            returns = self._state.returned.get(moved.group_id, -1)
            if returns >= 0:
                self.returned[moved.group_id] = prompt
        return MovedRecord(moved.group_id, moved.before, moved.after, moved.reason, now, returns)
