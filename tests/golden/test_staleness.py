"""AReaL's capacity rule, against its own staleness manager."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.generate.admission import Admission, AdmissionLimits, capacity
from asyncrl.generate.admission_events import (
    GeneratorReady,
    GroupGone,
    GroupIsReady,
    Paused,
    Resumed,
    VersionIsLive,
)

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
            max_staleness=params["max_staleness"],
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
    admission = Admission(
        AdmissionLimits(
            groups_per_step=params["consumer_batch_size"],
            group_size=1,
            max_staleness=params["max_staleness"],
            max_running_groups=params["max_concurrent_rollouts"],
        )
    )
    issued = len(admission.handle(GeneratorReady("g", 10_000, params["initial_version"]), 0.0))
    assert issued == case["expected"]["initial_capacity"]
    for event, *argument in case["inputs"]["events"]:
        if event == "submit" or (event in ("accept", "reject") and not admission.running):
            continue
        admission.handle(Paused(), 0.0)
        admission.handle({"accept": GroupIsReady(0), "reject": GroupGone(0)}.get(event) or VersionIsLive("g", argument[0]), 0.0)
        room = admission.capacity_on("g")
        assert len(admission.handle(Resumed(), 0.0)) == max(room, 0)
        assert admission.capacity_on("g") == min(room, 0)
        admission.check_invariants()
