"""The residency planner, case by case; tests/properties/test_residency.py has what holds for all."""

import pytest

from asyncrl.errors import ConfigError, ResidencyError
from asyncrl.residency.plan import GIB, Budget, Part, PhaseNeeds, check_phases, plan_switch


def test_a_phase_that_does_not_fit_adds_up():
    parts = [Part("policy", GIB), Part("policy optimizer", 2 * GIB, "host")]
    needs = PhaseNeeds("train", now=("policy", "policy optimizer"), working_bytes=GIB // 2)
    with pytest.raises(
        ResidencyError, match=r"(?s)policy  .*1.0000 GiB.*2.0000 GiB.*working memory.*sum .*3.5000.*too much .*0.5000"
    ):
        plan_switch(parts, needs, Budget(device_bytes=3 * GIB))


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
