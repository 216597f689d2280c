"""AReaL's capacity rule, against its own staleness manager."""

import json
from pathlib import Path

import pytest

from asyncrl.buffer.admission import capacity
from asyncrl.buffer.events import GeneratorReady, GroupDropped, GroupIssued, SamplesFinished, SamplesScored, VersionIsLive
from asyncrl.buffer.group import BufferLimits
from asyncrl.buffer.state import BufferState

CASES = json.loads((Path(__file__).parent / "numbers" / "staleness.json").read_text())["cases"]
NAMES = [case["name"] for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_capacity_is_that_of_areal_after_every_event(case):
    params, expected = case["params"], case["expected"]
    running = accepted = rejected = 0
    version = params["initial_version"]

    def now() -> int:
        return capacity(
            max_running=params["max_concurrent_rollouts"],
            running=running,
            accepted=accepted,
            version=version,
            lead_groups=params["max_staleness"] * params["consumer_batch_size"],
            groups_per_step=params["consumer_batch_size"],
        )

    assert now() == expected["initial_capacity"]
    capacities = []
    for event, *argument in case["inputs"]["events"]:
        if event == "submit":
            running += 1
        elif event == "version":
            version = argument[0]
        else:
            running -= 1
            accepted += event == "accept"
            rejected += event == "reject"
        capacities.append(now())
    assert capacities == expected["capacities"]
    assert (accepted, running, rejected) == (expected["accepted"], expected["running"], expected["rejected"])


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_admission_issues_exactly_what_areal_would_still_allow(case):
    """Fill up after every non-submit event: what is issued is the capacity, and then the capacity is 0."""
    params = case["params"]
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

    def fill() -> int:
        before = state.next_group_id
        while state.next_issue() is not None:
            state.handle(GroupIssued(state.next_group_id, "p", 1, "g", version), 0.0)
        return state.next_group_id - before

    assert fill() == case["expected"]["initial_capacity"]
    for event, *argument in case["inputs"]["events"]:
        running = [group.group_id for group in state.groups.values() if group.state == "running"]
        if event == "submit" or (event in ("accept", "reject") and not running):
            continue
        if event == "version":
            version = argument[0]
            state.handle(VersionIsLive("g", version), 0.0)
        elif event == "accept":
            state.handle(SamplesFinished(running[0], (0,), (((version, 1),),)), 0.0)
            state.handle(SamplesScored(running[0], (0,), (0.0,)), 0.0)
        else:
            state.handle(GroupDropped(running[0], "rejected"), 0.0)
        room = state.capacity(version)
        assert fill() == max(room, 0)
        assert state.capacity(version) == min(room, 0)
        state.check_invariants()
