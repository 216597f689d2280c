"""Random components, phases and budgets against the residency planner: what every plan keeps."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import ResidencyError
from asyncrl.residency.plan import Budget, Part, PhaseNeeds, plan_prefetch, plan_switch

NAMES = ["policy", "policy optimizer", "critic", "reference", "reward judge", "KV cache", "engine weights"]
PLACES = [frozenset({"device", "host", "disk"}), frozenset({"device", "disk"}), frozenset({"device", "host"})]


@st.composite
def parts_of(draw):
    parts = []
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1)):
        places = draw(st.sampled_from(PLACES))
        parts.append(Part(name, draw(st.integers(0, 20)), draw(st.sampled_from(sorted(places))), places))
    return parts


@st.composite
def needs_of(draw, names):
    order = draw(st.permutations(names))
    first, second = sorted(draw(st.tuples(st.integers(0, len(order)), st.integers(0, len(order)))))
    working = draw(st.integers(0, 10))
    return PhaseNeeds("train", tuple(order[:first]), tuple(order[first:second]), working, draw(st.booleans()))


@st.composite
def situations(draw):
    """Parts that fit their budgets as they lie, and a phase."""
    parts = draw(parts_of())
    held = {place: sum(part.num_bytes for part in parts if part.residence == place) for place in ("device", "host")}
    device, host = (draw(st.none() | st.integers(held[place], held[place] + 40)) for place in ("device", "host"))
    return parts, draw(needs_of([part.name for part in parts])), Budget(device, host), draw(st.sampled_from(["host", "disk"]))


def switch_or_refusal(situation):
    """Return the moves of a switch, or what is said instead."""
    try:
        return plan_switch(*situation)
    except ResidencyError as error:
        return str(error)


def replay(parts, moves, budget, reserved=0):
    """Carry moves out one by one, checking each against the budgets; return where everything is."""
    now = {part.name: part for part in parts}
    for move in moves:
        part = now[move.component]
        assert (move.before, move.num_bytes) == (part.residence, part.num_bytes)
        assert move.after in part.places
        assert move.after != move.before
        now[part.name] = replace(part, residence=move.after)
        held = {place: sum(p.num_bytes for p in now.values() if p.residence == place) for place in ("device", "host")}
        if move.after == "device" and budget.device_bytes is not None:
            assert held["device"] + reserved <= budget.device_bytes
        if move.after == "host" and budget.host_bytes is not None:
            assert held["host"] <= budget.host_bytes
    assert len({move.component for move in moves}) == len(moves)
    return now


@settings(max_examples=300)
@given(situations())
def test_a_switch_keeps_its_budgets_and_reaches_its_phase_or_what_is_refused_really_does_not_fit(situation):
    parts, needs, budget, offload_to = situation
    moves = switch_or_refusal(situation)
    if isinstance(moves, str):
        assert "GiB" in moves
        needed = sum(part.num_bytes for part in parts if part.name in needs.now) + needs.working_bytes
        assert (budget.device_bytes is not None and needed > budget.device_bytes) or "nowhere to go" in moves
        return
    now = replay(parts, moves, budget, needs.working_bytes)
    assert all(now[name].residence == "device" for name in needs.now)
    takes = [move.after == "device" for move in moves]
    assert takes == sorted(takes), "something is taken before all that leaves has left"
    if needs.gives_back:
        assert {name for name, part in now.items() if part.residence == "device"} == set(needs.now)
    assert plan_switch(list(now.values()), needs, budget, offload_to) == (), "a phase that is reached needs no moves"


@settings(max_examples=200)
@given(situations(), st.data())
def test_a_prefetch_takes_nothing_from_the_phase_that_is_on(situation, data):
    parts, needs, budget, _ = situation
    coming = data.draw(needs_of([part.name for part in parts]))
    moves = plan_prefetch(parts, needs, coming, budget)
    replay(parts, moves, budget, needs.working_bytes)
    assert all(move.before != "device" and move.component in coming.now for move in moves)
    if needs.gives_back:
        assert all(move.after == "host" for move in moves)
