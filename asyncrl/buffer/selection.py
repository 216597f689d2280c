"""Which ready groups a step takes, by policy: the rules alone, over (oldest version, group id) pairs.

A group's deadline is `oldest version + eta`, the last step that may train it. Under `wait`, with B groups a step and B only,
it is not enough that a step takes the groups whose deadline it is: those of one later deadline may be more than B. A step
must leave behind, for every later step k', at most `(k' - step) * B` groups due by k' (Hall's condition); admission sees to
it that this can always be done. Taking ready groups earliest deadline first does it whenever it can be done at all, so the
rule is: earliest deadline first, unless too few of those due by some k' are ready; then wait for the others. Proof in
docs/buffer.md.

Pure; called by buffer/ready_groups.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Aged = tuple[int, int]
"""(oldest version, group id): sorts by deadline, then by order of issue."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a step does. At most one of the tuples is non-empty; both empty: not enough is ready."""

    take: tuple[int, ...] = ()
    """Group ids, ascending."""
    wait_for: tuple[int, ...] = ()
    """Unfinished groups without which the step cannot go on."""
    due_by: int = 0
    """With `wait_for`: the step by which they must be trained."""
    missing: int = 0
    """With `wait_for`: how many of them must be done before the step can be taken."""

    def why(self, step: int) -> str:
        """Return in words why `step` waits for `wait_for`."""
        num = len(self.wait_for)
        groups = f"{num} group{'s' * (num > 1)}"
        if self.due_by == step:
            return f"step {step} is the last chance of {groups} not finished yet"
        return f"step {step} must leave room for {groups} not finished yet that must be trained by step {self.due_by}"


def choose_oldest(ready: Sequence[Aged], groups_per_step: int) -> Choice:
    """Take the oldest B groups (policies `drop` and `mask`)."""
    if len(ready) < groups_per_step:
        return Choice()
    return Choice(take=_first(ready, groups_per_step))


def choose_by_deadline(
    step: int, ready: Sequence[Aged], unfinished: Sequence[Aged], *, max_staleness: int, groups_per_step: int
) -> Choice:
    """Take B groups so that every group left can still be trained in time (policy `wait`).

    Args:
        step: The step to take; every pair of `ready` has a deadline of at least `step`.
        ready: Groups that can be taken.
        unfinished: Groups being generated or scored, with the oldest version they may turn out to have.
        max_staleness: Eta.
        groups_per_step: B.
    """
    due_ready = _count_by_slack(ready, step - max_staleness)
    due_unfinished = _count_by_slack(unfinished, step - max_staleness)
    num_ready = num_unfinished = 0
    for slack in range(max(max(due_ready, default=0), max(due_unfinished, default=0)) + 1):
        num_ready += due_ready.get(slack, 0)
        num_unfinished += due_unfinished.get(slack, 0)
        must_take = min(num_ready + num_unfinished - slack * groups_per_step, groups_per_step)
        if num_ready < must_take:
            due = [pair for pair in unfinished if 0 <= pair[0] + max_staleness - step <= slack]
            wait_for = tuple(sorted(group_id for _, group_id in due))
            return Choice(wait_for=wait_for, due_by=step + slack, missing=must_take - num_ready)
    return choose_oldest(ready, groups_per_step)


def _count_by_slack(groups: Sequence[Aged], version_of_last_chance: int) -> dict[int, int]:
    """Return steps left until the deadline to number of groups; those past it are left out: nobody can wait for them."""
    counts: dict[int, int] = {}
    for oldest, _ in groups:
        slack = oldest - version_of_last_chance
        if slack >= 0:
            counts[slack] = counts.get(slack, 0) + 1
    return counts


def _first(ready: Sequence[Aged], count: int) -> tuple[int, ...]:
    return tuple(sorted(group_id for _, group_id in sorted(ready)[:count]))
