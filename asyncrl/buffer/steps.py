"""The steps taken and not forgotten, and what becomes of them: trained, repeated, forgotten.

Owns their records. Invariants: steps are entered in order, without a gap; a step keeps its groups for ever, so that it can be
repeated after the learner died; only trained steps are forgotten. Which groups a step takes is decided in buffer/ready_groups.py.
Pure; called by buffer/state.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from asyncrl.buffer.books import StepRecord
from asyncrl.buffer.events import GroupMoved, TakeGroups


class TakenSteps:
    """Records of steps, by step."""

    def __init__(self) -> None:
        self.records: dict[int, StepRecord] = {}
        """Taken and trained steps that may still be repeated."""
        self.next_step = 0
        """Steps taken so far; the next new one."""
        self._num_forgotten_groups = 0

    @property
    def num_groups(self) -> tuple[int, int]:
        """Return how many groups are taken and how many trained, those of forgotten steps included."""
        sizes = Counter[bool]()
        for record in self.records.values():
            sizes[record.trained] += len(record.group_ids)
        return sizes[False], sizes[True] + self._num_forgotten_groups

    @property
    def group_ids(self) -> set[int]:
        """Return the groups of all records."""
        return {group_id for record in self.records.values() for group_id in record.group_ids}

    def restore(self, records: Iterable[StepRecord], *, forgotten_steps: int, groups_per_step: int) -> None:
        """Fill an empty book from a ledger."""
        self.records = {record.step: record for record in records}
        self.next_step = max(self.records, default=forgotten_steps - 1) + 1
        self._num_forgotten_groups = forgotten_steps * groups_per_step

    def enter(self, record: StepRecord) -> None:
        """Note the next step."""
        self.records[record.step] = record
        self.next_step += 1

    def to_repeat(self) -> tuple[int, ...]:
        """Return the steps taken and not (or no longer) trained, in order."""
        return tuple(step for step, record in sorted(self.records.items()) if not record.trained)

    def repeat(self, step: int) -> TakeGroups:
        """Return the very groups of a step that was taken before."""
        record = self.records.get(step)
        assert record is not None, f"step {step} cannot be repeated: steps before {min(self.records, default=0)} are forgotten"
        assert not record.trained, f"step {step} is trained; it is repeated only after LearnerRestarted"
        return TakeGroups(step, record.group_ids, record.mask_below, replay=record.trained_before, repeat=True)

    def mark_trained(self, step: int) -> list[GroupMoved]:
        """Note that a step is done; return its groups' moves, none where that was known."""
        record = self.records.get(step)
        if record is None:
            assert step < self.next_step, f"step {step} was never taken; {self.next_step} is next"
            return []
        moved = [] if record.trained else [GroupMoved(group_id, "taken", "trained") for group_id in record.group_ids]
        record.trained = record.trained_before = True
        return moved

    def go_back_to(self, version: int) -> None:
        """Note that the learner stands at `version`: what comes before it is trained, what comes after is not."""
        assert version <= self.next_step, f"the learner stands at version {version}, but only {self.next_step} steps were taken"
        first = min(self.records, default=self.next_step)
        assert version >= first, f"the learner stands at version {version}, but steps before {first} are forgotten"
        for step in range(first, version):
            self.records[step].trained = self.records[step].trained_before = True
        for step in range(version, self.next_step):
            self.records[step].trained = False

    def forget(self, before_step: int) -> None:
        """Let go of the records before a step."""
        for step in [step for step in self.records if step < before_step]:
            assert self.records[step].trained, f"step {step} is taken and not trained; it cannot be forgotten"
            self._num_forgotten_groups += len(self.records.pop(step).group_ids)
