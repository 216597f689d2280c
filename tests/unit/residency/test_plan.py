"""The residency planner, case by case; tests/properties/test_residency.py has what holds for all."""

import pytest

from asyncrl.errors import ConfigError, ResidencyError
from asyncrl.residency.plan import GIB, Budget, Part, PhaseNeeds, check_phases, plan_prefetch, plan_switch



def told(moves):
    return [(move.component, move.after) for move in moves]


def test_what_may_only_go_to_host_memory_pushes_others_on_to_disk():
    parts = [Part("engine weights", 6, places=frozenset({"device", "host"})), Part("policy", 4, "host")]
    moves = plan_switch(parts, PhaseNeeds("train", gives_back=True), Budget(host_bytes=8))
    assert told(moves) == [("policy", "disk"), ("engine weights", "host")]


def test_a_phase_that_does_not_fit_adds_up():
    parts = [Part("policy", GIB), Part("policy optimizer", 2 * GIB, "host")]
    needs = PhaseNeeds("train", now=("policy", "policy optimizer"), working_bytes=GIB // 2)
    with pytest.raises(
        ResidencyError, match=r"(?s)policy  .*1.0000 GiB.*2.0000 GiB.*working memory.*sum .*3.5000.*too much .*0.5000"
    ):
        plan_switch(parts, needs, Budget(device_bytes=3 * GIB))


def test_a_prefetch_goes_as_near_as_there_is_room():
    parts = [Part("policy", 4, "disk"), Part("policy optimizer", 8, "disk")]
    coming = PhaseNeeds("train", now=("policy", "policy optimizer"))
    giving = PhaseNeeds("rollout", gives_back=True)
    assert told(plan_prefetch(parts, giving, coming, Budget(host_bytes=6))) == [("policy", "host")]
    assert told(plan_prefetch(parts, PhaseNeeds("inference"), coming, Budget(device_bytes=5))) == [
        ("policy", "device"),
        ("policy optimizer", "host"),
    ]


def test_phases_that_cannot_fit_are_refused_at_start_with_the_sums_and_what_to_change():
    phases = [("rollout", {"KV cache": GIB}), ("train", {"policy": GIB, "policy optimizer": 2 * GIB, "gradients": GIB})]
    with pytest.raises(ConfigError) as raised:
        check_phases(phases, 3 * GIB)
    said = str(raised.value)
    assert "phase 'train'" in said
    assert "phase 'rollout'" not in said
    for line in (
        "policy optimizer            2.0000 GiB",
        "sum                         4.0000 GiB",
        "too much                    1.0000",
    ):
        assert line in said
    assert "device_memory_gib to at least 4.0000 GiB" in said
    assert said.index("adamw_8bit") < said.index("bfloat16")  # what helps most is said first
