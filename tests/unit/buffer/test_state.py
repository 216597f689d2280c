import pytest

from asyncrl.algorithms.screening import Screen
from asyncrl.buffer import events as ev
from asyncrl.buffer.group import MOST_REASONS, OTHER_REASONS, BufferLimits, Group, GroupsRestored, choose, staleness_figures
from asyncrl.buffer.state import BufferState
from asyncrl.config.algorithm import PreferenceConfig


class Machine:
    """A state machine whose books are checked after every event."""

    def __init__(self, **limits):
        self.state = BufferState(BufferLimits(**{"groups_per_step": 1, "max_staleness": 1, **limits}))
        self.now = 0.0

    def __call__(self, event):
        self.now += 1.0
        instructions = self.state.handle(event, self.now)
        self.state.check_invariants()
        return instructions

    def issue(self, version=0, size=1, replaces=None):
        group_id = self.state.next_group_id
        self(ev.GroupIssued(group_id, f"p{group_id}", size, "g0", version, replaces))
        return group_id

    def done(self, group_id, index, *version_counts, reward=0.0, truncated=False):
        """Have one member finished and scored; return what follows from the score."""
        self(ev.SamplesFinished(group_id, (index,), (version_counts or ((0, 1),),), (index,) if truncated else ()))
        return self(ev.SamplesScored(group_id, (index,), (reward,)))

    def ready(self, version=0, rewards=(0.0,)):
        group_id = self.issue(version, len(rewards))
        for index, reward in enumerate(rewards):
            self.done(group_id, index, (version, 1), reward=reward)
        return group_id

    def take(self, step):
        return self(ev.TakeStep(step))[-1]


def test_wait_says_which_groups_it_waits_for_and_why():
    machine = Machine(max_staleness=1)
    machine.issue(version=0)
    machine.ready(version=0)
    machine.take(0)
    machine.ready(version=1)
    assert machine.take(1) == ev.Wait(1, "step 1 is the last chance of 1 group not finished yet")


@pytest.mark.timeout(20)
def test_a_bound_of_any_size_is_no_work():
    eta = 2**53
    limits = BufferLimits(groups_per_step=1, max_staleness=eta)
    old, fresh, running = (Group(number, "p", 1, version) for number, version in ((8, 0), (4, eta), (3, 0)))
    old.state = fresh.state = "ready"
    assert choose(1, [fresh, old, running], 2, limits) == (8,), "the earliest deadline goes first, whichever was issued first"
    assert choose(eta, [fresh, running], 1, limits) == ev.Wait(eta, f"step {eta} is the last chance of 1 group not finished yet")


def _half_done(machine, *, truncated=False):
    """Issue a group of two at version 0, of which the first member is scored and the second still being generated."""
    group = machine.issue(size=2)
    return group, machine.done(group, 0, (0, 3), (1, 2), truncated=truncated)


def test_drop_does_not_wait_for_the_rest_of_a_group_that_is_stale_whatever_comes():
    machine = Machine(policy="drop", max_staleness=0)
    group, scored = _half_done(machine)
    assert scored == []
    machine.ready()
    *dropped, taken = machine(ev.TakeStep(0))
    assert dropped == [ev.GroupMoved(group, "running", "dropped", "stale", "g0")]
    assert group in machine.state.returned
    assert isinstance(taken, ev.TakeGroups)
    late, dropped = _half_done(machine)
    assert dropped == [ev.GroupMoved(late, "running", "dropped", "stale", "g0")]
    assert machine(ev.SamplesFinished(late, (1,), (((1, 5),),))) == []


@pytest.mark.parametrize("limits", [
    {"policy": "mask"}, {"policy": "wait"}, {"policy": "drop", "max_staleness": 1},
    {"policy": "drop", "screen": Screen(mask_truncated=True)},
    {"policy": "drop", "screen": Screen(greedy_index=0)},
    {"policy": "drop", "screen": Screen(preference=PreferenceConfig())},
])  # fmt: skip
def test_a_group_that_may_still_be_trained_is_generated_to_its_end(limits):
    machine = Machine(**{"max_staleness": 0, **limits})
    machine(GroupsRestored((), (), next_group_id=1, dropped={}, failed={}, returned={}, forgotten_steps=1))
    group, scored = _half_done(machine, truncated=True)
    assert scored == []
    assert machine.state.groups[group].state == "running"


def test_failed_prompts_come_back_a_limited_number_of_times():
    machine = Machine(max_group_retries=2)
    group, returned = machine.issue(), 0
    while machine(ev.SampleFailed(group, 0, "raised")) and group in machine.state.returned:
        returned += 1
        group = machine.issue(replaces=group)
    assert returned == 2


def test_impossible_events_raise_with_the_groups_story():
    machine = Machine()
    group = machine.ready()
    with pytest.raises(AssertionError, match=r"SamplesScored\(group_id=0, indices=\(0,\), rewards=\(0.0,\)\)"):
        machine.state.handle(ev.GroupPlaced(group, "g1", 0), 9.0)


# -- screening -----------------------------------------------------------------------------------------------------------


