"""The simulator: the production state machines (admission, buffer) under a virtual clock, with simulated generators and learner.

What is decided is decided by the very code that decides in a run: generate/admission.py says who gets a group, buffer/state.py
which groups a step takes. Here is only what takes time: decoding, scoring, training, weights on their way, failures.

Every event is (time, order, action): one heap, no threads, no sleeping. Called by plan/sweep.py, plan/validate.py and the
command line.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from asyncrl.buffer.books import BufferLimits
from asyncrl.buffer.events import (
    BufferEvent,
    BufferInstruction,
    GeneratorGone,
    GroupIssued,
    GroupMoved,
    GroupPlaced,
    Reissue,
    ReturnPrompt,
    SampleFinished,
    SampleScored,
    ScoreMember,
    StepsForgotten,
    StepTrained,
    TakeGroups,
    TakeStep,
)
from asyncrl.buffer.staleness import StalenessFigures, VersionCounts
from asyncrl.buffer.state import BufferState
from asyncrl.generate.admission import Admission, AdmissionLimits
from asyncrl.generate.admission_events import (
    AdmissionEvent,
    GeneratorLost,
    GeneratorReady,
    GroupGone,
    GroupIsReady,
    GroupLost,
    IssueGroup,
    MembersFinished,
    ReissueGroup,
    VersionIsLive,
)
from asyncrl.plan.scenario import Outcome, Scenario
from asyncrl.plan.simulated_generator import Member, SimulatedGenerator
from asyncrl.plan.tally import Tally


def simulate(scenario: Scenario) -> Outcome:
    """Run the scenario to its last step and return what it did.

    Example:
        >>> simulate(Scenario(num_steps=10)).lost_groups
        0
    """
    simulation = Simulation(scenario)
    simulation.run()
    return simulation.outcome()


class Simulation:
    """One simulated run."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        rng = np.random.default_rng(scenario.seed)
        self._length = scenario.lengths.drawer(rng)
        self._reward = scenario.reward_s.drawer(rng)
        self._step = scenario.step_s.drawer(rng)
        self._sync = scenario.sync_s.drawer(rng)
        self._rng = rng
        most_groups = scenario.num_steps * scenario.groups_per_step
        self._admission = Admission(
            AdmissionLimits(
                scenario.groups_per_step,
                scenario.group_size,
                scenario.max_staleness,
                scenario.max_running_groups,
                max_groups=most_groups,
            )
        )
        self._buffer = BufferState(BufferLimits(scenario.groups_per_step, scenario.max_staleness, scenario.policy))
        self._generators = {
            f"generator-{number}": SimulatedGenerator(f"generator-{number}", scenario)
            for number in range(scenario.num_generators)
        }
        self._lengths: dict[int, list[float]] = {}
        self._returned: deque[int] = deque()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now_s = 0.0
        self._tally = Tally()
        self._num_ready = 0
        self._version = 0
        self._in_hand: deque[tuple[int, float]] = deque()
        self._training = False
        self._idle_since_s = 0.0
        self._num_scoring = 0
        self._unscored: deque[ScoreMember] = deque()

    # -- the loop --------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Simulate until the last step is done."""
        for generator in self._generators.values():
            self._start(generator)
        while self._heap and self._version < self._scenario.num_steps:
            self._now_s, _, act = heapq.heappop(self._heap)
            self._tally.num_events += 1
            act()
        self._buffer.check_invariants()

    def _after(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self._now_s + delay_s, next(self._order), act))

    def _tell(self, event: AdmissionEvent) -> None:
        for instruction in self._admission.handle(event, self._now_s):
            if isinstance(instruction, IssueGroup):
                self._issue(instruction)
            else:
                self._reissue(instruction)

    def _enter(self, event: BufferEvent) -> None:
        self._follow(self._buffer.handle(event, self._now_s))

    # -- groups ----------------------------------------------------------------------------------------------------------

    def _issue(self, issue: IssueGroup) -> None:
        size, group_id = self._scenario.group_size, self._buffer.next_group_id
        replaces = self._returned.popleft() if self._returned else None
        self._enter(GroupIssued(group_id, "", size, issue.generator, issue.version, replaces))
        self._lengths[group_id] = [max(1.0, round(self._length())) for _ in range(size)]
        self._send(issue.generator, group_id, range(size))

    def _reissue(self, again: ReissueGroup) -> None:
        group = self._buffer.groups.get(again.group_id)
        pending = group.pending if group is not None and group.state == "running" else ()
        if len(pending) < again.num_members:
            self._tell(MembersFinished(again.generator, again.num_members - len(pending)))
        if pending:
            self._enter(GroupPlaced(again.group_id, again.generator, again.version))
            self._send(again.generator, again.group_id, pending)

    def _send(self, name: str, group_id: int, indices: Iterable[int]) -> None:
        generator = self._generators[name]
        lengths = self._lengths[group_id]
        members = [Member(group_id, index, 0, lengths[index]) for index in indices]
        life = generator.life

        def arrive() -> None:
            if generator.life == life:
                generator.go_to(self._now_s)
                generator.add(members, self._scenario.prefill_s)
                self._watch(generator)

        self._after(self._scenario.hop_s, arrive)

    def _watch(self, generator: SimulatedGenerator) -> None:
        """Expect the next finish; what was expected before is void."""
        generator.expectation += 1
        finish_s = generator.next_finish_s()
        if finish_s is None:
            return
        expected = generator.expectation

        def finish() -> None:
            if generator.expectation == expected:
                generator.go_to(self._now_s)
                for member, counts in generator.take_finished():
                    self._after(self._scenario.hop_s, _Finished(self, generator.name, member, counts))
                self._watch(generator)

        self._after(max(0.0, finish_s - self._now_s), finish)

    def sample_finished(self, name: str, member: Member, counts: VersionCounts) -> None:
        """Enter a sample; called by its event."""
        self._tally.generated_tokens += member.num_tokens
        self._enter(SampleFinished(member.group_id, member.index, counts))
        self._tell(MembersFinished(name))

    def _follow(self, instructions: Iterable[BufferInstruction]) -> None:
        for item in instructions:
            match item:
                case ScoreMember():
                    self._unscored.append(item)
                    self._score()
                case GroupMoved(group_id, before, after):
                    self._note_move(group_id, before, after)
                    if item.generator:
                        self._abort(self._generators[item.generator], group_id)
                case Reissue(group_id, _, indices, version):
                    self._tell(GroupLost(group_id, len(indices), version))
                case ReturnPrompt(group_id):
                    self._returned.append(group_id)
                case TakeGroups():
                    assert item.staleness is not None
                    self._batch_taken(item.step, item.group_ids, item.staleness)
                case _:
                    pass

    def _note_move(self, group_id: int, before: str, after: str) -> None:
        if after == "ready":
            self._num_ready += 1
            self._tell(GroupIsReady(group_id))
            self._take()
        elif after in {"dropped", "failed"}:
            self._num_ready -= before == "ready"
            self._lengths.pop(group_id, None)
            self._tell(GroupGone(group_id, was_ready=before == "ready"))

    def _abort(self, generator: SimulatedGenerator, group_id: int) -> None:
        """Have a generator stop at a group that is over; what it says of that frees its slots."""
        life = generator.life

        def stop() -> None:
            if generator.life == life:
                generator.go_to(self._now_s)
                num_aborted = generator.abort(group_id)
                self._watch(generator)
                if num_aborted:
                    self._after(self._scenario.hop_s, lambda: self._tell(MembersFinished(generator.name, num_aborted)))

        self._after(self._scenario.hop_s, stop)

    # -- rewards ---------------------------------------------------------------------------------------------------------

    def _score(self) -> None:
        workers = self._scenario.reward_workers
        while self._unscored and (not workers or self._num_scoring < workers):
            member = self._unscored.popleft()
            self._num_scoring += 1
            self._after(self._reward(), _Scored(self, member))

    def scored(self, member: ScoreMember) -> None:
        """Free the worker and have the score entered; called by its event."""
        self._num_scoring -= 1
        entered = SampleScored(member.group_id, member.index, 1.0)
        self._after(2 * self._scenario.hop_s, lambda: self._enter(entered))
        self._score()

    # -- the learner -----------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        """Take the next step's groups where the feed would."""
        step, scenario = self._buffer.next_step, self._scenario
        may = step < min(self._version + scenario.steps_ahead, scenario.num_steps)
        if may and self._num_ready >= scenario.groups_per_step:
            self._enter(TakeStep(step))

    def _batch_taken(self, step: int, group_ids: tuple[int, ...], figures: StalenessFigures) -> None:
        self._num_ready -= len(group_ids)
        for group_id in group_ids:
            self._lengths.pop(group_id)
        self._tally.taken.append(figures)
        self._in_hand.append((step, float(figures.num_tokens)))
        self._train()
        self._take()

    def _train(self) -> None:
        if self._training or not self._in_hand:
            return
        step, num_tokens = self._in_hand.popleft()
        self._training = True
        self._tally.idle_s.append(self._now_s - self._idle_since_s)
        self._after(
            self._step() + num_tokens * self._scenario.step_s_per_token + self._scenario.hop_s, lambda: self._trained(step)
        )

    def _trained(self, step: int) -> None:
        self._training, self._idle_since_s = False, self._now_s
        self._version = step + 1
        for generator in self._generators.values():
            generator.go_to(self._now_s)
        self._tally.step_done(self._now_s, sum(generator.busy_slot_s for generator in self._generators.values()))
        self._enter(StepTrained(step))
        self._enter(StepsForgotten(step))
        for generator in self._generators.values():
            generator.announced = self._version
            self._fetch(generator)
        self._train()
        self._take()

    # -- weights and failures --------------------------------------------------------------------------------------------

    def _start(self, generator: SimulatedGenerator) -> None:
        """Bring a generator up with the newest weights."""
        generator.go_to(self._now_s)
        generator.set_version(self._version)
        generator.announced = self._version
        self._tell(GeneratorReady(generator.name, self._scenario.num_slots, self._version))
        if self._scenario.failures_per_hour:
            self._after(self._rng.exponential(3600 / self._scenario.failures_per_hour), lambda: self._fail(generator))

    def _fetch(self, generator: SimulatedGenerator) -> None:
        if generator.fetching >= 0 or generator.version < 0 or generator.announced <= generator.version:
            return
        generator.fetching = version = generator.announced

        life = generator.life

        def live() -> None:
            if generator.life != life:
                return
            generator.fetching = -1
            generator.go_to(self._now_s)
            generator.hold(self._scenario.swap_s)
            generator.set_version(version)
            self._watch(generator)
            self._after(self._scenario.swap_s + self._scenario.hop_s, lambda: self._live(generator, version))
            self._fetch(generator)

        self._after(self._sync(), live)

    def _live(self, generator: SimulatedGenerator, version: int) -> None:
        if generator.version >= version:
            self._tell(VersionIsLive(generator.name, version))

    def _fail(self, generator: SimulatedGenerator) -> None:
        self._tally.lost_generators += 1
        generator.go_to(self._now_s)
        generator.lose_all()
        self._tell(GeneratorLost(generator.name))
        self._enter(GeneratorGone(generator.name))
        self._after(self._scenario.restart_s, lambda: self._start(generator))

    # -- what came of it -------------------------------------------------------------------------------------------------

    def outcome(self) -> Outcome:
        """Return the figures, the warm-up left out."""
        counts = self._buffer.counts()
        whole = Outcome(
            dropped_groups=sum(counts.dropped.values()),
            failed_groups=sum(counts.failed.values()),
            lost_groups=counts.issued - counts.total,
            simulated_s=self._now_s,
        )
        return self._tally.outcome(self._scenario, whole)


class _Finished:
    """A sample arrives at the controller."""

    __slots__ = ("_counts", "_member", "_name", "_simulation")

    def __init__(self, simulation: Simulation, name: str, member: Member, counts: VersionCounts) -> None:
        self._simulation, self._name, self._member, self._counts = simulation, name, member, counts

    def __call__(self) -> None:
        self._simulation.sample_finished(self._name, self._member, self._counts)


class _Scored:
    """A worker has a score."""

    __slots__ = ("_member", "_simulation")

    def __init__(self, simulation: Simulation, member: ScoreMember) -> None:
        self._simulation, self._member = simulation, member

    def __call__(self) -> None:
        self._simulation.scored(self._member)
