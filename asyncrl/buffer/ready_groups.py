"""The ready groups: which of them the next step takes, which have grown too old, and the answer that stands while it must wait.

Owns the groups that are ready and the standing answer (buffer/standing.py). Invariants (`check`): it holds exactly the live
groups that are ready; while an answer stands, a fresh look at all groups would find no step either. The rules themselves are in
buffer/selection.py; what becomes of a group is decided in buffer/state.py, which calls this. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from asyncrl.buffer.books import BufferLimits
from asyncrl.buffer.events import NotEnough, Wait
from asyncrl.buffer.group import Group
from asyncrl.buffer.selection import Aged, Choice, choose_by_deadline, choose_oldest
from asyncrl.buffer.standing import StandingAnswer


class ReadyGroups:
    """What the next step may be made of.

    Args:
        limits: B, eta and the policy are read.
    """

    def __init__(self, limits: BufferLimits) -> None:
        self._limits = limits
        self._ready: dict[int, Group] = {}
        self._standing: StandingAnswer | None = None
        self._unexamined: dict[int, Group] = {}
        """Became ready since unfit groups were last looked for."""
        self._examined_step = -1

    def restore(self, groups: Iterable[Group]) -> None:
        """Fill an empty machine."""
        self._ready = {group.group_id: group for group in groups}

    # -- what happens to groups ------------------------------------------------------------------------------------------

    def add(self, group: Group) -> None:
        """Take in a group that became ready."""
        self._ready[group.group_id] = self._unexamined[group.group_id] = group
        if self._standing is not None:
            self._standing.group_done(group.group_id, is_ready=True)

    def ended(self, group_id: int) -> None:
        """Note that a live group, ready or not, was dropped or failed."""
        if self._ready.pop(group_id, None) is not None:
            self._standing = None
        elif self._standing is not None:
            self._standing.group_done(group_id, is_ready=False)

    def grew_older(self, group_id: int) -> None:
        """Note that an unfinished group turned out to be of another age than it seemed."""
        if self._standing is not None and self._standing.names(group_id):
            self._standing = None

    def group_placed(self) -> None:
        """Note that an unfinished group was handed out again: its age may be any."""
        self._standing = None

    def look_again(self) -> None:
        """Note that the learner went back: neither the answer nor what was examined holds."""
        self._standing, self._examined_step = None, -1

    # -- the next step ---------------------------------------------------------------------------------------------------

    def unfit(self, step: int) -> list[Group]:
        """Return the ready groups that cannot be trained at `step` without breaking the bound; each is told of once.

        So is a group without a pair, which became ready before a resume that asks for preferences.
        """
        unexamined = self._unexamined if step == self._examined_step else self._ready
        unfit = [group for group in unexamined.values() if group.group_id in self._ready and not self._is_fit(group, step)]
        self._unexamined, self._examined_step = {}, step
        return unfit

    def choose(self, step: int, live: Mapping[int, Group]) -> tuple[int, ...] | NotEnough | Wait:
        """Return the groups of `step`, ascending, or what it waits for; call `unfit` before.

        Args:
            step: The next one.
            live: All running, scoring and ready groups.
        """
        if self._standing is not None and self._standing.holds_for(step):
            return self._standing.now()
        self._standing = None
        choice = self._choice(step, self._ready.values(), live)
        if choice.take:
            return choice.take
        if choice.wait_for:
            self._standing = StandingAnswer(Wait(step, choice.wait_for, choice.why(step)), choice.missing)
        else:
            num_ready, needed = len(self._ready), self._limits.groups_per_step
            self._standing = StandingAnswer(NotEnough(step, num_ready, needed), needed - num_ready)
        return self._standing.now()

    def take(self, group_ids: tuple[int, ...]) -> list[Group]:
        """Give these groups away, in this order."""
        return [self._ready.pop(group_id) for group_id in group_ids]

    def check(self, next_step: int, live: Mapping[int, Group]) -> None:
        """Raise AssertionError where it holds other groups than the ready ones, or a standing answer is out of date."""
        assert self._ready.keys() == {group.group_id for group in live.values() if group.state == "ready"}, "ready is not"
        if self._standing is None or not self._standing.holds_for(next_step):
            return
        fit = [group for group in self._ready.values() if self._is_fit(group, next_step)]
        choice = self._choice(next_step, fit, live)
        assert not choice.take, f"step {next_step} could take {choice.take} and is told {self._standing}"

    def _choice(self, step: int, ready: Iterable[Group], live: Mapping[int, Group]) -> Choice:
        limits, aged = self._limits, _aged(ready)
        if limits.policy != "wait":
            return choose_oldest(aged, limits.groups_per_step)
        unfinished = _aged(group for group in live.values() if group.state != "ready")
        return choose_by_deadline(
            step, aged, unfinished, max_staleness=limits.max_staleness, groups_per_step=limits.groups_per_step
        )

    def _is_fit(self, group: Group, step: int) -> bool:
        age = group.newest if self._limits.policy == "mask" else group.oldest
        return bool(group.trained) and age >= step - self._limits.max_staleness


def _aged(groups: Iterable[Group]) -> list[Aged]:
    return [(group.oldest, group.group_id) for group in groups]