def test_a_group_that_became_ready_before_pairs_were_asked_for_is_dropped_when_a_step_is_taken():
    machine = Machine(max_staleness=9)
    without, paired = machine.ready(rewards=[1.0, 1.0]), machine.ready(rewards=[1.0, 0.0])
    resumed = Machine(screen=Screen(preference=PreferenceConfig()), max_staleness=9)
    held = tuple(machine.state.groups.values())
    resumed(GroupsRestored(held, (), next_group_id=2, dropped={}, failed={}, returned={}, forgotten_steps=0))
    dropped, taken = resumed(ev.TakeStep(0))
    assert dropped == ev.GroupMoved(without, "ready", "dropped", "no pair")
    assert taken.group_ids == (paired,)


def test_a_group_without_its_greedy_member_fails_with_the_reason_of_that_member():
    machine = Machine(screen=Screen(greedy_index=2))
    group = machine.issue(size=3)
    machine(ev.SampleFailed(group, 2, "out of memory"))
    machine(ev.SampleFailed(group, 0, "timeout"))
    moved = ev.GroupMoved(group, "scoring", "failed", "no greedy baseline: out of memory")
    assert machine.done(group, 1) == [moved]


def test_tokens_that_are_not_trained_have_no_age():
    machine = Machine(screen=Screen(mask_truncated=True, greedy_index=2), max_staleness=1)
    machine.ready(rewards=[0.0] * 3)
    machine.take(0)
    group = machine.issue(size=3)
    for index, (version, truncated) in enumerate([(0, True), (1, False), (0, False)]):
        machine.done(group, index, (version, 5), reward=float(index), truncated=truncated)
    assert (machine.state.groups[group].oldest, machine.state.groups[group].trained) == (1, (1,))
    figures = machine.take(1).staleness
    assert (figures.num_samples, figures.num_tokens, figures.token_max) == (1, 5, 0)


def test_a_group_is_ready_with_enough_scored_members_and_failed_with_fewer():
    machine = Machine(min_group_members=2)
    enough, short = machine.issue(size=3), machine.issue(size=3)
    for group, failures in ((enough, 1), (short, 2)):
        for index in range(3):
            last = machine(ev.SampleFailed(group, index, "raised")) if index < failures else machine.done(group, index)
        assert last[0].after == ("ready" if group == enough else "failed")


def test_reasons_that_are_new_each_time_are_counted_together_from_some_number_on():
    state = BufferState(BufferLimits(groups_per_step=1, max_staleness=200))
    for group_id in range(2 * MOST_REASONS):
        state.handle(ev.GroupIssued(group_id, "p", 1, "generator-0", 0), now=0.0)
        state.handle(ev.SampleFailed(group_id, 0, f"cannot parse {group_id}"), now=0.0)
    failed = state.counts().failed
    assert len(failed) == MOST_REASONS + 1
    assert failed[OTHER_REASONS] == MOST_REASONS
    state.check_invariants()


def test_the_lead_learns_nothing_from_time_in_which_the_run_stood_still():
    machine = Machine(max_staleness=4, as_needed=True)

    def step(number):
        machine.ready(version=number)
        machine.take(number)
        machine.now += 1.0
        machine(ev.StepTrained(number))

    for number in range(4):
        step(number)
    waited = machine.state.lead.versions
    assert waited > 1.0, "each step was taken after the one before was trained"
    for pause in (ev.IssuePaused(), ev.LearnerRestarted(4)):
        machine(pause)
        machine.now += 1000.0
        machine(ev.IssueResumed())
        step(machine.state.next_step)
        assert machine.state.lead.versions == waited


# -- staleness ------------------------------------------------------------------------------------------------------------


def test_token_sample_in_flight_and_in_queue_parts():
    figures = staleness_figures(5, [((3, 10), (4, 30)), ((5, 10),)], queue_s=[1.0, 3.0])
    assert (figures.num_samples, figures.num_tokens, figures.token_max) == (2, 50, 2)
    assert figures.metrics == pytest.approx({
        "staleness/token_mean": (30 + 20) / 50, "staleness/token_max": 2, "staleness/masked_tokens": 0,
        "staleness/mean": 1.0, "staleness/max": 2, "staleness/in_flight_mean": 0.5, "staleness/in_flight_max": 1,
        "staleness/in_queue_mean": 0.5, "staleness/in_queue_max": 1, "queue/wait_mean_s": 2.0, "queue/wait_max_s": 3.0,
        "staleness/histogram/0": 0.2, "staleness/histogram/1": 0.6, "staleness/histogram/2": 0.2,
    })  # fmt: skip


def test_masked_tokens_are_counted_apart_and_a_wholly_masked_sample_not_at_all():
    figures = staleness_figures(5, [((1, 7), (4, 30)), ((2, 9),)], mask_below=3)
    assert (figures.num_samples, figures.num_tokens, figures.token_max) == (1, 30, 1)
    assert (figures.metrics["staleness/masked_tokens"], figures.metrics["staleness/in_flight_max"]) == (16, 0)
