"""Which groups a step takes, and what becomes of a group whose last member is scored.

A group's deadline is `oldest version + eta`, the last step that may train it. Under `wait`, with B groups a step and B only,
it is not enough that a step takes the groups whose deadline it is: those of one later deadline may be more than B. A step
must leave behind, for every later step k', at most `(k' - step) * B` groups due by k' (Hall's condition); admission sees to
it that this can always be done. Taking ready groups earliest deadline first does it whenever it can be done at all, so the
rule is: earliest deadline first, unless too few of those due by some k' are ready; then wait for the others. Proof in
docs/buffer.md.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from asyncrl.algorithms.screening import objection
from asyncrl.buffer.events import BufferInstruction, ScreenLifted, ScreenStands, Wait
from asyncrl.buffer.group import BufferLimits, Group

Aged = tuple[int, int]
"""(oldest version, group id): sorts by deadline, then by order of issue."""


def choose_oldest(ready: Sequence[Aged], groups_per_step: int) -> tuple[int, ...]:
    """Take the oldest B groups (policies `drop` and `mask`), of at least as many; return their ids, ascending."""
    return tuple(sorted(group_id for _, group_id in sorted(ready)[:groups_per_step]))


def choose_by_deadline(
    step: int, ready: Sequence[Aged], unfinished: Sequence[Aged], *, max_staleness: int, groups_per_step: int
) -> tuple[int, ...] | Wait:
    """Take B groups so that every group left can still be trained in time (policy `wait`).

    Args:
        step: The step to take; every pair of `ready` has a deadline of at least `step`.
        ready: Groups that can be taken, at least B.
        unfinished: Groups being generated or scored, with the oldest version they may turn out to have.
        max_staleness: Eta.
        groups_per_step: B.
    """
    # Steps left until the deadline, to groups. Those past it are left out: nobody can wait for them.
    due_ready, due_unfinished = (
        Counter(slack for oldest, _ in groups if (slack := oldest + max_staleness - step) >= 0) for groups in (ready, unfinished)
    )
    num_ready = num_unfinished = 0
    for slack in sorted(due_ready.keys() | due_unfinished.keys()):  # of the others none asks for more than the one before it
        num_ready += due_ready[slack]
        num_unfinished += due_unfinished[slack]
        if num_ready < min(num_ready + num_unfinished - slack * groups_per_step, groups_per_step):
            due = sorted(group_id for oldest, group_id in unfinished if 0 <= oldest + max_staleness - step <= slack)
            groups = f"{len(due)} group{'s' * (len(due) > 1)} not finished yet"
            reason = f"step {step} must leave room for {groups} that must be trained by step {step + slack}"
            return Wait(step, tuple(due), reason if slack else f"step {step} is the last chance of {groups}")
    return choose_oldest(ready, groups_per_step)


def choose(step: int, live: Iterable[Group], num_ready: int, limits: BufferLimits) -> tuple[int, ...] | Wait:
    """Return the groups of `step`, ascending, or what it waits for.

    Args:
        step: The next one.
        live: All running, scoring and ready groups; every ready one is fit for this step.
        num_ready: How many of them are ready. The controller asks often: the groups are gone through only where they are enough.
        limits: B, eta and the policy are read.
    """
    size = limits.groups_per_step
    if num_ready < size:
        return Wait(step, (), f"{num_ready} of {size} groups are ready for step {step}")
    ready, unfinished = list[Aged](), list[Aged]()
    for group in live:
        (ready if group.state == "ready" else unfinished).append((group.oldest, group.group_id))
    if limits.policy != "wait":
        return choose_oldest(ready, size)
    return choose_by_deadline(step, ready, unfinished, max_staleness=limits.max_staleness, groups_per_step=size)


def is_fit(group: Group, step: int, limits: BufferLimits) -> bool:
    """Return whether a ready group has something to train at a step that the bound allows."""
    age = group.newest if limits.policy == "mask" else group.oldest
    return bool(group.trained) and age >= step - limits.max_staleness


class Screening:
    """What becomes of a group whose last member is scored: ready, or dropped because it teaches nothing.

    Without preferences at most `max_resamples` x B groups are dropped in a row; then groups are ready as they come, until the
    screen has no objection to one. A group without a preference pair is never ready, since a step of such groups could not be
    trained. A run that finds no pair goes on sampling, says so at every further `max_resamples` x B, and is ended by the stall
    detector.

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
        judged = group.judged
        group.settle(judged, self._screen)
        reason = objection(judged, self._screen)
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
