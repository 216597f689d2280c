"""A move that fails. Switches that go well, and what is recorded of them, are in tests/unit/learner and in tests/integration."""

import pytest
import torch

from asyncrl.clock import SystemClock
from asyncrl.errors import ResidencyError
from asyncrl.residency.components import TensorComponent
from asyncrl.residency.device import SimulatedDevice
from asyncrl.residency.manager import ResidencyManager
from asyncrl.residency.plan import PhaseNeeds

SIZE = 16 * 16 * 4


def test_a_move_that_fails_leaves_the_phase_unreached_and_the_next_switch_goes_on(tmp_path):
    device, names = SimulatedDevice(2 * SIZE), ("policy", "critic")
    modules = [torch.nn.Linear(16, 16, bias=False) for _ in names]
    components = [TensorComponent.of_module(*each, device, tmp_path / "swap") for each in zip(names, modules, strict=True)]
    phases = [PhaseNeeds("rollout", gives_back=True), PhaseNeeds("train", now=names)]
    manager = ResidencyManager("learner", components, phases, device, SystemClock(), host_bytes=SIZE)
    assert {move.after for move in manager.switch("rollout", 0).moves} == {"host", "disk"}, "host memory holds one of them"
    others = device.take([SIZE])
    with pytest.raises(ResidencyError, match=r"(?s)'train' was not reached: no room for critic .*policy"):
        manager.switch("train", 1)
    assert (manager.phase, manager.resident) == ("rollout", {"policy": SIZE})
    del others
    moves = [(move.component, move.before, move.after) for move in manager.switch("train", 2).moves]
    assert moves == [("policy", "disk", "device"), ("critic", "host", "device")]
