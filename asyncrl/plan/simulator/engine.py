"""The simulator: the production state machines (admission, buffer) under a virtual clock, with simulated generators and learner.

What is decided is decided by the very code that decides in a run: buffer/admission.py says who gets a group, buffer/state.py
which groups a step takes. Here is only what takes time: decoding, scoring, training, weights on their way, failures.

Every event is (time, order, action): one heap, no threads, no sleeping.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from asyncrl.buffer.events import (
    BufferEvent,
    BufferInstruction,
    GeneratorGone,
    GeneratorReady,
    GroupIssued,
    GroupMoved,
    GroupPlaced,
    IssueGroup,
    MembersFinished,
    ReissueGroup,
    ReturnPrompt,
    SampleFinished,
    SampleScored,
    ScoreMember,
    StepsForgotten,
    StepTrained,
    TakeGroups,
    TakeStep,
    VersionIsLive,
)
from asyncrl.buffer.group import BufferLimits
from asyncrl.buffer.staleness import StalenessFigures, VersionCounts
from asyncrl.buffer.state import BufferState
from asyncrl.plan.simulator.generator import Member, SimulatedGenerator
from asyncrl.plan.simulator.scenario import WARM_UP, Outcome, Scenario


def simulate(scenario: Scenario, on_step: Callable[[int], None] | None = None) -> Outcome:
    """Run the scenario to its last step and return what it did; `on_step` is told how many steps are done.

    Example:
        >>> simulate(Scenario(num_steps=10)).lost_groups
        0
    """
    simulation = Simulation(scenario, on_step)
    simulation.run()
    return simulation.outcome()


class Simulation:
    """One simulated run."""

    def __init__(self, scenario: Scenario, on_step: Callable[[int], None] | None = None) -> None:
        self._scenario = scenario
        self._on_step = on_step
        rng = np.random.default_rng(scenario.seed)
        self._length = scenario.lengths.drawer(rng)
        self._reward = scenario.reward_s.drawer(rng)
        self._step = scenario.step_s.drawer(rng)
        self._sync = scenario.sync_s.drawer(rng)
        self._rng = rng
        most_groups = scenario.num_steps * scenario.groups_per_step
        self._buffer = BufferState(
            BufferLimits(
                scenario.groups_per_step,
                scenario.max_staleness,
                scenario.policy,
                group_size=scenario.group_size,
                max_running_groups=scenario.max_running_groups,
                max_groups=most_groups,
            )
        )
        self._generators = {
            f"generator-{number}": SimulatedGenerator(f"generator-{number}", scenario) for number in range(scenario.num_workers)
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

    def _enter(self, event: BufferEvent) -> None:
        self._follow(self._buffer.handle(event, self._now_s))
        while (issue := self._buffer.next_issue()) is not None:
            if isinstance(issue, IssueGroup):
                self._issue(issue)
            else:
                self._reissue(issue)

    # -- groups ----------------------------------------------------------------------------------------------------------

    def _issue(self, issue: IssueGroup) -> None:
        size, group_id = self._scenario.group_size, self._buffer.next_group_id
        replaces = self._returned.popleft() if self._returned else None
        self._buffer.handle(GroupIssued(group_id, "", size, issue.generator, issue.version, replaces), self._now_s)
        self._lengths[group_id] = [max(1.0, round(self._length())) for _ in range(size)]
        self._send(issue.generator, group_id, range(size))

    def _reissue(self, again: ReissueGroup) -> None:
        self._buffer.handle(GroupPlaced(again.group_id, again.generator, again.version), self._now_s)
        self._send(again.generator, again.group_id, self._buffer.groups[again.group_id].pending)

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
                    self._after(self._scenario.hop_s, partial(self._sample_finished, generator.name, member, counts))
                self._watch(generator)

        self._after(max(0.0, finish_s - self._now_s), finish)

    def _sample_finished(self, name: str, member: Member, counts: VersionCounts) -> None:
        self._tally.generated_tokens += member.num_tokens
        self._enter(SampleFinished(member.group_id, member.index, counts))
        self._enter(MembersFinished(name))

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
            self._take()
        elif after in {"dropped", "failed"}:
            self._num_ready -= before == "ready"
            self._lengths.pop(group_id, None)

    def _abort(self, generator: SimulatedGenerator, group_id: int) -> None:
        """Have a generator stop at a group that is over; what it says of that frees its slots."""
        life = generator.life

        def stop() -> None:
            if generator.life == life:
                generator.go_to(self._now_s)
                num_aborted = generator.abort(group_id)
                self._watch(generator)
                if num_aborted:
                    self._after(self._scenario.hop_s, lambda: self._enter(MembersFinished(generator.name, num_aborted)))

        self._after(self._scenario.hop_s, stop)

    # -- rewards ---------------------------------------------------------------------------------------------------------

    def _score(self) -> None:
        workers = self._scenario.reward_workers
        while self._unscored and (not workers or self._num_scoring < workers):
            member = self._unscored.popleft()
            self._num_scoring += 1
            self._after(self._reward(), partial(self._scored, member))

    def _scored(self, member: ScoreMember) -> None:
        """Free the worker and have the score entered."""
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
        if self._on_step is not None:
            self._on_step(self._version)
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
        self._enter(GeneratorReady(generator.name, self._scenario.num_slots, self._version))
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
            self._enter(VersionIsLive(generator.name, version))

    def _fail(self, generator: SimulatedGenerator) -> None:
        self._tally.lost_generators += 1
        generator.go_to(self._now_s)
        generator.lose_all()
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


@dataclass(slots=True)
class Tally:
    """The notes of one run; lists are by step."""

    generated_tokens: float = 0.0
    lost_generators: int = 0
    num_events: int = 0
    taken: list[StalenessFigures] = field(default_factory=list)
    idle_s: list[float] = field(default_factory=list)
    """How long the learner had waited when it began the step."""
    done_s: list[float] = field(default_factory=list)
    _marks: list[tuple[float, float]] = field(default_factory=list)
    """Tokens generated by then, and the seconds that slots had been busy."""

    def step_done(self, now_s: float, busy_slot_s: float) -> None:
        """Note that the next step is trained, and how far generation is by then."""
        self.done_s.append(now_s)
        self._marks.append((self.generated_tokens, busy_slot_s))

    def outcome(self, scenario: Scenario, made: Outcome) -> Outcome:
        """Add the figures of the steps after the warm-up to what is known of the whole run."""
        num_done = len(self.done_s)
        done = self.taken[:num_done]
        made.num_events, made.lost_generators, made.step_times_s = self.num_events, self.lost_generators, self.done_s
        made.max_staleness = max((figures.token_max for figures in done), default=0)
        first = int(WARM_UP * num_done)
        counted = done[first + 1 :]
        if not counted:
            return made
        seconds = max(self.done_s[-1] - self.done_s[first], 1e-9)
        (tokens_before, busy_before_s), (tokens, busy_s) = self._marks[first], self._marks[-1]
        made.steps_per_s = len(counted) / seconds
        made.samples_per_s = made.steps_per_s * scenario.groups_per_step * scenario.group_size
        made.trained_tokens_per_s = sum(figures.num_tokens for figures in counted) / seconds
        made.generated_tokens_per_s = (tokens - tokens_before) / seconds
        made.mean_staleness = float(np.mean([figures.sample_mean for figures in counted]))
        made.learner_idle = sum(self.idle_s[first + 1 : num_done]) / seconds
        made.slots_used = (busy_s - busy_before_s) / (seconds * scenario.num_workers * scenario.num_slots)
        hourly = scenario.generator_price * scenario.num_workers + scenario.learner_price
        made.dollars_per_step = hourly / 3600 / made.steps_per_s
        return made
