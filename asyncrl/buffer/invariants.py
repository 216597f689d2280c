"""What must be true of a group and of the steps after every event; checked in tests, at every step, and after a resume."""

from __future__ import annotations

from asyncrl.buffer.books import BufferLimits, StepRecord
from asyncrl.buffer.group import Group


def check_group(group: Group, story: str) -> None:
    """Raise AssertionError, with the group's recent story, where its state is not that of its members."""
    told = f"{group}\n{story}"
    assert len(group.members) == group.size, told
    assert len(group.version_counts) == group.size, told
    if group.state == "running":
        assert group.pending, told
        return
    assert not group.pending, told
    if group.state == "scoring":
        assert group.unscored, told
        return
    assert group.state == "ready", told
    assert group.scored, told
    assert not group.unscored, told
    assert group.trained is not None, told
    assert set(group.trained) <= set(group.scored), told


def check_steps(steps: dict[int, StepRecord], next_step: int, limits: BufferLimits) -> None:
    """Raise AssertionError where steps have a gap, share a group, or are not of B groups.

    Steps taken before a resume may be older than eta is now; what is taken is checked against it at the take.
    """
    assert sorted(steps) == list(range(next_step - len(steps), next_step)), f"steps {sorted(steps)}, next is {next_step}"
    group_ids = [group_id for record in steps.values() for group_id in record.group_ids]
    assert len(set(group_ids)) == len(group_ids), "a group is in two steps"
    for record in steps.values():
        assert len(record.group_ids) == limits.groups_per_step, f"{record} has not {limits.groups_per_step} groups"
        assert record.max_staleness >= 0, f"{record} trained a version that did not exist"
