"""Which generator gets the next group, and whether there may be one: AReaL's rule, with the version live on the generator.

Owns the counts of places: `accepted` (ready, taken or trained) and `running` (issued and not yet ready), and how many members
each generator holds. A group may start on generator g while
`(live_version_g + max_staleness + 1) * B - (accepted + running) > 0`. The version is the generator's, not the learner's: the
group's oldest token will carry it, and only so does the staleness proof in docs/buffer.md hold while weights are on their way.

Invariants: every place is held by exactly one live group; a dropped or failed group gives its place back; a group that is
handed out again keeps its place and goes first, oldest first, and only to a generator that is at least at the group's
version. A generator whose room shrinks below what it holds keeps that and gets no more until there is room again; one that holds
nothing always gets a group. Room never enters the staleness rule.

Pure: `handle(event, now) -> list[instruction]`. Called by the controller and by plan/simulate with the very same events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from asyncrl.generate.admission_events import (
    AdmissionEvent,
    AdmissionInstruction,
    GeneratorLeaving,
    GeneratorLost,
    GeneratorReady,
    GroupAdded,
    GroupGone,
    GroupIsReady,
    GroupLost,
    IssueGroup,
    IssueReturned,
    LimitSet,
    MembersFinished,
    MembersStarted,
    Paused,
    ReissueGroup,
    Resumed,
    RoomChanged,
    VersionIsLive,
)
from asyncrl.generate.least_loaded import Candidate, LeastLoaded

_NO_LIMIT = 1 << 62


def capacity(*, max_running: int, running: int, accepted: int, version: int, max_staleness: int, groups_per_step: int) -> int:
    """Return how many more groups may start; may be negative.

    Source: AReaL (arXiv 2505.24298), staleness control of the rollout controller.
    """
    return min(max_running - running, (version + max_staleness + 1) * groups_per_step - (accepted + running))


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What admission is configured with."""

    groups_per_step: int
    """B."""
    group_size: int
    """G."""
    max_staleness: int
    """Eta."""
    max_running_groups: int = 0
    """Most groups issued and not yet ready; 0: no limit but the slots."""
    queue_ahead_groups: int = 1
    """Groups a generator may hold beyond its slots, so that no slot waits for the controller."""
    max_groups: int | None = None
    """Most groups that may ever hold a place (num_steps x B); None: no end."""


