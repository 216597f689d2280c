"""What is said of phases that do not fit; tests/properties/test_residency.py has what holds of all plans."""

import pytest

from asyncrl.errors import ConfigError
from asyncrl.residency.plan import GIB, check_phases


def test_phases_that_cannot_fit_are_refused_at_start_with_the_sums_and_what_to_change():
    phases = [("rollout", {"KV cache": GIB}), ("train", {"policy": GIB, "policy optimizer": 2 * GIB, "gradients": GIB})]
    sums = r"(?s)phase 'train'.*policy optimizer +2\.0000 GiB.*sum +4\.0000 GiB.*too much +1\.0000"
    with pytest.raises(ConfigError, match=sums) as raised:
        check_phases(phases, 3 * GIB)
    said = str(raised.value)
    assert "phase 'rollout'" not in said
    assert "device_memory_gib to at least 4.0000 GiB" in said
    assert said.index("adamw_8bit") < said.index("bfloat16")  # what helps most is said first
