"""Which groups a step takes: the rules, the ready groups, and what becomes of a group whose last member is scored.

A group's deadline is `oldest version + eta`, the last step that may train it. Under `wait`, with B groups a step and B only,
it is not enough that a step takes the groups whose deadline it is: those of one later deadline may be more than B. A step
must leave behind, for every later step k', at most `(k' - step) * B` groups due by k' (Hall's condition); admission sees to
it that this can always be done. Taking ready groups earliest deadline first does it whenever it can be done at all, so the
rule is: earliest deadline first, unless too few of those due by some k' are ready; then wait for the others. Proof in
docs/buffer.md.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from asyncrl.algorithms.screening import objection
from asyncrl.buffer.events import BufferInstruction, NotEnough, ScreenLifted, ScreenStands, Wait
from asyncrl.buffer.group import BufferLimits, Group

Aged = tuple[int, int]
"""(oldest version, group id): sorts by deadline, then by order of issue."""


class Choice(msgspec.Struct, frozen=True):
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
    return Choice(take=tuple(sorted(group_id for _, group_id in sorted(ready)[:groups_per_step])))


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
    for slack in sorted(due_ready.keys() | due_unfinished.keys()):  # of the others none asks for more than the one before it
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


class ReadyGroups:
    """The groups that are ready, and the answer that stands while the next step must wait.

    The controller asks after every sample, and looking through all groups each time costs more the larger the run is. So an
    answer stands until something can change it: `too few are ready` until so many more are, `certain groups are waited for` until
    so many of them are done with. A group's age, a placement or a restart makes it void.

    Invariants (`check`): it holds exactly the live groups that are ready; while an answer stands, a fresh look at all groups
    would find no step either.

    Args:
        limits: B, eta and the policy are read.
    """

    def __init__(self, limits: BufferLimits) -> None:
        self._limits = limits
        self._ready: dict[int, Group] = {}
        self._unexamined: dict[int, Group] = {}
        """Became ready since unfit groups were last looked for."""
        self._examined_step = -1
        self._answered_step = -1
        self._missing = 0
        """How many groups must still be ready, or done with of those waited for; 0: no answer stands."""
        self._waited_for: dict[int, None] | None = None
        """None: any group that becomes ready counts."""
        self._why = ""

    @property
    def count(self) -> int:
        """Return how many groups are ready."""
        return len(self._ready)

    def restore(self, groups: Iterable[Group]) -> None:
        """Fill an empty machine."""
        self._ready = {group.group_id: group for group in groups}

    def add(self, group: Group) -> None:
        """Take in a group that became ready."""
        self._ready[group.group_id] = self._unexamined[group.group_id] = group
        self._done_with(group.group_id, is_ready=True)

    def ended(self, group_id: int) -> None:
        """Note that a live group, ready or not, was dropped or failed."""
        if self._ready.pop(group_id, None) is not None:
            self._missing = 0
        else:
            self._done_with(group_id, is_ready=False)

    def _done_with(self, group_id: int, *, is_ready: bool) -> None:
        if self._waited_for is None:
            self._missing -= is_ready
        elif group_id in self._waited_for:
            del self._waited_for[group_id]
            self._missing -= 1

    def grew_older(self, group_id: int) -> None:
        """Note that an unfinished group turned out to be of another age than it seemed."""
        if self._waited_for is not None and group_id in self._waited_for:
            self._missing = 0

    def bound_by(self, limits: BufferLimits) -> None:
        """Follow other bounds from now on."""
        self._limits = limits
        self.look_again(examine_all=True)

    def look_again(self, *, examine_all: bool) -> None:
        """Give no answer from memory; with `examine_all`, look for unfit groups among all that are ready."""
        self._missing = 0
        if examine_all:
            self._examined_step = -1

    def unfit(self, step: int) -> list[Group]:
        """Return the ready groups that cannot be trained at `step` without breaking the bound; each is told of once.

        So is a group without a pair, which became ready before a resume that asks for preferences.
        """
        unexamined = self._unexamined if step == self._examined_step else self._ready
        unfit = [group for group in unexamined.values() if group.group_id in self._ready and not self.is_fit(group, step)]
        self._unexamined, self._examined_step = {}, step
        return unfit

    def choose(self, step: int, live: Mapping[int, Group]) -> tuple[int, ...] | NotEnough | Wait:
        """Return the groups of `step`, ascending, or what it waits for; call `unfit` before.

        Args:
            step: The next one.
            live: All running, scoring and ready groups.
        """
        if self._answered_step != step or self._missing <= 0:
            choice = self._choice(step, self._ready.values(), live)
            if choice.take:
                self._missing = 0
                return choice.take
            self._answered_step = step
            self._waited_for = dict.fromkeys(choice.wait_for) if choice.wait_for else None
            self._missing = choice.missing or self._limits.groups_per_step - len(self._ready)
            self._why = choice.why(step)
        if self._waited_for is None:
            return NotEnough(step, self._limits.groups_per_step - self._missing, self._limits.groups_per_step)
        return Wait(step, tuple(self._waited_for), self._why)

    def take(self, group_ids: tuple[int, ...]) -> list[Group]:
        """Give these groups away, in this order."""
        return [self._ready.pop(group_id) for group_id in group_ids]

    def check(self, next_step: int, live: Mapping[int, Group]) -> None:
        """Raise AssertionError where it holds other groups than the ready ones, or a standing answer is out of date."""
        assert self._ready.keys() == {group.group_id for group in live.values() if group.state == "ready"}, "ready is not"
        if self._answered_step != next_step or self._missing <= 0:
            return
        fit = [group for group in self._ready.values() if self.is_fit(group, next_step)]
        choice = self._choice(next_step, fit, live)
        assert not choice.take, f"step {next_step} could take {choice.take} and is told to wait for {self._missing} groups"

    def _choice(self, step: int, ready: Iterable[Group], live: Mapping[int, Group]) -> Choice:
        limits, aged = self._limits, _aged(ready)
        if limits.policy != "wait":
            return choose_oldest(aged, limits.groups_per_step)
        unfinished = _aged(group for group in live.values() if group.state != "ready")
        return choose_by_deadline(
            step, aged, unfinished, max_staleness=limits.max_staleness, groups_per_step=limits.groups_per_step
        )

    def is_fit(self, group: Group, step: int) -> bool:
        """Return whether a group has something to train at a step that the bound allows."""
        age = group.newest if self._limits.policy == "mask" else group.oldest
        return bool(group.trained) and age >= step - self._limits.max_staleness


def _aged(groups: Iterable[Group]) -> list[Aged]:
    return [(group.oldest, group.group_id) for group in groups]


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
