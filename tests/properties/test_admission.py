"""The staleness bound under `wait`: however groups finish, weights arrive and room changes, nothing is ever too old or stuck.

Pure: the buffer's state machine alone, groups of one member that finish and are scored in one go, so that many schedules are
tried. A step is taken only when the buffer allows it, up to one ahead of the step being trained.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.buffer import events as ev
from asyncrl.buffer.group import BufferLimits
from asyncrl.buffer.state import BufferState


class Schedule:
    """Generators with weights of different ages, one buffer, one learner."""

    def __init__(self, groups_per_step: int, max_staleness: int, num_slots: list[int], as_needed: bool) -> None:
        limits = BufferLimits(groups_per_step, max_staleness, "wait", max_group_retries=1000, as_needed=as_needed)
        self.state, self.now = BufferState(limits), 0.0
        self.num_slots = num_slots
        self.live: dict[str, int] = {}
        self.running: dict[int, tuple[str, int]] = {}
        self.untrained: list[int] = []
        self.version = 0
        self.steps: list[tuple[int, ...]] = []
        self.issued_under: dict[int, int] = {}
        for number in range(len(num_slots)):
            self.come(number)

    def tell(self, event) -> None:
        self.now += 1.0
        assert self.state.handle(event, self.now) == []
        self.issue()

    def issue(self) -> None:
        while (issue := self.state.next_issue()) is not None:
            version = self.live[issue.generator]
            assert issue.version == version
            if isinstance(issue, ev.IssueGroup):
                group_id = self.state.next_group_id
                self.issued_under[group_id] = version
                self.state.handle(ev.GroupIssued(group_id, "p", 1, issue.generator, version), self.now)
            else:
                group_id = issue.group_id
                assert version >= self.issued_under[group_id], "a group goes on under older weights than it began with"
                self.state.handle(ev.GroupPlaced(group_id, issue.generator, version), self.now)
            self.running[group_id] = (issue.generator, version)

    def come(self, number: int) -> None:
        name = f"g{number % len(self.num_slots)}"
        if name not in self.live:
            self.live[name] = self.version
            self.tell(ev.GeneratorReady(name, self.num_slots[number % len(self.num_slots)], self.version))

    def go(self, number: int) -> None:
        name = f"g{number % len(self.num_slots)}"
        if self.live.pop(name, None) is not None:
            self.running = {group: held for group, held in self.running.items() if held[0] != name}
            self.tell(ev.GeneratorGone(name))

    def update(self, number: int) -> None:
        if self.live:
            name = sorted(self.live)[number % len(self.live)]
            self.live[name] = self.version
            self.tell(ev.VersionIsLive(name, self.version))

    def room(self, number: int) -> None:
        """Some engine's memory fills or empties."""
        if self.live:
            name = sorted(self.live)[number % len(self.live)]
            self.num_slots[int(name[1:])] = 1 + (number * 5 + len(self.steps)) % 7
            self.tell(ev.RoomChanged(name, self.num_slots[int(name[1:])]))

    def finish(self, number: int) -> None:
        """The group issued last but `number` finishes, its oldest token as old as it can be."""
        if self.running:
            newest_first = sorted(self.running, reverse=True)
            group_id = newest_first[number % len(newest_first)]
            generator, version = self.running.pop(group_id)
            self.state.handle(ev.SamplesFinished(group_id, (0,), (((version, 1),),)), self.now)
            (moved,) = self.state.handle(ev.SamplesScored(group_id, (0,), (0.0,)), self.now)
            assert isinstance(moved, ev.GroupMoved)
            self.tell(ev.MembersFinished(generator))

    def take(self, _: int = 0) -> ev.TakeGroups | ev.Wait:
        """Take the next step, at most one ahead of the one being trained."""
        if len(self.untrained) == 2:
            self.train()
        *dropped, decision = self.state.handle(ev.TakeStep(len(self.steps)), self.now)
        assert not dropped, f"wait dropped {dropped}"
        if isinstance(decision, ev.TakeGroups):
            assert decision.staleness.token_max <= self.state.limits.max_staleness
            self.steps.append(decision.group_ids)
            self.untrained.append(decision.step)
        return decision

    def train(self, _: int = 0) -> None:
        if self.untrained:
            step = self.untrained.pop(0)
            self.state.handle(ev.StepTrained(step), self.now)
            self.version = step + 1

    def check(self, held_before: dict[str, int]) -> None:
        """See that nobody has a group beyond its room of the moment, or none while there is one."""
        self.state.check_invariants()
        for name in self.live:
            held, room = sum(generator == name for generator, _ in self.running.values()), self.num_slots[int(name[1:])]
            assert held == self.state.pool.members_on(name)
            assert held <= max(held_before.get(name, 0), room + 1, 1), (name, held, room)
            if held == 0 and self.live[name] == self.version:
                assert self.state.capacity(self.version) <= 0, f"{name} may have a group and holds none"

    def everybody_works(self) -> None:
        """Finish what runs, train what is taken, bring every generator up to date."""
        for number in range(len(self.num_slots)):
            self.come(number)
        self.train()
        for number in range(len(self.live)):
            self.update(number)
        while self.running:
            self.finish(0)


@st.composite
def schedules(draw):
    # Mostly tight settings: they are where a wrong rule shows.
    schedule = Schedule(
        draw(st.integers(1, 3)), draw(st.integers(0, 3)), draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)),
        draw(st.booleans()),
    )  # fmt: skip
    acts = [schedule.finish, schedule.finish, schedule.take, schedule.take, schedule.train, schedule.update, schedule.room]
    if draw(st.booleans()):
        acts += [schedule.go, schedule.come]
    return schedule, [
        (acts[act % len(acts)], number)
        for act, number in draw(st.lists(st.tuples(st.integers(0, 23), st.integers(0, 2)), min_size=20, max_size=120))
    ]


@settings(max_examples=300)
@given(schedules())
def test_nothing_is_too_old_dropped_or_beyond_its_room_no_schedule_gets_stuck_and_eta_0_is_synchronous(drawn):
    schedule, acts = drawn
    for act, number in acts:
        held_before = {name: schedule.state.pool.members_on(name) for name in schedule.live}
        act(number)
        schedule.check(held_before)
    goal = len(schedule.steps) + 5
    for _ in range(8 * goal):
        if len(schedule.steps) == goal:
            break
        schedule.everybody_works()
        decision = schedule.take()
        schedule.state.check_invariants()
        assert isinstance(decision, ev.TakeGroups) or schedule.untrained or not schedule.running, decision
    else:
        raise AssertionError(f"stuck: {schedule.state.counts()}, {schedule.state.why_nothing_is_issued()}")
    if schedule.state.limits.max_staleness == 0:
        for step, group_ids in enumerate(schedule.steps):
            assert group_ids == tuple(range(step * len(group_ids), (step + 1) * len(group_ids)))
            assert {schedule.issued_under[group_id] for group_id in group_ids} == {step}
