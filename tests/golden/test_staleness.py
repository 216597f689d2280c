"""AReaL's capacity rule, against its own staleness manager."""

import pytest

from asyncrl.buffer.events import GeneratorReady, GroupDropped, GroupIssued, SamplesFinished, SamplesScored, VersionIsLive
from asyncrl.buffer.group import BufferLimits
from asyncrl.buffer.state import BufferState
from tests.golden.cases import cases


@pytest.mark.parametrize("case", cases("staleness"))
def test_after_every_event_capacity_is_that_of_areal_and_a_group_is_issued_where_there_is_some(case):
    params, expected = case["params"], case["expected"]
    state = BufferState(
        BufferLimits(
            groups_per_step=params["consumer_batch_size"],
            max_staleness=params["max_staleness"],
            max_running_groups=params["max_concurrent_rollouts"],
            reissue_dropped=False,
        )
    )
    version = params["initial_version"]
    state.handle(GeneratorReady("g", 10_000, version), 0.0)

    def look() -> int:
        state.check_invariants()
        room = state.capacity(version)
        assert (state.next_issue() is not None) == (room > 0)
        return room

    capacities = [look()]
    for event, *argument in case["inputs"]["events"]:
        running = [group.group_id for group in state.groups.values() if group.state == "running"]
        if event == "submit":
            state.handle(GroupIssued(state.next_group_id, "p", 1, "g", version), 0.0)
        elif event == "version":
            version = argument[0]
            state.handle(VersionIsLive("g", version), 0.0)
        elif event == "accept":
            state.handle(SamplesFinished(running[0], (0,), (((version, 1),),)), 0.0)
            state.handle(SamplesScored(running[0], (0,), (0.0,)), 0.0)
        else:
            state.handle(GroupDropped(running[0], "rejected"), 0.0)
        capacities.append(look())
    assert capacities == [expected["initial_capacity"], *expected["capacities"]]
    counts = state.counts()
    assert (counts.ready, counts.running) == (expected["accepted"], expected["running"])
    assert sum(counts.dropped.values()) == expected["rejected"]
