"""Random components, phases and budgets against the residency planner: what every plan keeps."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import ResidencyError
from asyncrl.residency.plan import Part, PhaseNeeds, plan_switch

NAMES = ["policy", "policy optimizer", "critic", "reference", "reward judge", "KV cache", "engine weights"]


@st.composite
def situations(draw):
    """Parts that fit their budgets as they lie, a phase, the budgets of device and host, and where to offload to."""
    names, places = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1)), ["device", "host", "disk"]
    parts = [Part(name, draw(st.integers(0, 20)), draw(st.sampled_from(places))) for name in names]
    held = {place: sum(part.num_bytes for part in parts if part.residence == place) for place in places[:2]}
    budgets = [draw(st.none() | st.integers(num_bytes, num_bytes + 40)) for num_bytes in held.values()]
    order = draw(st.permutations(names))
    first, second = sorted(draw(st.tuples(st.integers(0, len(order)), st.integers(0, len(order)))))
    working = draw(st.integers(0, 10))
    needs = PhaseNeeds("train", tuple(order[:first]), tuple(order[first:second]), working, draw(st.booleans()))
    return parts, needs, *budgets, draw(st.sampled_from(["host", "disk"]))


def replay(parts, moves, device_bytes, host_bytes, reserved):
    """Carry moves out one by one, checking each against the budgets; return where everything is."""
    now = {part.name: part for part in parts}
    for move in moves:
        part = now[move.component]
        assert (move.before, move.num_bytes) == (part.residence, part.num_bytes)
        assert move.after != move.before
        now[part.name] = replace(part, residence=move.after)
        held = {place: sum(p.num_bytes for p in now.values() if p.residence == place) for place in ("device", "host")}
        if move.after == "device" and device_bytes is not None:
            assert held["device"] + reserved <= device_bytes
        if move.after == "host" and host_bytes is not None:
            assert held["host"] <= host_bytes
    assert len({move.component for move in moves}) == len(moves)
    return now


@settings(max_examples=300)
@given(situations())
def test_a_switch_keeps_its_budgets_and_reaches_its_phase_or_what_is_refused_really_does_not_fit(situation):
    parts, needs, device_bytes, host_bytes, offload_to = situation
    needed = sum(part.num_bytes for part in parts if part.name in needs.now) + needs.working_bytes
    if device_bytes is not None and needed > device_bytes:
        with pytest.raises(ResidencyError, match="GiB"):
            plan_switch(*situation)
        return
    moves = plan_switch(*situation)
    now = replay(parts, moves, device_bytes, host_bytes, needs.working_bytes)
    assert all(now[name].residence == "device" for name in needs.now)
    takes = [move.after == "device" for move in moves]
    assert takes == sorted(takes), "something is taken before all that leaves has left"
    if needs.gives_back:
        assert {name for name, part in now.items() if part.residence == "device"} == set(needs.now)
    assert plan_switch(list(now.values()), needs, device_bytes, host_bytes, offload_to) == (), (
        "a phase that is reached needs no moves"
    )
