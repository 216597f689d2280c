from asyncrl.buffer.events import GroupIssued, GroupPlaced, NotEnough, SampleFinished, SampleScored, TakeGroups, TakeStep, Wait
from asyncrl.buffer.group import BufferLimits
from asyncrl.buffer.state import BufferState


def state_with(num_groups: int, *, groups_per_step: int = 2, max_staleness: int = 0) -> BufferState:
    state = BufferState(BufferLimits(groups_per_step=groups_per_step, max_staleness=max_staleness))
    for group_id in range(num_groups):
        state.handle(GroupIssued(group_id, "p", 1, "g", 0), 0.0)
    return state


def finish(state: BufferState, group_id: int, version: int = 0) -> None:
    state.handle(SampleFinished(group_id, 0, ((version, 3),)), 1.0)
    state.handle(SampleScored(group_id, 0, 1.0), 1.0)
    state.check_invariants()


def test_an_answer_counts_down_without_a_look_at_all_groups():
    state = state_with(4, max_staleness=2)
    assert state.handle(TakeStep(0), 0.0) == [NotEnough(0, 0, 2)]
    finish(state, 0)
    assert state.handle(TakeStep(0), 0.0) == [NotEnough(0, 1, 2)]
    finish(state, 3)
    assert isinstance(state.handle(TakeStep(0), 0.0)[-1], TakeGroups)


def test_those_still_waited_for_are_named():
    state = state_with(2)
    (wait,) = state.handle(TakeStep(0), 0.0)
    assert isinstance(wait, Wait)
    assert wait.group_ids == (0, 1)
    finish(state, 0)
    (wait,) = state.handle(TakeStep(0), 0.0)
    assert wait.group_ids == (1,)
    finish(state, 1)
    assert state.handle(TakeStep(0), 0.0)[-1].group_ids == (0, 1)


def test_a_group_that_was_placed_again_makes_the_answer_void():
    state = state_with(2, max_staleness=2)
    state.handle(TakeStep(0), 0.0)
    state.handle(GroupPlaced(0, "h", 0), 0.0)
    assert state.handle(TakeStep(0), 0.0) == [NotEnough(0, 0, 2)]
    state.check_invariants()