@dataclass(slots=True)
class Admission:
    """The state machine.

    Args:
        limits: B, G, eta and the caps.
        running: Groups issued and not yet ready, after a resume.
        accepted: Groups ready, taken or trained, after a resume.

    Example:
        >>> admission = Admission(AdmissionLimits(groups_per_step=2, group_size=1, max_staleness=0))
        >>> [issue.generator for issue in admission.handle(GeneratorReady("generator-0", 8, 0), now=0.0)]
        ['generator-0', 'generator-0']
    """

    limits: AdmissionLimits
    running: int = 0
    accepted: int = 0
    paused: bool = False
    exhausted: bool = False
    _generators: LeastLoaded = field(init=False)
    _lost: dict[int, GroupLost] = field(default_factory=dict)
    _max_groups: int | None = None
    _handlers: dict[type, Callable[[Any], None]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._max_groups = self.limits.max_groups
        self._generators = LeastLoaded(self._has_room)
        self._handlers = {
            GeneratorReady: self._generator_ready,
            GeneratorLost: self._generator_lost,
            GeneratorLeaving: self._generator_leaving,
            RoomChanged: self._room_changed,
            VersionIsLive: self._version_is_live,
            MembersFinished: self._members_finished,
            MembersStarted: self._members_started,
            GroupIsReady: self._group_is_ready,
            GroupGone: self._group_gone,
            GroupAdded: self._group_added,
            GroupLost: self._group_lost,
            IssueReturned: self._issue_returned,
            Paused: self._paused,
            Resumed: self._resumed,
            LimitSet: self._limit_set,
        }

    def handle(self, event: AdmissionEvent, now: float) -> list[AdmissionInstruction]:  # noqa: ARG002 - the common signature
        """Take note of `event`; return what may be issued now, in order."""
        self._handlers[type(event)](event)
        if self.paused:
            return []
        instructions: list[AdmissionInstruction] = []
        if self._lost:
            self._place_lost(instructions)
        self._place_new(instructions)
        return instructions

    def capacity_on(self, generator: str) -> int:
        """Return how many more groups may start on this generator by the rule, its slots aside."""
        known = self._generators.get(generator)
        assert known is not None, f"no generator {generator!r}"
        return self._capacity_at(known.version)

    def why_nothing(self) -> str:
        """Return in words why no group is issued now; empty when one could be."""
        held = self.accepted + self.running
        newest = self._generators.newest_version
        allowed = (newest + self.limits.max_staleness + 1) * self.limits.groups_per_step
        reasons = (
            (self.paused, "paused"),
            (not len(self._generators), "no generator is ready"),
            (self.exhausted, "no prompt is left"),
            (newest < 0, "no generator has weights yet"),
            (self._max_groups is not None and held >= self._max_groups, "every group the run needs is issued"),
            (held >= allowed, f"the staleness bound: {held} groups hold a place, version {newest} allows {allowed}"),
            (self._capacity_at(newest) <= 0, f"{self.running} groups are running, the most that may"),
            (self._next_for_new() is None, "every generator that may get a group has its slots full"),
        )
        return next((reason for applies, reason in reasons if applies), "")

    def members_on(self, generator: str) -> int:
        """Return how many members this generator holds; 0 where it is unknown."""
        known = self._generators.get(generator)
        return known.members if known else 0

    def check_invariants(self) -> None:
        """Raise AssertionError where a count has become impossible."""
        assert self.running >= 0, f"running is {self.running}"
        assert self.accepted >= 0, f"accepted is {self.accepted}"
        assert len(self._lost) <= self.running, f"{len(self._lost)} groups to hand out again, but {self.running} running"
        for generator in self._generators:
            assert generator.members >= 0, f"{generator.name} holds {generator.members} members"
            assert generator.num_slots > 0, f"{generator.name} has {generator.num_slots} slots"

    def _capacity_at(self, version: int) -> int:
        limits = self.limits
        free = capacity(
            max_running=limits.max_running_groups or _NO_LIMIT,
            running=self.running,
            accepted=self.accepted,
            version=version,
            max_staleness=limits.max_staleness,
            groups_per_step=limits.groups_per_step,
        )
        if self._max_groups is None:
            return free
        return min(free, self._max_groups - self.accepted - self.running)

    def _has_room(self, generator: Candidate) -> bool:
        size = self.limits.group_size
        if generator.is_leaving:
            return False
        return generator.members == 0 or generator.members + size <= generator.num_slots + self.limits.queue_ahead_groups * size

    def _next_for_new(self) -> Candidate | None:
        if self._capacity_at(self._generators.newest_version) <= 0:
            return None
        # The rule allows every version from one on, and that one is found by division.
        lowest = (self.accepted + self.running) // self.limits.groups_per_step - self.limits.max_staleness
        generator = self._generators.best(max(lowest, 0))
        return generator if generator is not None and self._capacity_at(generator.version) > 0 else None

    def _place_lost(self, instructions: list[AdmissionInstruction]) -> None:
        for lost in sorted(self._lost.values(), key=lambda lost: lost.group_id):
            generator = self._generators.best(max(lost.version, 0))
            if generator is None:
                continue
            del self._lost[lost.group_id]
            self._generators.change(generator, members=generator.members + lost.num_members)
            instructions.append(ReissueGroup(lost.group_id, generator.name, generator.version, lost.num_members))

    def _place_new(self, instructions: list[AdmissionInstruction]) -> None:
        while not self.exhausted:
            generator = self._next_for_new()
            if generator is None:
                return
            self._generators.change(generator, members=generator.members + self.limits.group_size)
            self.running += 1
            instructions.append(IssueGroup(generator.name, generator.version))

    def _generator_ready(self, event: GeneratorReady) -> None:
        assert event.num_slots > 0, f"{event.name} has {event.num_slots} slots"
        self._generators.put(Candidate(event.name, event.num_slots, event.version))

    def _generator_lost(self, event: GeneratorLost) -> None:
        self._generators.remove(event.name)

    def _generator_leaving(self, event: GeneratorLeaving) -> None:
        generator = self._generators.get(event.name)
        if generator is not None:
            generator.is_leaving = True
            self._generators.change(generator)

    def _room_changed(self, event: RoomChanged) -> None:
        assert event.num_slots > 0, f"{event.generator} has {event.num_slots} slots"
        generator = self._generators.get(event.generator)
        if generator is not None:
            self._generators.change(generator, num_slots=event.num_slots)

    def _version_is_live(self, event: VersionIsLive) -> None:
        generator = self._generators.get(event.generator)
        if generator is not None:
            self._generators.change(generator, version=event.version)

    def _members_finished(self, event: MembersFinished) -> None:
        generator = self._generators.get(event.generator)
        if generator is not None:
            # A late sample of the process that bore this name before must not make the count negative.
            self._generators.change(generator, members=max(0, generator.members - event.num_members))

    def _members_started(self, event: MembersStarted) -> None:
        generator = self._generators.get(event.generator)
        if generator is not None:
            self._generators.change(generator, members=generator.members + event.num_members)

    def _group_is_ready(self, event: GroupIsReady) -> None:
        # Late samples of a dead generator can complete a group that still waits to be handed out again.
        self._lost.pop(event.group_id, None)
        self.running -= 1
        self.accepted += 1

    def _group_gone(self, event: GroupGone) -> None:
        self._lost.pop(event.group_id, None)
        if event.was_ready:
            self.accepted -= 1
        else:
            self.running -= 1

    def _group_added(self, _: GroupAdded) -> None:
        self.running += 1

    def _group_lost(self, event: GroupLost) -> None:
        self._lost[event.group_id] = event

    def _issue_returned(self, event: IssueReturned) -> None:
        self.running -= 1
        self.exhausted = True
        self._members_finished(MembersFinished(event.generator, self.limits.group_size))

    def _paused(self, _: Paused) -> None:
        self.paused = True

    def _resumed(self, _: Resumed) -> None:
        self.paused = False

    def _limit_set(self, event: LimitSet) -> None:
        self._max_groups = event.max_groups
